"""What a sweep starts for each of its points: ``swept.py CASE LENGTH STEPS ATTEMPTS_FILE``. It knows nothing of zerotop."""

import sys
import time

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.05 GiB is free. Of the allocated memory 76.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved "
    "by PyTorch but unallocated."
)


def train_length(length, steps):
    import torch

    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        ids = torch.randint(16, (2, length))
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)


def count_attempts(path):
    with open(path, "a+") as file:
        file.write("x")
        file.seek(0)
        return len(file.read())


case, length, steps, attempts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if case == "train":
    train_length(length, steps)
elif case == "flaky" and count_attempts(attempts) < 3:
    sys.exit("lost its connection")
elif case == "broken":
    sys.exit("no such thing")
elif case == "memory" or (case.isdecimal() and length > int(case)):  # a number: the longest that fits
    sys.exit(OUT_OF_MEMORY)
elif case == "hang":
    time.sleep(600)
