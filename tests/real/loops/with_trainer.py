"""A fine-tune with the Hugging Face Trainer, as small as can be. It knows nothing of zerotop.

The last thing each rank prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

LENGTH = 12


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.ids = torch.randint(64, (count, LENGTH), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Counting(Trainer):
    """Brings a prediction step of its own, as the trainers of other libraries do."""

    predictions = ()

    def prediction_step(self, model, inputs, *args, **kwargs):
        self.predictions += (list(inputs["input_ids"].shape),)
        return super().prediction_step(model, inputs, *args, **kwargs)


class Sampling(TrainerCallback):
    """Looks once at what the model writes, as many do."""

    def on_step_end(self, arguments, state, control, model, **_):
        if state.global_step == 3:
            model.generate(Rows(2).ids.to(model.device), max_new_tokens=4, do_sample=False)


def main():
    config, output = sys.argv[-2:]  # the deepspeed launcher puts --local_rank before them
    arguments = TrainingArguments(
        output_dir=output,
        deepspeed=None if config == "none" else config,
        max_steps=4,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=4,
        logging_steps=1,
        include_num_input_tokens_seen="all",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
    trainer = Counting(model, arguments, train_dataset=Rows(64), eval_dataset=Rows(12), callbacks=[Sampling()])
    trainer.train()
    counted = {
        "rank": arguments.process_index,
        "pid": os.getpid(),
        "global_step": trainer.state.global_step,
        "engine_steps": trainer.deepspeed.global_steps if trainer.deepspeed else None,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "tokens_of_all_ranks": trainer.state.num_input_tokens_seen,
        "predictions": trainer.predictions,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
    }
    # One write, so that the lines of two ranks do not mix.
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


if __name__ == "__main__":
    main()
