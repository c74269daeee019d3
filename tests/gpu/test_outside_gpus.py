"""NVML beside a real CUDA process."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from agents import events, python, records, wait_for
from zerotop_probe.outside import agent, control, gpus

pytestmark = pytest.mark.gpu

GIB = 1 << 30
# Holds 8 GiB, then computes without end and gets bytes over PCIe; says how many a second.
JOB = """
import time
import torch
held = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
pinned = torch.empty(256 << 20, dtype=torch.uint8).pin_memory()
print("ready")
while True:
    began = time.monotonic()
    for _ in range(20):
        for _ in range(20): b = a @ a
        held[: 256 << 20].copy_(pinned)
        torch.cuda.synchronize()
    print(20 * (256 << 20) / (time.monotonic() - began))
"""


@pytest.fixture(scope="module", autouse=True)
def _driver() -> None:
    seen, _ = gpus.look()
    if not seen.gpus:
        pytest.skip(str(seen.notice))


def test_a_cuda_process_is_seen(tmp_path: Path) -> None:
    started = agent.launch_in_background(str(tmp_path), python(JOB), grace_s=(2.0, 2.0))
    (node,) = wait_for(lambda: events(tmp_path, "node"))
    assert node["driver"]
    assert all(gpu["uuid"].startswith("GPU-") and gpu["name"] for gpu in node["gpus"])
    wait_for(
        lambda: (
            list(tmp_path.glob("output-*.log"))
            and b"ready" in next(tmp_path.glob("output-*.log")).read_bytes()
        ),
        120,
    )
    time.sleep(3)
    stopped_ns = time.monotonic_ns()
    copied = float(next(tmp_path.glob("output-*.log")).read_text().split()[-1])
    control.request_stop(str(tmp_path))
    wait_for(lambda: not started.alive())
    table = records(tmp_path, "gpus")
    (root,) = events(tmp_path, "job_started")
    last = table[(table["gpu"] == 0) & (table["time_ns"] < stopped_ns)][-10:]
    assert (last["total_bytes"] == node["gpus"][0]["total_bytes"]).all()
    assert (last["used_bytes"] > 8 * GIB).all()
    assert np.nanmean(last["utilization_percent"]) > 50
    assert (last["power_w"] > 50).all()
    assert ((last["temperature_c"] > 10) & (last["temperature_c"] < 110)).all()
    assert (last["sm_clock_mhz"] > 100).all()
    assert (last["throttle_reasons"] >= 0).all()
    # What the job says that it copied a second, and what the counters say.
    counted = np.diff(last["pcie_rx_bytes"][[0, -1]])[0] / (np.diff(last["time_ns"][[0, -1]])[0] / 1e9)
    print(f"copied {copied / 1e9:.2f} GB/s, counted {counted / 1e9:.2f} GB/s")
    assert copied == pytest.approx(counted, rel=0.3)
    assert 0.08 < np.median(np.diff(last["time_ns"])) / 1e9 < 0.15
    mine = records(tmp_path, "gpu_processes")
    mine = mine[mine["gpu"] == 0]
    assert mine["used_bytes"].max() > 8 * GIB
    assert root["pid"] in mine["pid"]
    assert events(tmp_path, "sampler_error") == []


def test_what_a_sample_costs() -> None:
    """Prints the time of each query on this driver; asserts only that there is an answer."""
    _, devices = gpus.look()
    for name, body in (
        ("row", lambda: devices[0].row(0, 1)),
        ("row with slow facts", lambda: devices[0].row(0, 0)),
        ("processes", lambda: devices[0].process_rows(0)),
    ):
        before, cpu = time.perf_counter(), time.process_time()
        for _ in range(200):
            body()
        wall, cpu = time.perf_counter() - before, time.process_time() - cpu
        print(f"{name}: {wall / 200 * 1e6:.0f} us, of which {cpu / 200 * 1e6:.0f} us of processor time")
    assert devices[0].row(0, 0)[1] > 0
