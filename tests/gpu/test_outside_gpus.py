"""NVML beside a real CUDA process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agents import build_python_command, read_node_events, read_node_records, wait_for
from zerotop_probe.outside.job import agent, job_control
from zerotop_probe.outside.sampling import nvml, pcie

pytestmark = pytest.mark.gpu

GIB = 1 << 30
# Holds 8 GiB, then computes as much as it is told and gets bytes over PCIe; says how many a second.
JOB = """
import sys, time
import torch
held = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
pinned = torch.empty(256 << 20, dtype=torch.uint8).pin_memory()
print("ready")
while True:
    began = time.monotonic()
    for _ in range(20):
        for _ in range(int(sys.argv[1])): b = a @ a
        held[: 256 << 20].copy_(pinned)
        torch.cuda.synchronize()
    print(20 * (256 << 20) / (time.monotonic() - began))
"""


@pytest.fixture(scope="module", autouse=True)
def _require_driver() -> None:
    seen, _ = nvml.discover_gpus()
    if not seen.gpus:
        pytest.skip(str(seen.notice))


def record_products(recording: Path, products: int) -> tuple[NDArray[Any], float]:
    """The rows of the last second of such a job on GPU 0, and the bytes a second that it says it got."""
    started = agent.launch_in_background(str(recording), [*build_python_command(JOB), str(products)], grace_s=(2.0, 2.0))

    def read_output() -> bytes:
        return b"".join(path.read_bytes() for path in recording.glob("output-*.log"))

    wait_for(lambda: b"ready" in read_output(), 120)
    time.sleep(3)
    stopped_ns = time.monotonic_ns()
    rate = float(read_output().split()[-1])
    job_control.request_stop(str(recording))
    wait_for(lambda: not started.is_alive())
    table = read_node_records(recording, "gpus")
    return table[(table["gpu"] == 0) & (table["time_ns"] < stopped_ns)][-10:], rate


def counted_rate(rows: NDArray[Any]) -> float:
    (received,), (elapsed_ns,) = (np.diff(rows[name][[0, -1]]) for name in ("pcie_rx_bytes", "time_ns"))
    return float(received / elapsed_ns * 1e9)


def test_a_cuda_process_is_seen(tmp_path: Path) -> None:
    last, copied = record_products(tmp_path, 20)
    (node,) = read_node_events(tmp_path, "node")
    assert node["driver"]
    assert all(gpu["uuid"].startswith("GPU-") and gpu["name"] for gpu in node["gpus"])
    (root,) = read_node_events(tmp_path, "job_started")
    assert (last["total_bytes"] == node["gpus"][0]["total_bytes"]).all()
    assert (last["used_bytes"] > 8 * GIB).all()
    assert np.nanmean(last["utilization_percent"]) > 50
    assert (last["power_w"] > 50).all()
    assert ((last["temperature_c"] > 10) & (last["temperature_c"] < 110)).all()
    assert (last["sm_clock_mhz"] > 100).all()
    assert (last["throttle_reasons"] >= 0).all()
    assert counted_rate(last) == pytest.approx(copied, rel=0.3)
    assert 0.08 < np.median(np.diff(last["time_ns"])) / 1e9 < 0.15
    mine = read_node_records(tmp_path, "gpu_processes")
    mine = mine[mine["gpu"] == 0]
    assert mine["used_bytes"].max() > 8 * GIB
    assert root["pid"] in mine["pid"]
    assert read_node_events(tmp_path, "sampler_error") == []


def test_counters_are_right_at_the_full_speed_of_the_link(tmp_path: Path) -> None:
    """Where the driver's counters wrap more than once a tick; they count packet headers too, some 8 %."""
    _, devices = nvml.discover_gpus()
    pace = pcie.choose_pace(len(devices), max(device.measure_read_cost() for device in devices))
    if pace.flowing_ticks > 1:
        pytest.skip(f"{len(devices)} GPUs are too many to look at their counters every 50 ms: {pace}")
    last, copied = record_products(tmp_path, 0)
    print(f"copied {copied / 1e9:.1f} GB/s, counted {counted_rate(last) / 1e9:.1f} GB/s")
    assert counted_rate(last) == pytest.approx(copied * 1.08, rel=0.15)


def test_each_query_of_the_driver_is_answered() -> None:
    """Prints the time of each query on this driver; asserts only that there is an answer."""
    _, devices = nvml.discover_gpus()
    for name, body in (
        ("row", lambda: devices[0].read_row(0, 1)),
        ("row with slow facts", lambda: devices[0].read_row(0, 0)),
        ("three looks at the byte counters", devices[0].measure_read_cost),
        ("processes", lambda: devices[0].read_process_rows(0, refresh=True)),
    ):
        before, cpu = time.perf_counter(), time.process_time()
        for _ in range(200):
            body()
        wall, cpu = time.perf_counter() - before, time.process_time() - cpu
        print(f"{name}: {wall / 200 * 1e6:.0f} us, of which {cpu / 200 * 1e6:.0f} us of processor time")
    used_bytes = devices[0].read_row(0, 0)[1]
    assert isinstance(used_bytes, int)
    assert used_bytes > 0
