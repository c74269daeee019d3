"""Train in attempts that fail: ``restarting.py FOLDER HOW...``, one word for each attempt.

``early`` raises before training; ``raise``, ``kill`` in step 7 of rank 0; ``good`` finishes.
"""

import os
import signal
import sys
from pathlib import Path

import torch

rank = int(os.environ.get("RANK", "0"))
marks = Path(sys.argv[1])
# A rank may be ended before it comes here; torchrun knows the attempt.
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", len(list(marks.glob(f"rank{rank}-*")))))
(marks / f"rank{rank}-{attempt}").touch()
how = sys.argv[2:][attempt]
torch.set_num_threads(1)
if how == "early":
    raise RuntimeError(f"no checkpoint in attempt {attempt}")
model = torch.nn.Linear(2048, 2048)  # a step takes about a tenth of a second
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    model(torch.randn(256, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 7 and rank == 0 and how == "raise":
        raise ValueError("planned")
    if step == 7 and rank == 0 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
