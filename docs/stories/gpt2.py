"""The Hugging Face Trainer on GPT-2 with random weights and made-up text in blocks of 1,024 tokens.

The batch size is the Trainer's default, 8, unless ``--batch-size`` says otherwise; an update always has 8 rows.
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

ROWS = 8


class Blocks(torch.utils.data.Dataset):
    def __init__(self, count, length, words):
        self.ids = torch.randint(words, (count, length), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    length, config = 1024, GPT2Config()
    if not on_gpu:
        length, config = 32, GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100)
    batch = {}
    if options.batch_size:
        batch = {
            "per_device_train_batch_size": options.batch_size,
            "gradient_accumulation_steps": ROWS // options.batch_size,
        }
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            save_strategy="no",
            logging_steps=5,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not on_gpu,
            **batch,
        )
        blocks = Blocks(ROWS * options.steps, length, config.vocab_size)
        Trainer(GPT2LMHeadModel(config), arguments, train_dataset=blocks).train()


if __name__ == "__main__":
    main()
