"""Variables of the environment that slow down each step, and what is said of the GPU's pace with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings.pace import costly_variables, data_stall, waits_for_launches
from zerotop.analysis.findings.support import Finding, Group, SearchWindow, detection, in_each_attempt
from zerotop.recording.samples import Samples
from zerotop_probe.inside.stacks.frames import PythonFrame
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import ALLOCATOR, BOUNDARY, GPUS, PROCESSES, SPANS, THREADS
from zerotop_probe.recording.writer import EventWriter

_CLOCK = {"monotonic_ns": 0, "unix_ns": BEGIN_NS}


def find(folder: Path, environment: dict[str, str], **facts: Any) -> dict[str, str]:
    """Return the severity of each kind of finding in a job with these variables of the environment."""
    return {one.name: one.severity.value for one in find_all(folder, environment, **facts)}


class Job(NamedTuple):
    """What steps of 0.1 s for 12 s are like, whose threads compute all the time."""

    sampled: Sequence[
        tuple[int, list[PythonFrame]]
    ] = ()  # stacks of step 7, innermost frame first, and how often each was seen
    sampled_s: int = 1  # when they were written
    between: tuple[float, float] = (0.0, 0.0)  # the share of the first 20 steps, and of all later ones, before forward
    lengths: tuple[float, float] = (0.1, 0.1)  # of the steps in turn
    threads: Mapping[str, float] = MappingProxyType({"python3": 1.0})  # the cores of each thread, the first one's first
    reserved_gib: Mapping[float, float] = MappingProxyType({})  # of a device of 10 GiB, from a second on
    failed_s: float | None = None  # when memory runs out
    engine: Mapping[str, Any] = MappingProxyType({"kind": "loop"})
    micro_steps: int = 1
    sizes: int = 1  # of the micro-batches, in turn
    others: Sequence[detection.Detector] = ()  # that look at it, too


def list_phases(begin: float, micro_steps: int) -> list[tuple[str, float, float]]:
    """Return the phases of a step from a share of it on, and their begins and ends as shares of it."""
    part = (0.9 - begin) / micro_steps
    begins = [begin + part * number for number in range(micro_steps)]
    micro = [(("forward", at, at + 0.4 * part), ("backward", at + 0.4 * part, at + part)) for at in begins]
    return [*(phase for pair in micro for phase in pair), ("step", 0.9, 0.999)]


def find_all(
    folder: Path, environment: dict[str, str], *, device: str = "cuda:0", busy: float = 55.0, **facts: Any
) -> tuple[Finding, ...]:
    """Write such a job; return what is found."""
    sampled, sampled_s, between, lengths, threads, reserved_gib, failed_s, engine, micro_steps, sizes, others = Job(**facts)
    times = [int(tick * S / 10) for tick in range(120)]
    spans = [
        make_span(
            at + length * begin, at + length * end, phase, step, BOUNDARY if phase == "step" else 0, tokens=64 + step % sizes
        )
        for step in range(120)
        for share in [between[step >= 20]]
        for at, length in [(step // 2 / 5 + (step % 2) * lengths[0], lengths[step % 2])]
        for phase, begin, end in list_phases(share, micro_steps)
    ]
    write_table(folder, SPANS, make_identity(0), *spans).close()
    node = make_identity(-1)
    gpus = (make_record(GPUS, time_ns=at, gpu=0, utilization_percent=busy) for at in times)
    write_table(folder, GPUS, node, *gpus).close()
    used = (make_record(PROCESSES, time_ns=at, pid=100, rank=0, cores_used=1.0) for at in times)
    write_table(folder, PROCESSES, node, *used).close()
    each = [
        make_record(THREADS, time_ns=at, pid=100, tid=100 + number, name=name.encode(), cores_used=cores)
        for at in times
        for number, (name, cores) in enumerate(threads.items())
    ]
    write_table(folder, THREADS, node, *each).close()
    levels = [0, *(round(size * 2**30) for size in reserved_gib.values())]
    held = [levels[sum(second * S <= at for second in reserved_gib)] for at in times]
    pairs = zip(times, held, strict=True)
    allocator = (
        make_record(ALLOCATOR, time_ns=at, device=0, reserved_bytes=size, reserved_peak_bytes=size) for at, size in pairs
    )
    write_table(folder, ALLOCATOR, make_identity(0), *allocator, peaks="window").close()
    writer = EventWriter(str(folder), make_identity(0), clock=_CLOCK)
    writer.write(0, events.Hello, rank=0, torch="2.11.0", environment=environment)
    devices = [{"ordinal": 0, "total_bytes": 10 * 2**30}] if reserved_gib else None
    writer.write(0, events.Engine, engine=0, device=device, devices=devices, **engine)
    for count, frames in sampled:
        named = [frame._asdict() for frame in frames]
        stacks = [{"count": count, "seconds": 0.1, "frames": list(range(len(frames)))}]
        seen: dict[str, Any] = {"where": "unknown phase", "why": "share", "step": 7, "last_step": 7, "samples": count}
        writer.write(sampled_s * S, events.Stacks, begin_ns=S // 2, end_ns=S, frames=named, stacks=stacks, **seen)
    if failed_s is not None:
        writer.write(int(failed_s * S), events.OutOfMemory, device=0, requested_bytes=2**30)
    writer.close()
    recording = read_recording(folder)
    runner = detection.Detection(recording, [costly_variables.detect, *others, waits_for_launches.detect])
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


@in_each_attempt()
def detect_stall(window: SearchWindow[Group]) -> Iterator[Finding]:
    """From step 60 on the rank waits for data, which is known with step 100."""
    steps = window.subject.lead.steps
    if len(steps) > 100:
        known_ns = int(steps["end_unix_ns"][100])
        yield data_stall.KIND.with_changes(headline="", details="", advice="", fix="").at_steps(
            window.subject, steps[60:], {}, known_ns=known_ns, cost=0.2
        )


def test_launches_are_not_the_reason_in_steps_that_wait_for_data(tmp_path: Path) -> None:
    """Steps 20 to 79 were judged to wait for launches, before the wait for data since step 60 was known."""
    (found,) = [one for one in find_all(tmp_path, {}, others=[detect_stall]) if one.name == "launch_bound"]
    assert str(found.headline) == "The GPU waited for launches 45 % of the time up to step 59"
    assert found.evidence["until_step"] == 59


@pytest.mark.parametrize(("lengths", "told"), [((0.08, 0.12), {"launch_bound": "info"}), ((0.04, 0.16), {})])
def test_launches_do_not_explain_steps_that_differ(
    tmp_path: Path, lengths: tuple[float, float], told: dict[str, str]
) -> None:
    """As those of a loop whose library plans anew for each new shape: the short ones launch as much."""
    assert find(tmp_path, {}, lengths=lengths) == told


LOOP = PythonFrame("train.py", 62, "main", own=True)
CALL = PythonFrame("torch/nn/modules/module.py", 1776, "Module._call_impl", own=False)
AT_LINE, BESIDE = (PythonFrame("net.py", line, "Relations.forward", own=True) for line in (39, 36))
LINEAR = PythonFrame("torch/nn/modules/linear.py", 134, "Linear.forward", own=False)
BACKWARD = PythonFrame("torch/autograd/graph.py", 869, "_engine_run_backward", own=False)


@pytest.mark.parametrize(
    ("sampled", "is_named"),
    [
        ([(9, [AT_LINE, CALL, LOOP]), (3, [BESIDE, CALL, LOOP]), (30, [BACKWARD, LOOP])], True),
        ([(9, [AT_LINE, CALL, LOOP]), (4, [BESIDE, CALL, LOOP])], False),
        ([(7, [AT_LINE, CALL, LOOP])], False),
        ([(9, [LINEAR, CALL, AT_LINE, CALL, LOOP])], False),
        ([(9, [AT_LINE, LOOP])], False),
        ([(9, [AT_LINE, CALL, BACKWARD, LOOP])], False),
    ],
    ids=["most of forward", "too little", "too few samples", "by a module", "outside the model", "run again in backward"],
)
def test_a_line_that_takes_most_of_forward_is_named(
    tmp_path: Path, sampled: list[tuple[int, list[PythonFrame]]], is_named: bool
) -> None:
    """As a loop over many small operations does, but no line that only calls modules."""
    (found,) = find_all(tmp_path, {}, sampled=sampled)
    assert ("In forward, most of the time goes to net.py:39 in Relations.forward." in found.details) is is_named
    assert found.advice.endswith("larger operations at net.py:39." if is_named else "larger operations.")


@pytest.mark.parametrize(
    ("sampled", "between", "told"),
    [
        ([(9, [LINEAR, CALL, AT_LINE, LOOP]), (6, [BACKWARD, LOOP]), (1, [BESIDE, LOOP])], (0.35, 0.35), True),
        ([(9, [LINEAR, CALL, AT_LINE, LOOP]), (6, [BACKWARD, LOOP]), (3, [BESIDE, LOOP])], (0.35, 0.35), False),
        ([(6, [LINEAR, CALL, AT_LINE, LOOP]), (2, [BACKWARD, LOOP])], (0.35, 0.35), False),
        ([(9, [LINEAR, CALL, AT_LINE, LOOP]), (6, [BACKWARD, LOOP])], (0.1, 0.35), False),
    ],
    ids=["in modules", "in another line", "too few samples", "grown"],
)
def test_a_model_may_run_between_the_phases(
    tmp_path: Path, sampled: list[tuple[int, list[PythonFrame]]], between: tuple[float, float], told: bool
) -> None:
    """As one that generates before it trains."""
    found = find(tmp_path, {}, sampled=sampled, sampled_s=7, between=between)
    assert ("launch_bound" in found) is told


@pytest.mark.parametrize(
    ("threads", "told"),
    [
        ({"python3": 0.4, "pt_autograd_0": 0.5}, True),
        ({"python3": 0.25, "pt_autograd_0": 0.2, "pt_gloo_runloop": 0.9}, False),  # gloo adds up gradients on the CPU
        ({}, False),  # unknown
    ],
)
def test_the_gpu_waits_for_launches_if_the_threads_that_launch_are_busy(
    tmp_path: Path, threads: dict[str, float], told: bool
) -> None:
    assert ("launch_bound" in find(tmp_path, {}, threads=threads)) == told


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
    assert ("more than 2 rows at once, which may need another learning rate" in last.advice) is is_offered
    assert not last.fix  # the names of a hand-written loop are not known
    assert "fewer, larger operations" in last.advice.lower()


_HF = {"library": "Trainer", "micro_batch": 2, "gradient_accumulation": 2, "compiled": False}
_DS = {"zero_stage": 1, "micro_batch": 2, "gradient_accumulation": 2, "train_batch": 8}
_RAISE = "aise {}, now 2, and half the accumulation: there is room for it"


@pytest.mark.parametrize(
    ("engine", "advice", "fix"),
    [
        ({"kind": "loop", "compiled": True}, "Train on more than 2 rows at once, and half the accumulation", ""),
        (_HF | {"kind": "loop"}, _RAISE.format("per_device_train_batch_size"), 'torch_compile_mode="reduce-overhead"'),
        (
            _HF | _DS,
            _RAISE.format("per_device_train_batch_size"),
            "per_device_train_batch_size=4, gradient_accumulation_steps=1",
        ),
        (
            _DS,
            _RAISE.format("train_micro_batch_size_per_gpu"),
            '"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1',
        ),
        (_DS | {"micro_batch": 8}, "Train on more than 2 rows at once", ""),  # an older configuration
    ],
    ids=["loop", "Trainer", "Trainer and DeepSpeed", "DeepSpeed", "other rows"],
)
def test_the_advice_names_only_settings_of_the_job(tmp_path: Path, engine: dict[str, Any], advice: str, fix: str) -> None:
    """Its steps accumulate over two micro-batches of 2 rows each, of which a GPU computes one at once."""
    (found,) = find_all(tmp_path, {}, reserved_gib={0.0: 2.0}, engine=engine, micro_steps=2)
    assert advice in found.advice
    assert found.fix == fix


@pytest.mark.parametrize(("sizes", "are_captured"), [(1, True), (3, True), (30, False)])
def test_graphs_are_no_advice_for_batches_of_many_sizes(tmp_path: Path, sizes: int, are_captured: bool) -> None:
    """Each of which they capture anew."""
    (found,) = find_all(tmp_path, {}, engine={"kind": "loop", "compiled": False}, sizes=sizes)
    assert ("CUDA graphs" in found.advice) is are_captured
    assert bool(found.fix) is are_captured


def test_no_rows_are_offered_while_memory_fills_by_itself(tmp_path: Path) -> None:
    last = find_all(tmp_path, {}, reserved_gib={0.0: 2.0, 7.0: 3.0})[-1]
    assert (last.name, "more than" in last.advice) == ("launch_bound", False)


@pytest.mark.parametrize(
    ("names", "fix"),
    [(["AdamW"], "fused=True"), (["AdamW", "SGD"], "fused=True"), (["Adam", "RMSprop"], "foreach=True")],
)
def test_only_some_optimizers_have_a_fused_update(tmp_path: Path, names: list[str], fix: str) -> None:
    optimizers = [{"class": name, "settings": {"foreach": False}} for name in names]
    (found,) = find_all(tmp_path, {}, engine={"kind": "loop", "optimizers": optimizers})
    assert found.fix == fix
    assert f"with {fix}" in found.advice


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
        assert waits_for_launches.read_held(cast("Any", process), steps) == (held, read)


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
