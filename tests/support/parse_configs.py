"""Print as JSON the result of DeepSpeed's own parser for each config after the Trainer has filled in "auto".

Arguments: config files. A process of its own, since torch, DeepSpeed and the Trainer take long to import.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"


def parse_config(path: Path) -> dict[str, Any]:
    from deepspeed.runtime.config import DeepSpeedConfig

    from zerotop.demo import finetune

    sys.argv = ["finetune.py", "--deepspeed", str(path), "--micro-batch", "3", "--gradient-accumulation", "5"]
    arguments = finetune.make_training_arguments(finetune.parse_arguments(), finetune.read_config(str(path)))
    filled = arguments.hf_deepspeed_config
    filled.trainer_config_finalize(arguments, SimpleNamespace(config=SimpleNamespace(hidden_size=64)), 100)
    config = DeepSpeedConfig(filled.config)
    zero = config.zero_config
    return {
        "stage": int(zero.stage),
        "optimizer": str(zero.offload_optimizer.device) if zero.offload_optimizer else "none",
        "params": str(zero.offload_param.device) if zero.offload_param else "none",
        "bf16": bool(config.bfloat16_config.enabled),
        "fp16": bool(config.float16_config.enabled),
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps,
        "autos": json.dumps(filled.config).count('"auto"'),
    }


if __name__ == "__main__":
    print(json.dumps({Path(path).stem: parse_config(Path(path)) for path in sys.argv[1:]}))
