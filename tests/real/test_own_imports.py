"""Jobs whose folder has modules with names of the standard library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from real_jobs import run_recorded
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import PHASE_CODE

# PyTorch does not import the first ones by itself, or survives such a file.
NAMES = ("statistics", "secrets", "cmd")
SCRIPT = """
import sys
if sys.argv[1] == "before":
    import statistics
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
import cmd, secrets, statistics
print(cmd.OWN, secrets.OWN, statistics.OWN, flush=True)
"""


@pytest.mark.parametrize("imported", ["before", "after"])
def test_the_probe_and_the_job_have_each_their_own_modules(
    tmp_path: Path, job_environment: dict[str, str], imported: str
) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"OWN = '{name} of the job'\n")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), imported]
    alone = subprocess.run(command, env=job_environment, capture_output=True, text=True, check=True)
    run = run_recorded(command, tmp_path, job_environment)
    assert run.returncode == 0, run.output
    assert alone.stdout == " ".join(f"{name} of the job" for name in sorted(NAMES)) + "\n"
    assert alone.stdout in run.output
    (spans,) = Recording.open(run.recording).sources["spans"]
    assert (spans.array["phase"] == PHASE_CODE["step"]).sum() == 20
