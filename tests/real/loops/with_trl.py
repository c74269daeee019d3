"""TRL's supervised fine-tuning with LoRA, as small as can be. It knows nothing of zerotop.

The last thing it prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import inspect
import json
import os
import sys

from datasets import Dataset
from peft import LoraConfig
from tiny_llama import make_model, make_tokenizer
from trl import SFTConfig, SFTTrainer


def main():
    model = make_model()
    arguments = SFTConfig(
        output_dir=sys.argv[1],
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    processing = {"processing_class": make_tokenizer()}
    if "processing_class" not in inspect.signature(SFTTrainer).parameters:  # before TRL 0.12
        processing = {"tokenizer": make_tokenizer(), "dataset_text_field": "text"}
    data = Dataset.from_list([{"text": "a b c d e f"}, {"text": "g h i j"}] * 8)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(model, args=arguments, train_dataset=data, peft_config=lora, **processing)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    counted = {
        "rank": 0,
        "pid": os.getpid(),
        "steps": trainer.state.global_step,
        "losses": losses,
        # By default on in newer versions of TRL; transformers has renamed the setting.
        "checkpoints": getattr(trainer.args, "activation_checkpointing", None) or trainer.args.gradient_checkpointing,
    }
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


main()
