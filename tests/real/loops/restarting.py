"""Train in attempts that fail: ``restarting.py FOLDER HOW...``, one word for each attempt.

``early`` raises before training; ``raise``, ``kill`` in step 7 of rank 0; ``good`` finishes.
"""

import os
import signal
import sys
import time
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
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
    if step == 7 and rank == 0 and how == "raise":
        raise ValueError("planned")
    if step == 7 and rank == 0 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
