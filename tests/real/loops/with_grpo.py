"""TRL's GRPO: it generates, asks a reference model, and trains on what it generated. It knows nothing of zerotop.

The last thing it prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import json
import os
import sys

from datasets import Dataset
from tiny_llama import make_model, make_tokenizer
from trl import GRPOConfig, GRPOTrainer


def main():
    path = os.path.join(sys.argv[1], "model")
    make_model().save_pretrained(path)  # the reference is loaded from there too
    arguments = GRPOConfig(
        output_dir=sys.argv[1],
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=2,
        num_iterations=2,  # updates with the same texts
        max_completion_length=8,
        beta=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    generated = []

    def reward_length(completions, **_):
        generated.append(len(completions))
        return [float(len(text)) for text in completions]

    data = Dataset.from_list([{"prompt": "a b c"}, {"prompt": "g h i j"}] * 8)
    trainer = GRPOTrainer(
        path, args=arguments, train_dataset=data, processing_class=make_tokenizer(), reward_funcs=reward_length
    )
    trainer.train()
    counted = {
        "rank": 0,
        "pid": os.getpid(),
        "steps": trainer.state.global_step,
        "generated": generated,
        "trained": sum(p.numel() for p in trainer.model.parameters()),
        "reference": sum(p.numel() for p in trainer.ref_model.parameters()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


main()
