"""A recording on a file system that stalls: the training goes on as if nothing had happened, and nothing is lost."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import stalling_files
from agents import AGENT, wait_for
from zerotop.analysis.views.job_exit import count_losses
from zerotop.analysis.views.notices import describe_notices
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording import directory

pytestmark = pytest.mark.real

STALL_S = 20.0
# Trains until a file tells it to end, and writes when each step ended.
LOOP = """
import json, os, sys, time
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
ends = []
while not os.path.exists(sys.argv[1] + ".end"):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.005)
    ends.append(time.monotonic())
with open(sys.argv[1], "w") as file:
    json.dump(ends, file)
"""


@pytest.fixture
def stalling_folder(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    folder = tmp_path / "mounted"
    folder.mkdir()
    command = [sys.executable, stalling_files.__file__, str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    if server.stdout.readline() != "ready\n":
        pytest.skip("no file system can be mounted here with FUSE")
    yield folder, server
    server.send_signal(signal.SIGCONT)
    stalling_files.unmount_folder(str(folder))
    server.kill()
    server.communicate()


def test_no_step_waits_for_a_stalled_file_system(
    stalling_folder: tuple[Path, subprocess.Popen[str]], tmp_path: Path
) -> None:
    folder, server = stalling_folder
    recording = Path(directory.create_recording(["python", "train.py"], path=str(folder / "recording")))
    times = tmp_path / "times"
    agent = subprocess.Popen([*AGENT, "--foreground", str(recording), "--", sys.executable, "-c", LOOP, str(times)])
    try:
        wait_for(lambda: any(path.stat().st_size > 10_000 for path in recording.glob("spans-rank0-*.rec")))
        time.sleep(3.0)
        server.send_signal(signal.SIGSTOP)
        begin_s = time.monotonic()
        time.sleep(STALL_S)
        server.send_signal(signal.SIGCONT)
        end_s = time.monotonic()
        time.sleep(3.0)
        Path(f"{times}.end").touch()
        assert agent.wait(30) == 0
    finally:
        server.send_signal(signal.SIGCONT)
        agent.kill()
        agent.wait()
    ends = np.array(json.loads(times.read_text()))
    durations, in_stall = np.diff(ends), (ends[1:] > begin_s) & (ends[1:] < end_s)
    assert in_stall.sum() > 100
    usual = statistics.median(durations[~in_stall])
    assert statistics.median(durations[in_stall]) < 3 * usual  # others may use the machine meanwhile
    assert durations[in_stall].max() < STALL_S / 2, "a step waited"
    planted = Recording.open(recording)
    assert read_steps(planted)["step"].tolist() == list(range(len(ends)))
    losses = count_losses(planted.at())
    assert losses.records == 0
    notices = describe_notices(planted.at(planted.last_written_ns), losses, ())
    (late,) = [text for text in notices if "late" in text]
    assert late.startswith("Records of rank 0 were written up to ")
    assert float(late.split("up to ")[1].split(" s ")[0]) > STALL_S - 2
