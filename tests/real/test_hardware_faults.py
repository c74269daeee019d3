"""A real job whose GPU fails in NVML's answers: named while the job runs, and the sampler goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from agents import read_node_events, wait_for
from played_nvml import PlayedNvml
from zerotop.analysis.findings import Detection, Finding, begin_detection
from zerotop.recording.reader import Recording

JOB = """
import os, sys, time, torch
class Slow(torch.nn.Module):
    def forward(self, inputs):
        time.sleep(0.05)
        return inputs
model = torch.nn.Sequential(Slow(), torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while not os.path.exists(sys.argv[1]):
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    open(sys.argv[1] + ".pid", "w").write(str(os.getpid()))
"""
# What NVML answers from a moment on, and the finding.
FAULTS = {
    "gpu_xid": "event 1 8 79",
    "gpu_event": "operational 1 GPU-RAS 23 2 40 0 1 0",
    "gpu_memory_faults": "1.field.4 1",
    "nvlink_faults": "1.link.3 0",
    "pcie_link": "1.pcie_width 8",
}
# From the fault to the finding, in seconds.
LATEST_S = 2.0


def test_each_fault_is_named_within_two_seconds_and_nvml_may_hang(tmp_path: Path) -> None:
    played, end, folder = PlayedNvml(tmp_path, 2), tmp_path / "end", tmp_path / "recording"
    program = ["env", "-u", "LD_LIBRARY_PATH", sys.executable, "-c", JOB, str(end)]
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder), "--", *program]
    with subprocess.Popen(command, env=played.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        try:
            pid = Path(f"{end}.pid")
            wait_for(lambda: pid.exists() and pid.read_text(), 60)
            played.add(f"pid 1 {pid.read_text()}")
            time.sleep(3)
            recording = Recording.open(folder)
            detection = begin_detection(recording)
            for name, line in FAULTS.items():
                began_ns = time.time_ns()
                played.add(line)
                finding = wait_for(_find(detection, recording, name))
                assert time.time_ns() - began_ns < LATEST_S * 1e9, name
                assert finding.known_ns - began_ns < LATEST_S * 1e9, name
                assert (finding.ranks, "GPU 1 of rank 0" in finding.headline) == ((0,), True)
            played.add("hang nvmlDeviceGetMemoryInfo 1", "hang nvmlDeviceGetNvLinkState 1")
            wait_for(_find(detection, recording, "nvml_silent"))
            hung_ns = time.time_ns()

            def read_gpus() -> Any:
                recording.refresh()
                arrays = [one.array[one.array["time_ns"] + one.offset_ns > hung_ns] for one in recording.sources["gpus"]]
                return set(rows["gpu"]) if len(rows := np.concatenate(arrays)) >= 10 else None

            assert wait_for(read_gpus) == {0}
        finally:
            end.touch()
        assert job.wait(30) == 0
    assert read_node_events(folder, "sampler_error") == []


def test_a_driver_that_hangs_at_the_begin_is_reported_and_delays_neither_job_nor_end(tmp_path: Path) -> None:
    played, end, folder = PlayedNvml(tmp_path, 2), tmp_path / "end", tmp_path / "recording"
    played.add("hang nvmlInitWithFlags -1")
    program = ["env", "-u", "LD_LIBRARY_PATH", sys.executable, "-c", JOB, str(end)]
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder), "--", *program]
    with subprocess.Popen(command, env=played.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        try:
            (event,) = wait_for(lambda: read_node_events(folder, "node") if folder.exists() else [], 60)
            assert (event["gpu_notice"], event["gpus"]) == ("The NVIDIA driver has not responded yet.", [])
            wait_for(Path(f"{end}.pid").exists, 60)
        finally:
            end.touch()
        began_s = time.monotonic()
        assert job.wait(30) == 0
        assert time.monotonic() - began_s < 15
    recording = Recording.open(folder)
    assert len(recording.sources["hosts"][0].array) >= 5


def _find(detection: Detection, recording: Recording, name: str) -> Callable[[], Finding | None]:
    def find() -> Finding | None:
        recording.refresh()
        detection.update()
        findings = detection.findings_at(recording.last_written_ns)
        return next((finding for finding in findings if finding.name == name), None)

    return find
