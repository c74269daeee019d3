"""A loop whose resident memory grows by one kind of pages: ``growing_memory.py KIND FOLDER``.

Prints the growth of each kind in the kernel's own words at its end.
"""

import itertools
import mmap
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

STEPS, BLOCK = 72, 12 << 20
kind, folder = sys.argv[1:]
kept = []
torch.set_num_threads(1)


def write_file(path):
    with open(path, "wb") as file:
        for _ in range(STEPS):
            file.write(b"x" * BLOCK)


def read_blocks(path):
    """Yield the blocks of a file that is mapped, as memmap and Arrow do."""
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    kept.append(content)
    for begin in range(0, len(content), BLOCK):
        yield content[begin : begin + BLOCK : 4096]


class Texts(Dataset):
    """A list that forked workers copy: reading an object changes its count of references."""

    def __init__(self):
        self.texts = [f"{number:050}" for number in range(800_000)]

    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, index):
        part = len(self.texts) // 8
        begin = index // 4 % 8 * part  # each worker reads all of them
        return sum(map(len, self.texts[begin : begin + part])) % 7


def sum_private(pids):
    """Return the KiB that only these processes have."""
    found = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(line.split()[1]) for text in found for line in text.splitlines() if line.startswith("Private_Dirty"))


def make_blocks():
    if kind == "list":
        for _ in range(STEPS):
            kept.append(bytearray(BLOCK))
            yield b""
    elif kind == "shared":
        for _ in range(STEPS):
            # Memory that is shared from the start: what share_memory_() copies from is not always given back.
            kept.append(torch.ByteTensor(torch.UntypedStorage._new_shared(BLOCK)).fill_(1))
            yield b""
    elif kind == "safetensors":
        from safetensors import safe_open
        from safetensors.torch import save_file

        path = os.path.join(folder, "blocks.safetensors")
        save_file({str(number): torch.ones(BLOCK // 4) for number in range(STEPS)}, path)
        with safe_open(path, "pt") as file:
            for number in range(STEPS):
                kept.append(file.get_tensor(str(number)))
                kept[-1].sum()
                yield b""
    elif kind == "workers":
        batches = iter(DataLoader(Texts(), 1, num_workers=4))
        for batch in itertools.islice(batches, 2 * STEPS):
            yield bytes(int(batch))
        kept.append(f"RssPrivate: {sum_private(worker.pid for worker in batches._workers)} kB")
    else:  # "mapped" on a disk, or "memory" in a folder of tmpfs
        path = os.path.join(folder, "blocks")
        write_file(path)
        yield from read_blocks(path)


model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for block in make_blocks():
    time.sleep(0.05)
    model(torch.full((4, 8), float(len(block) % 7))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
with open("/proc/self/status") as status:
    print(*[line.strip() for line in status if line.startswith("Rss")], *kept[-1:] if kind == "workers" else (), flush=True)
