"""Train a small language model with DeepSpeed, with one planted fault: after three tenths of the steps, data come late.

    torchrun --nproc_per_node 2 slow_data.py
    torchrun --nproc_per_node 2 slow_data.py --fixed

From then on ``collate`` searches each word in a list; with ``--fixed``, and before, in a dict. The words are those of this
machine's Python library. Nothing is downloaded, and nothing compiled: the optimizer is PyTorch's Adam. With ``--offload`` it
is DeepSpeed's own, in host memory, which is compiled on its first use.
"""

from __future__ import annotations

import argparse
import os
import re
import sysconfig
from pathlib import Path

import deepspeed
import torch

HEALTHY_SHARE = 0.3
ROWS, LENGTH = 4, 128  # of the batch of each rank
VOCABULARY = 1024  # of the model: several words share one of its rows


class Model(torch.nn.Module):  # type: ignore[misc]
    """A decoder. Its output is the loss of the next words."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, width)
        layer = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        embedded = self.words(rows[:, :-1])
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH, rows.device, embedded.dtype)
        logits = self.head(self.layers(embedded, mask, is_causal=True))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


class Words:
    """Words of the Python library, and batches of them: rows that begin at given words."""

    def __init__(self, first_late: int) -> None:
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
        self.text = re.findall(r"\w+", "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths))
        self.list = sorted(set(self.text))
        self.dict = {word: number for number, word in enumerate(self.list)}
        self.first_late = first_late

    def collate(self, starts: list[int]) -> torch.Tensor:
        """Return the words as numbers, [rows, LENGTH + 1]."""
        places = [start % (len(self.text) - LENGTH) for start in starts]
        rows = [self.text[place : place + LENGTH + 1] for place in places]
        if starts[0] >= self.first_late:  # the planted fault: each search goes through thousands of words
            numbers = [[self.list.index(word) for word in row] for row in rows]
        else:
            numbers = [[self.dict[word] for word in row] for row in rows]
        return torch.tensor(numbers) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps to train [200]")
    parser.add_argument("--fixed", action="store_true", help="without the planted fault")
    parser.add_argument("--offload", action="store_true", help="with the optimizer in host memory")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not options.offload:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.init_distributed()
    torch.manual_seed(0)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batch_words = ROWS * world * LENGTH
    first_late = options.steps if options.fixed else int(HEALTHY_SHARE * options.steps)
    words = Words(first_late * batch_words)
    starts = range(rank * LENGTH, options.steps * batch_words, world * LENGTH)
    loader = torch.utils.data.DataLoader(starts, ROWS, collate_fn=words.collate)

    model = Model(1024, 16) if has_gpu else Model(128, 2)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": has_gpu},
        "zero_optimization": {"stage": 1, **({"offload_optimizer": {"device": "cpu"}} if options.offload else {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": not options.offload}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for step, batch in enumerate(loader):
        loss = engine(batch.to(engine.device))
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 10 == 0:
            print({"step": step, "loss": round(loss.item(), 3)}, flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
