"""Run by a launcher: builds a small llama-8b as finetune.py builds the large one, prints what this rank holds.

Argument: a DeepSpeed config.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from zerotop.demo import finetune

SMALLER = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def main() -> None:
    finetune.PRESETS["llama-8b"].update(SMALLER)
    sys.argv = ["finetune.py", "--model", "llama-8b", "--deepspeed", sys.argv[1]]
    options = finetune.parse_arguments()
    finetune.prepare_environment()
    arguments = finetune.make_training_arguments(options, finetune.read_config(options.deepspeed))
    import deepspeed

    deepspeed.init_distributed()
    config = finetune.load_model_config(options.model, options.seq_length)
    model = finetune.build_model(options.model, config, torch.bfloat16, arguments.device)
    parameters = list(model.parameters())
    held = {
        "rank": arguments.process_index,
        "whole": sum(parameter.ds_numel for parameter in parameters),
        "materialized": sum(parameter.numel() for parameter in parameters),
        "partition": sum(parameter.ds_tensor.numel() for parameter in parameters),
    }
    print("held " + json.dumps(held), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


if __name__ == "__main__":
    main()
