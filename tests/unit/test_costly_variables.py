"""Variables of the environment that slow down each step, and what is said of the GPU's pace with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings.pace import costly_variables, host_pace
from zerotop.analysis.findings.support import Finding, detection
from zerotop.recording.samples import Samples
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import ALLOCATOR, BOUNDARY, GPUS, PROCESSES, SPANS
from zerotop_probe.recording.writer import EventWriter

_CLOCK = {"monotonic_ns": 0, "unix_ns": BEGIN_NS}


def find(folder: Path, environment: dict[str, str], **facts: Any) -> dict[str, str]:
    """Return the severity of each kind of finding in a job with these variables of the environment."""
    return {one.name: one.severity.value for one in find_all(folder, environment, **facts)}


def find_all(
    folder: Path,
    environment: dict[str, str],
    *,
    device: str = "cuda:0",
    busy: float = 55.0,
    reserved_gib: dict[float, float] | None = None,
    failed_s: float | None = None,
) -> tuple[Finding, ...]:
    """Write 12 s of steps of 0.1 s, whose thread computes all the time; return what is found.

    ``reserved_gib``: of a device of 10 GiB, from a second on; memory runs out at ``failed_s``.
    """
    times = [int(tick * S / 10) for tick in range(120)]
    spans = [
        make_span(step / 10 + begin, step / 10 + end, phase, step, BOUNDARY if phase == "step" else 0, tokens=64)
        for step in range(120)
        for phase, begin, end in (("forward", 0.0, 0.04), ("backward", 0.04, 0.09), ("step", 0.09, 0.0999))
    ]
    write_table(folder, SPANS, make_identity(0), *spans).close()
    node = make_identity(-1)
    gpus = (make_record(GPUS, time_ns=at, gpu=0, utilization_percent=busy) for at in times)
    write_table(folder, GPUS, node, *gpus).close()
    used = (make_record(PROCESSES, time_ns=at, pid=100, rank=0, cores_used=1.0) for at in times)
    write_table(folder, PROCESSES, node, *used).close()
    levels = [0, *(round(size * 2**30) for size in (reserved_gib or {}).values())]
    held = [levels[sum(second * S <= at for second in reserved_gib or {})] for at in times]
    pairs = zip(times, held, strict=True)
    allocator = (
        make_record(ALLOCATOR, time_ns=at, device=0, reserved_bytes=size, reserved_peak_bytes=size) for at, size in pairs
    )
    write_table(folder, ALLOCATOR, make_identity(0), *allocator, peaks="window").close()
    writer = EventWriter(str(folder), make_identity(0), clock=_CLOCK)
    writer.write(0, events.Hello, rank=0, torch="2.11.0", environment=environment)
    devices = [{"ordinal": 0, "total_bytes": 10 * 2**30}] if reserved_gib else None
    writer.write(0, events.Engine, engine=0, kind="loop", device=device, devices=devices)
    if failed_s is not None:
        writer.write(int(failed_s * S), events.OutOfMemory, device=0, requested_bytes=2**30)
    writer.close()
    recording = read_recording(folder)
    runner = detection.Detection(recording, [costly_variables.detect, host_pace.detect])
    runner.update()
    return runner.findings_at(recording.end_ns)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, {"launch_bound": "info"}),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, {"launch_bound": "info"}),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {"launches_block": "warning"}),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, {"caching_off": "warning"}),
    ],
)
def test_a_costly_variable_is_reported(tmp_path: Path, environment: dict[str, str], told: dict[str, str]) -> None:
    """And is the reason why the GPU waits, in place of the time of a launch."""
    assert find(tmp_path, environment) == told


@pytest.mark.parametrize(
    ("reserved_gib", "failed_s", "is_offered"),
    [
        ({0.0: 2.0}, None, True),
        ({0.0: 2.0}, 11.0, False),
        ({0.0: 2.0, 11.0: 7.0}, None, False),
        ({0.0: 7.0, 1.0: 2.0}, None, False),
    ],
)
def test_more_rows_are_advised_only_while_memory_has_never_been_full(
    reserved_gib: dict[float, float], failed_s: float | None, is_offered: bool, tmp_path: Path
) -> None:
    """Steps 20 to 79 are judged at 8 s; what is known later takes the advice back."""
    last = find_all(tmp_path, {}, reserved_gib=reserved_gib, failed_s=failed_s)[-1]
    assert last.name == "launch_bound"
    assert ("more than 2 rows" in last.advice) is is_offered
    assert ("batch_size=4" in last.fix) is is_offered
    assert "fewer, larger operations" in last.advice.lower()


def test_room_is_told_as_of_the_last_reading() -> None:
    """Steps 0 to 39 of 0.1 s, with the memory of step 5 alone; the ticker reads more, and last in step 31."""
    steps = np.zeros(40, [(name, "i8") for name in ("step", "begin_unix_ns", "end_unix_ns", "reserved_peak_bytes")])
    steps["step"], steps["begin_unix_ns"] = np.arange(40), np.arange(40) * S // 10
    steps["end_unix_ns"], steps["reserved_peak_bytes"] = steps["begin_unix_ns"] + S // 10, -1
    steps["reserved_peak_bytes"][5] = 3 << 30
    rows = np.array([(4 << 30, 5 << 30), (4 << 30, 4 << 30)], [("reserved_bytes", "i8"), ("reserved_peak_bytes", "i8")])
    for at, held, read in (((2.0, 3.15), 5 << 30, 31), ((), 3 << 30, 5)):
        samples = Samples(np.array([int(time * S) for time in at], np.int64), rows if at else np.empty(0))
        records = SimpleNamespace(read_window=lambda begin_ns, end_ns, samples=samples: samples)
        process = SimpleNamespace(records=lambda table, records=records: records)
        assert host_pace.read_held(cast("Any", process), steps) == (held, read)


def test_a_variable_costs_nothing_without_a_gpu(tmp_path: Path) -> None:
    assert find(tmp_path, {"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, device="cpu") == {}


def test_a_variable_is_no_warning_while_the_gpu_is_busy(tmp_path: Path) -> None:
    assert find(tmp_path, {"CUDA_LAUNCH_BLOCKING": "1"}, busy=97.0) == {"launches_block": "info"}


@pytest.mark.parametrize(
    ("name", "busy", "severity", "cost"),
    [
        ("CUDA_LAUNCH_BLOCKING", 30.0, "warning", 0.3),  # kernels would run during launches, which take most of the time
        ("CUDA_LAUNCH_BLOCKING", 70.0, "warning", 0.3),
        ("CUDA_LAUNCH_BLOCKING", 2.0, "info", 0.02),
        ("CUDA_LAUNCH_BLOCKING", float("nan"), "info", 0.0),  # NVML says nothing
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", 30.0, "warning", 0.7),
    ],
)
def test_a_variable_is_a_warning_if_it_costs_time(
    tmp_path: Path, name: str, busy: float, severity: str, cost: float
) -> None:
    (found,) = find_all(tmp_path, {name: "1"}, busy=busy)
    assert (found.severity.value, found.cost) == (severity, pytest.approx(cost))
