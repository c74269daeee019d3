"""A /dev/shm of the size that containers have by default: the worker's shortage is named, with the size and the remedy."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from real_jobs import BIN
from zerotop.analysis.findings import detect_findings
from zerotop.recording.reader import Recording

JOB = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset

class Batches(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        return torch.zeros(1 << 22 if index >= int(sys.argv[1]) else 8)

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for batch in DataLoader(Batches(), 8, num_workers=4, prefetch_factor=4):
    model(batch[:, :8]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
"""
MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm"

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        subprocess.run(["unshare", "-m", "sh", "-c", MOUNT], capture_output=True, check=False).returncode != 0,
        reason="this user may not mount file systems",
    ),
]


@pytest.mark.parametrize("first", [0, 160])
def test_the_shortage_is_named(first: int, tmp_path: Path, job_environment: dict[str, str]) -> None:
    """Before the first step, where no rank is known yet, and later. No batch fits."""
    script, recording = tmp_path / "job.py", tmp_path / "recording"
    script.write_text(JOB)
    run = [BIN / "zerotop", "run", "--headless", "--recording", recording, "--", sys.executable, script, str(first)]
    command = ["unshare", "-m", "sh", "-c", f"{MOUNT} && exec {shlex.join(map(str, run))}"]
    assert subprocess.run(command, env=job_environment, capture_output=True, timeout=200, check=False).returncode == 1
    planted = Recording.open(recording)
    (finding,) = [one for one in detect_findings(planted, planted.end_ns) if one.name == "dead_rank"]
    assert str(finding.headline).startswith("/dev/shm of 64.0 MiB is full: a DataLoader worker")
    assert "--shm-size" in finding.advice
    assert "--ipc=host" in finding.advice
