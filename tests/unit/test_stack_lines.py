"""Findings that name a line, on real recordings with stacks written into them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import recordings
from changed_recordings import change_table
from counted_recordings import count_steps
from declared_events import check_event
from in_pieces import find_in_pieces
from small_recording import BEGIN_NS, make_identity
from zerotop.analysis.code_line import CodeLine, find_own
from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop.analysis.findings.pace import repeated_pause, time_in_line
from zerotop.analysis.findings.support import Process
from zerotop.analysis.findings.support.causes.loader_causes import LoaderCause
from zerotop.analysis.findings.support.lines import line_findings
from zerotop.analysis.findings.support.lines.known_calls import find_known_call
from zerotop.analysis.findings.support.lines.stack_lines import BETWEEN, Delay, StackLine, is_training, select_stacks
from zerotop.analysis.formatting import Text
from zerotop.analysis.reports.finding_costs import rank_findings
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording.events import SampledFrame, SampledStack, Stacks
from zerotop_probe.recording.tables import BOUNDARY, PHASE_CODE

LOOP = ("train.py", 120, "main", True)
SLEEP = ([("train.py", 88, "build_batch", True), LOOP], "time.sleep")
COLLECT = ([("train.py", 60, "clean", True), LOOP], "gc.collect")
EMPTY = (
    [("torch/cuda/memory.py", 222, "empty_cache", False), ("train.py", 104, "main", True)],
    "torch._C._cuda_emptyCache",
)
LEFT = ([("train.py", 200, "<module>", True)], "__main__.main")
ITEM = ([("train.py", 90, "main", True)], "item")
SPREAD = [
    ([("src/data/long_name_of_a_module.py", 10 + line, "make.<locals>.tokenize.<locals>.<listcomp>", True), LOOP], "")
    for line in range(5)
]


def find_named(recording: Recording, name: str) -> Finding:
    (finding,) = [finding for finding in detect_findings(recording, recording.end_ns) if finding.name == name]
    return finding


def add_stacks(  # noqa: PLR0913
    folder: Path,
    found: Finding,
    stacks: list[Any],
    *,
    rank: int = 0,
    where: str,
    late_s: float = 0.0,
    begin_ns: int | None = None,
    seconds: float = 1.0,
    why: str = "slow",
) -> Recording:
    """Write samples of a rank, so many seconds for each stack, by default from the begin of a finding until it was known.

    ``late_s``: how long after the finding was known.
    """
    info = json.loads((folder / "session.json").read_text())
    (folder / "session.json").write_text(json.dumps(info | {"stacks": True}))
    (path,) = folder.glob(f"events-rank{rank}-*.jsonl")
    (source,) = [one for one in Recording.open(folder).sources["spans"] if one.rank == rank]
    frames = list(dict.fromkeys(frame for frames, _ in stacks for frame in frames))
    event = {
        "time_ns": found.known_ns - source.offset_ns + int(late_s * 1e9),
        "event": "stacks",
        "where": where,
        "why": why,
        "begin_ns": (found.begin_ns if begin_ns is None else begin_ns) - source.offset_ns,
        "end_ns": max(found.known_ns, begin_ns or 0) - source.offset_ns,
        "frames": [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in frames],
        "stacks": [
            {"count": 1, "seconds": seconds, "call": call, "frames": [frames.index(frame) for frame in inside]}
            for inside, call in stacks
        ],
    }
    check_event(event)
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
    return Recording.open(folder)


@pytest.mark.parametrize(
    ("stacks", "place", "line", "fix"),
    [
        ([SLEEP, SLEEP, ITEM], "train.py:88", "train.py:88 in build_batch (calls time.sleep)", "train.py:88"),
        ([COLLECT], "train.py:60", "train.py:60 in clean (calls gc.collect)", "train.py:60"),
        (
            [EMPTY],
            "train.py:104",
            "train.py:104 in main (calls torch.cuda.empty_cache)",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        (
            SPREAD,
            "...of_a_module.py:10",
            "src/data/long_name_of_a_module.py:10 in tokenize",
            "src/data/long_name_of_a_module.py:10",
        ),
    ],
)
def test_a_shift_names_the_line(tmp_path: Path, stacks: list[Any], place: str, line: str, fix: str) -> None:
    """The staged sleep of gpu-slow lies between the phases."""
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    before = find_named(Recording.open(folder), "iteration_shift")
    shift = find_named(add_stacks(folder, before, stacks, where="between phases"), "iteration_shift")
    assert shift.headline.endswith(f"from step {shift.step} on: {place}")
    assert len(shift.headline) <= 80
    assert f"between the phases (data, forward, backward, step), most of that at {line}." in shift.details
    assert line.partition(" in ")[0] in shift.advice
    assert (shift.fix, shift.known_ns) == (fix, before.known_ns)


@pytest.mark.parametrize(
    ("samples", "seconds", "why", "is_named"),
    [
        (1, 0.02, "slow", False),
        (2, 0.02, "slow", False),
        (3, 0.02, "slow", True),
        (1, 1.0, "slow", True),
        (1, 1.0, "share", False),  # one of usual slowness stands for all the time since the last
        (3, 1.0, "share", True),
    ],
)
def test_a_line_needs_samples_or_a_share_of_the_delay(
    tmp_path: Path, samples: int, seconds: float, why: str, is_named: bool
) -> None:
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    before = find_named(Recording.open(folder), "iteration_shift")
    recording = add_stacks(
        folder, before, [SLEEP] * samples, where="between phases", seconds=seconds, why=why, begin_ns=before.begin_ns + 1
    )
    shift = find_named(recording, "iteration_shift")
    assert (shift.headline.endswith(": train.py:88"), "train.py" in shift.advice) == (is_named, is_named)


def test_a_call_that_waits_for_an_idle_gpu_is_the_cause(tmp_path: Path) -> None:
    """The GPU's phases take as long as before. In ``hand-fp32`` they take longer, and the line that waits is not named."""
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    before = find_named(Recording.open(folder), "iteration_shift")
    shift = find_named(add_stacks(folder, before, [ITEM], where="between phases"), "iteration_shift")
    assert shift.headline.endswith("from step 20 on: train.py:90")
    assert "train.py:90 in main (calls item)." in shift.details
    longer = find_named(recordings.open_recording("hand-fp32"), "iteration_shift")
    assert "plants3.py" not in f"{longer.headline} {longer.details} {longer.advice} {longer.fix}"
    assert "The GPU works 59 ms longer: 40 ms in the backward phase, 19 ms in the forward phase" in longer.details


def test_stacks_of_another_place_or_time_are_not_named(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    before = find_named(Recording.open(folder), "iteration_shift")
    shift = find_named(add_stacks(folder, before, [SLEEP], where="forward"), "iteration_shift")
    assert shift.headline == before.headline
    assert before.known_ns < shift.known_ns <= before.known_ns + 3 * 10**9


def test_a_finding_waits_for_stacks_that_are_written_late(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    before = find_named(Recording.open(folder), "iteration_shift")
    recording = add_stacks(folder, before, [SLEEP], where="between phases", late_s=0.5)
    shift = find_named(recording, "iteration_shift")
    assert "train.py:88" in shift.headline
    assert shift.known_ns == before.known_ns + 5 * 10**8
    early = detect_findings(Recording.open(folder), before.known_ns + 5 * 10**8 - 1)
    assert "iteration_shift" not in [finding.name for finding in early]


def test_lines_after_the_last_step_explain_no_slow_step(tmp_path: Path) -> None:
    """Such as freeing the job's data: it is sampled a moment after the last steps have become slow."""
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    recording = Recording.open(folder)
    before = find_named(recording, "iteration_shift")
    last_ns = int(read_steps(recording)["end_unix_ns"].max())
    late_s = (last_ns - before.known_ns) / 1e9 + 0.2  # before it says goodbye
    assert 0 < late_s < 3
    for begin_ns in (last_ns + 10**6, last_ns - 10**6):
        recording = add_stacks(folder, before, [LEFT], where="between phases", late_s=late_s, begin_ns=begin_ns)
        shift = find_named(recording, "iteration_shift")
        assert ("train.py:200" in shift.headline) == (begin_ns < last_ns)


@pytest.mark.parametrize(
    ("recording", "name", "rank", "where"),
    [
        ("cpu-straggler", "straggler", 1, "data"),
        ("held-straggler", "straggler", 0, "between phases"),
        ("unseen-late-data", "data_stall", 0, "data"),
    ],
)
def test_waiting_ranks_name_the_line(tmp_path: Path, recording: str, name: str, rank: int, where: str) -> None:
    folder = recordings.unpack_to_folder(recording, tmp_path)
    before = find_named(Recording.open(folder), name)
    assert before.ranks == (rank,)
    findings = find_named(add_stacks(folder, before, [SLEEP], rank=rank, where=where, seconds=3.0), name)
    assert re.sub(r"\d+", "N", str(findings.headline)) == re.sub(r"\d+", "N", str(before.headline)) + ": train.py:N"
    assert "most of it at train.py:88 in build_batch (calls time.sleep)" in findings.details
    assert "py-spy" not in findings.fix


def test_a_constant_wait_names_the_line_of_later_samples(tmp_path: Path) -> None:
    """They were all taken after the steps with which the wait was known."""
    folder = recordings.unpack_to_folder("unseen-late-data", tmp_path)
    before = find_named(Recording.open(folder), "data_stall")
    recording = add_stacks(folder, before, [SLEEP] * 3, where="data", late_s=0.5, begin_ns=before.known_ns + 10**8)
    (found,) = [one for one in detect_findings(recording, before.known_ns + 6 * 10**8) if one.name == "data_stall"]
    assert found.headline.endswith(" iteration: train.py:88")


@pytest.mark.parametrize("is_loading", [True, False])
def test_counted_steps_name_the_line_that_loads_data(tmp_path: Path, is_loading: bool) -> None:
    """Their samples have no phase: the stack shows whether the training thread waits for data."""
    folder = recordings.unpack_to_folder("unseen-late-data", tmp_path)
    before = find_named(Recording.open(folder), "data_stall")
    fetch = [("torch/utils/data/_utils/fetch.py", 41, "fetch", False)] if is_loading else []
    tokenize = ([("train.py", 88, "__iter__", True), *fetch, LOOP], "re.Pattern.findall")
    model = ([("torch/nn/modules/module.py", 1775, "forward", False), LOOP], "torch.nn.Linear.forward")
    recording = add_stacks(folder, before, [tokenize, model, model, model], where="unknown phase")
    found = find_named(recording, "data_stall")
    assert found.headline.endswith(" iteration: train.py:88" if is_loading else " iteration")


def test_a_drift_names_the_line(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("held-drift", tmp_path)
    before = find_named(Recording.open(folder), "iteration_drift")
    assert "between the phases" in before.details
    drift = find_named(add_stacks(folder, before, [SLEEP], where="between phases"), "iteration_drift")
    assert drift.headline == before.headline
    assert (
        "between the phases (data, forward, backward, step), most of that at train.py:88 in build_batch (calls time.sleep)."
        in drift.details
    )
    assert "train.py:88" in drift.advice


def test_frames_that_do_not_exist_are_no_line(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    before = find_named(Recording.open(folder), "iteration_shift")
    add_stacks(folder, before, [([("a\x1b[31m.py", 1, "f", True)], "")], where="between phases")
    (path,) = folder.glob("events-rank0-*.jsonl")
    path.write_text(path.read_text().replace('"frames": [0]', '"frames": [7, -1]', 1))
    assert find_named(Recording.open(folder), "iteration_shift").headline == before.headline


def add_pauses(
    folder: Path, stack: Any, *, why: str, samples: int, count: int = 0, where: str = "between phases"
) -> Recording:
    """Write that rank 0 was sampled at the end of each step, between the phases or in a step that was counted."""
    recording = Recording.open(folder)
    (source,) = [one for one in recording.sources["spans"] if one.rank == 0]
    ends = [span["end_ns"] for span in source.array if span["flags"] & BOUNDARY]
    (path,) = folder.glob("events-rank0-*.jsonl")
    frames = [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in stack[0]]
    for begin, end in pairwise(map(int, ends)):
        event = {
            "time_ns": end,
            "event": "stacks",
            "where": where,
            "why": why,
            "begin_ns": begin,
            "end_ns": end,
            "samples": samples,
            "frames": frames,
            "stacks": [{"count": count, "seconds": 0.02, "call": stack[1], "frames": list(range(len(frames)))}],
        }
        check_event(event)
        with path.open("a") as file:
            file.write(json.dumps(event) + "\n")
    return Recording.open(folder)


@pytest.mark.parametrize(
    ("stack", "severities", "advice"),
    [
        (SLEEP, [Severity.WARNING], "Remove the pause at train.py:88, if nothing needs it"),
        ((SLEEP[0], "print"), [Severity.WARNING], "Print less at train.py:88, or in fewer iterations"),
        ((SLEEP[0], "copy.deepcopy"), [Severity.WARNING], "Copy at train.py:88 into an object that exists"),
        ((SLEEP[0], "json.dumps"), [Severity.INFO], ""),  # the job may be meant to
        (([LOOP], "torch.nn.functional.cross_entropy"), [], ""),  # the training itself
        (ITEM, [], ""),  # the GPU computes meanwhile
    ],
)
def test_a_constant_share(tmp_path: Path, stack: Any, severities: list[Severity], advice: str) -> None:
    """In this recording most of an iteration lies between the phases, where the script waits for the GPU."""
    recording = add_pauses(
        recordings.unpack_to_folder("gpu-trainer-gpt2", tmp_path), stack, why="share", samples=20, count=20
    )
    findings = [one for one in detect_findings(recording, recording.end_ns) if one.name == "time_between_phases"]
    assert [one.severity for one in findings] == severities
    assert all(one.advice.startswith(advice) and bool(one.advice) is bool(one.fix) is bool(advice) for one in findings)
    assert {one.headline for one in findings} <= {"87 % of each 192 ms iteration is spent between the phases: train.py:88"}
    assert all(one.details.startswith("In steps 1 to 3, 167 ms of it are outside data, forward,") for one in findings)


CALL = ("torch/nn/modules/module.py", 1780, "Module._call_impl", False)
EVALUATE = ("train.py", 60, "evaluate", True)
IN_EVALUATION = [("model.py", 6, "Block.forward", True), CALL, ("model.py", 24, "Net.forward", True), CALL, EVALUATE, LOOP]
IN_LOSS = [("losses.py", 12, "Distance.forward", True), CALL, EVALUATE, LOOP]


@pytest.mark.parametrize(("frames", "line"), [(IN_EVALUATION, 60), (IN_LOSS, 12)], ids=["model", "loss"])
def test_a_model_between_the_phases_is_at_the_line_that_calls_it(frames: list[Any], line: int) -> None:
    names = [SampledFrame(dict(zip(("file", "line", "function", "own"), one, strict=True))) for one in frames]
    stack = SampledStack({"frames": list(range(len(frames))), "call": "torch._C._nn.linear", "count": 1})
    facts = {"where": BETWEEN, "frames": [one.facts for one in names], "stacks": [stack.facts]}
    event = Stacks(facts, BEGIN_NS, make_identity(0))
    ((_, found),) = select_stacks(event, BETWEEN)
    assert found is not None
    assert found.line == line
    assert not is_training(found.callees, BETWEEN)  # what a pause or a shift is made of
    assert is_training(found.callees)  # each step may need it


LOG = [([("train.py", line, "log_gradients", True), LOOP], "item") for line in (60, 61, 62)]
LOSS = [([("train.py", 70, "log_loss", True), LOOP], "item")]
IN_MODEL = (
    [
        ("torch/nn/modules/module.py", 1780, "Module._call_impl", False),
        ("train.py", 58, "log_gradients", True),
        LOOP,
    ],
    "torch._C._nn.linear",
)


@pytest.mark.parametrize(
    ("stacks", "use", "found"),
    [
        (LOG, 40, True),
        (LOG, 92, False),  # what they wait for keeps the GPU busy
        (LOG[:1], 40, False),  # it may wait for the training's work
        ([LOG[0], *LOSS], 40, False),  # each may wait for other work
        ([*LOG, IN_MODEL], 40, False),  # in between it launches a model
    ],
)
def test_waits_in_a_row_are_the_functions_own(tmp_path: Path, stacks: Any, use: int, found: bool) -> None:
    """The first one may wait for work that was queued before, the others only for what the function launches."""
    folder = recordings.unpack_to_folder("gpu-trainer-gpt2", tmp_path)
    change_table(folder, "gpus", lambda rows: rows["utilization_percent"].fill(use))
    for stack in stacks:
        recording = add_pauses(folder, stack, why="share", samples=20, count=20)
    findings = [one for one in detect_findings(recording, recording.end_ns) if one.name == "time_between_phases"]
    assert [one.severity for one in findings] == [Severity.WARNING] * found
    assert all("train.py:6" in one.headline and "idle in 60 % of the time" in one.details for one in findings)
    assert all(one.cost == pytest.approx(0.85 * 2 / 3, abs=0.1) for one in findings)


IN_FORWARD = (
    [("train.py", 50, "Model.forward", True), ("torch/nn/modules/module.py", 1780, "Module._call_impl", False), LOOP],
    "sorted",
)


@pytest.mark.parametrize(
    ("stack", "count", "found"),
    [(SLEEP, 10, True), (SLEEP, 0, False), (IN_FORWARD, 10, False), (([LOOP], "torch._C._nn.gelu"), 10, False)],
)
def test_a_constant_share_of_counted_steps(tmp_path: Path, stack: Any, count: int, found: bool) -> None:
    """Whether their samples lie between the phases is seen from the functions."""
    folder = recordings.unpack_to_folder("gpu-trainer-gpt2", tmp_path)
    recording = add_pauses(folder, stack, why="share", samples=20, count=count, where="unknown phase")
    findings = [one for one in detect_findings(recording, recording.end_ns) if one.name == "time_between_phases"]
    assert [one.headline.rpartition(": ")[2] for one in findings] == ["train.py:88"] * found


def test_too_few_samples_are_no_share(tmp_path: Path) -> None:
    recording = add_pauses(recordings.unpack_to_folder("gpu-trainer-gpt2", tmp_path), SLEEP, why="share", samples=0)
    assert "time_between_phases" not in [one.name for one in detect_findings(recording, recording.end_ns)]


@pytest.mark.parametrize("trains_there", [False, True])
def test_a_share_of_several_functions_is_at_the_line_that_calls_them(trains_there: bool, tmp_path: Path) -> None:
    """Unless the training runs through that line, too: it is one of the loop then."""
    folder, calls = recordings.unpack_to_folder("gpu-trainer-gpt2", tmp_path), [("train.py", 37, "quality", True), LOOP]
    for number, name in enumerate(("edit", "runs", "entropy", "repeats")):
        add_pauses(folder, ([("train.py", 10 + number, name, True), *calls], "len"), why="share", samples=20, count=20)
    if trains_there:
        add_pauses(folder, (calls, "torch.nn.functional.linear"), why="slow", samples=20, count=20, where="forward")
    recording = Recording.open(folder)
    found = [one for one in detect_findings(recording, recording.end_ns) if one.name == "time_between_phases"]
    assert [str(one.headline).rpartition(": ")[2] for one in found[-1:]] == ["train.py:37"] * (not trains_there)


def pause_every(
    folder: Path, period: int, list_stacks: Callable[[int], list[Any]], where: str, *, in_a_row: int = 1
) -> list[int]:
    """Let the rank pause before each so many steps from 10 on. ``list_stacks``: of the n-th pause. Return their begins.

    ``in_a_row``: the pauses that follow each other each time.
    """
    begins: list[int] = []

    def insert_pauses(spans: Any) -> None:
        for step in (first + later for first in range(10, 31, period) for later in range(in_a_row)):
            late = spans["step"] >= step
            begins.append(int(spans["end_ns"][~late].max()))
            for name in ("begin_ns", "end_ns"):
                spans[name][late] += 100_000_000

    change_table(folder, "spans-rank0", insert_pauses)
    (path,) = folder.glob("events-rank0-*.jsonl")
    with path.open("a") as file:
        for number, begin in enumerate(begins):
            times = {"time_ns": begin + 110_000_000, "begin_ns": begin, "end_ns": begin + 90_000_000}
            facts = format_stacks(list_stacks(number), 0.09)
            file.write(json.dumps({"event": "stacks", "where": where, "why": "slow", **times, **facts}) + "\n")
    return begins


def format_stacks(stacks: list[Any], seconds: float) -> dict[str, Any]:
    """Return the fields of an event with stacks that share so much time."""
    frames = list(dict.fromkeys(frame for inside, _ in stacks for frame in inside))
    each = [
        {"count": 1, "seconds": seconds / len(stacks), "call": call, "frames": [frames.index(frame) for frame in inside]}
        for inside, call in stacks
    ]
    return {"frames": [dict(zip(("file", "line", "function", "own"), one, strict=True)) for one in frames], "stacks": each}


def test_pauses_in_a_row_do_not_come_with_every_iteration(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)
    pause_every(folder, 9, lambda _: [COLLECT], "between phases", in_a_row=3)
    recording = Recording.open(folder)
    headlines = [one.headline for one in detect_findings(recording, recording.end_ns) if one.name == "repeated_pause"]
    assert headlines == ["A 100 ms pause every 3 iterations: train.py:60"]


@pytest.mark.parametrize(
    ("period", "counted", "expected"), [(5, False, [10]), (1, False, []), (5, True, [10]), (1, True, [])]
)
def test_a_repeated_pause(tmp_path: Path, period: int, counted: bool, expected: list[int]) -> None:
    """Before each fifth step from 10 on the rank pauses; a pause in each step is no pause. So in counted steps."""
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)
    begins = pause_every(folder, period, lambda _: [COLLECT], "unknown phase" if counted else "between phases")
    if counted:
        count_steps(folder, first=9)
    recording = Recording.open(folder)
    findings = [one for one in detect_findings(recording, recording.end_ns) if one.name == "repeated_pause"]
    assert [one.step for one in findings] == expected
    for one in findings:
        assert one.headline == "A 100 ms pause every 5 iterations: train.py:60"
        assert "most of it at train.py:60 in clean (calls gc.collect)" in one.details
    run = RecordedRun(recording, memory=False)
    costs = rank_findings(run.findings, run.source.job_steps, run.source.end_ns)
    lost = [cost.seconds for cost in costs if cost.finding.name == "repeated_pause"]
    assert lost == [pytest.approx(0.1 * len(begins), rel=0.05)] * len(expected)  # although training goes on


def compute(rows: Any, cores: float) -> None:
    """Let each thread use so many cores."""
    rows["cpu_ns"] = (rows["time_ns"] - rows["time_ns"].min()) * cores
    rows["wait_ns"] = 0


@pytest.mark.parametrize(
    ("event", "call", "cores", "place", "cause"),
    [
        (("busy_thread", {"held_s": 0.09}), "", 0.2, ": log.py:7", "Thread log began to use 0.4 cores at log.py:7 in send"),
        (("busy_thread", {"held_s": 0.09}), "", 1.0, ": train.py:60", ""),  # the training thread computes itself
        (("busy_thread", {"held_s": 0.02}), "", 0.2, ": train.py:60", ""),  # too short a wait
        (("busy_thread", {"held_s": 0.09}), "time.sleep", 0.2, ": train.py:60", ""),
        (("garbage", {"seconds": 0.4, "collections": 5}), "", 1.0, "", "Python's garbage collector takes 400 ms of them"),
        (("garbage", {"seconds": 0.1, "collections": 5}), "", 1.0, ": train.py:60", ""),
    ],
    ids=["a thread", "computes", "short", "sleeps", "the collector", "a little collected"],
)
def test_a_pause_at_a_line_that_only_waits(
    tmp_path: Path, event: tuple[str, dict[str, Any]], call: str, cores: float, place: str, cause: str
) -> None:
    """Another thread holds Python's lock, or the collector runs, whatever line the training thread has reached."""
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)
    begins = pause_every(folder, 5, lambda _: [([("train.py", 60, "clean", True), LOOP], call)], "between phases")
    change_table(folder, "threads", partial(compute, cores=cores))
    name, facts = event
    times = {"time_ns": begins[1], "begin_ns": begins[0] + 1, "busy_ns": begins[0], "end_ns": begins[1]}
    facts = facts | {"thread": "log", "cores": 0.4, "lock_wait_s": 0.1} if name == "busy_thread" else facts
    stacks = format_stacks([([("log.py", 7, "send", True)], "")], 0.09)
    (path,) = folder.glob("events-rank0-*.jsonl")
    with path.open("a") as file:
        file.write(json.dumps({"event": name, **times, **stacks, **facts}) + "\n")
    recording = Recording.open(folder)
    finding = [one for one in detect_findings(recording, recording.end_ns) if one.name == "repeated_pause"][-1]
    assert finding.headline == f"A 100 ms pause every 5 iterations{place}"
    assert cause in finding.details
    assert ("at train.py:60" in finding.details) is not bool(cause)
    is_told = not cause and finding.severity is Severity.WARNING
    assert ("train.py:60" in f"{finding.advice} {finding.fix}") is is_told


MODULE = ("train.py", 200, "<module>", True)


def stack_in(*lines: int, loop: int = 88) -> Any:
    """Return a stack of own functions, outermost first, that line ``loop`` of the loop calls."""
    inner = [("report.py", line, f"write_{depth}", True) for depth, line in enumerate(lines)]
    return [*reversed(inner), ("train.py", loop, "main", True), MODULE], ""


@pytest.mark.parametrize(
    ("list_stacks", "place"),
    [
        (lambda number: [stack_in(30, 40 + number)], "report.py:30"),
        (lambda number: [stack_in(10 * number, 50 + number)], "train.py:88"),
        (lambda number: [stack_in(30, 40 + number), stack_in(30, 60 + number), stack_in(31 + number)], "report.py:30"),
        (lambda number: [stack_in(loop=90 + number % 3), stack_in(loop=90 + (number + 1) % 3)], "train.py:90"),
    ],
    ids=["an inner line", "the line of the loop", "most samples", "several lines of the loop"],
)
def test_a_repeated_pause_whose_line_differs(tmp_path: Path, list_stacks: Callable[[int], list[Any]], place: str) -> None:
    """It is at the innermost line that most of its samples have in common, below the lines through which the loop trains."""
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)
    pause_every(folder, 4, list_stacks, "between phases")
    (path,) = folder.glob("events-rank0-*.jsonl")
    first = Recording.open(folder).sources["spans"][0].array["end_ns"][0]
    training = [("torch/_tensor.py", 600, "Tensor.backward", False), ("train.py", 80, "main", True), MODULE]
    with path.open("a") as file:
        facts = format_stacks([(training, "run_backward")], 0.1)
        file.write(json.dumps({"event": "training_stack", "time_ns": int(first), **facts}) + "\n")
    recording = Recording.open(folder)
    findings = [one for one in detect_findings(recording, recording.end_ns) if one.name == "repeated_pause"]
    assert [(one.step, one.headline.rpartition(": ")[2]) for one in findings] == [(10, place)]


LOADING = [("torch/utils/data/dataloader.py", 1440, "_MultiProcessingDataLoaderIter._next_data", False), LOOP]


@pytest.mark.parametrize(
    ("distances", "workers", "spare", "fix"),
    [
        ((5, 5, 5, 5), 2, 8, "persistent_workers=True"),
        ((5, 5, 5, 5), 0, 3, "num_workers=3"),
        ((5, 5, 5, 5), 0, None, ""),
        ((3, 6, 4, 7), 2, 8, None),
        ((5, 5), 2, 8, None),
    ],
    ids=["with workers", "without", "unknown", "irregular", "too few"],
)
def test_data_that_is_late_at_regular_distances(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    distances: tuple[int, ...],
    workers: int,
    spare: int | None,
    fix: str | None,
) -> None:
    """The rank waits in a library for its first batch and for some more: no line of the job takes the time."""
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)
    begins: list[int] = []

    def prolong_loading(spans: Any) -> None:
        for step in np.cumsum((10, *distances)).tolist():
            loading = (spans["step"] == step) & (spans["phase"] == PHASE_CODE["data"])
            assert loading.sum() == 1
            begins.append(int(spans["begin_ns"][loading][0]))
            late = (spans["step"] >= step) & (spans["begin_ns"] > begins[-1])
            spans["begin_ns"][late] += 400_000_000
            spans["end_ns"][late | loading] += 400_000_000

    change_table(folder, "spans-rank0", prolong_loading)
    # Neither is in this recording.
    monkeypatch.setattr(repeated_pause, "count_workers", lambda *_: workers)
    if spare is not None:
        loader = LoaderCause(Text("it has no loader worker", {}), ("Raise {worker_count}.", f"{{worker_setting}}={spare}"))
        monkeypatch.setattr(repeated_pause, "find_loader_cause", lambda *_: loader)
    frames = [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in LOADING]
    (path,) = folder.glob("events-rank0-*.jsonl")
    with path.open("a") as file:
        for begin in begins:
            stacks = [{"seconds": 0.39, "call": "poll", "frames": [0, 1]}]
            facts = {"where": "data", "why": "slow", "frames": frames, "stacks": stacks}
            times = {"time_ns": begin + 410_000_000, "begin_ns": begin, "end_ns": begin + 390_000_000}
            file.write(json.dumps({"event": "stacks", **times, **facts}) + "\n")
    recording = Recording.open(folder)
    findings = [one for one in detect_findings(recording, recording.end_ns) if one.name == "repeated_pause"]
    assert [one.fix for one in findings] == ([] if fix is None else [fix])
    for one in findings:
        assert one.headline.startswith("Every 5 iterations the wait for data takes 400 ms")
        assert one.step == 10


def slow_most_steps(folder: Path, stack: Any, computing: float = 0.0, *, rank: int = 0, late_ns: int = 110_000_000) -> None:
    """Insert a pause before two of three steps of a rank from step 13 on, and stacks that are written so much later."""
    begins: list[tuple[int, int]] = []

    def insert_pauses(spans: Any) -> None:
        for step in range(12, int(spans["step"].max()) + 1):
            late = spans["step"] >= step
            end = int(spans["end_ns"][~late].max())
            if step % 3:
                begins.append((step, end))
                for name in ("begin_ns", "end_ns"):
                    spans[name][late] += 100_000_000
            inside = (spans["step"] == step) & (spans["phase"] == PHASE_CODE["step"])
            for name, rows in (("begin_ns", spans["step"] > step), ("end_ns", (spans["step"] > step) | inside)):
                spans[name][rows] += int(computing * 1e9)

    change_table(folder, f"spans-rank{rank}", insert_pauses)
    (path,) = folder.glob(f"events-rank{rank}-*.jsonl")
    with path.open("a") as file:
        for step, begin in begins:
            frames = [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in stack[0]]
            times = {"time_ns": begin + late_ns, "begin_ns": begin, "end_ns": begin + 90_000_000, "step": step}
            stacks = [{"seconds": 0.09, "call": stack[1], "frames": [0]}]
            facts = {"where": "between phases", "why": "slow", "frames": frames, "stacks": stacks}
            file.write(json.dumps({"event": "stacks", **times, **facts}) + "\n")


@pytest.mark.parametrize(
    ("stack", "computing", "expected"),
    [
        (COLLECT, 0.0, ["69 ms of each 96 ms iteration are lost from step 13 on: train.py:60"]),
        (COLLECT, 0.9, []),  # all takes longer: others may use the cores
        (([LOOP], "deepspeed.runtime.engine.DeepSpeedEngine.step"), 0.0, []),
    ],
)
def test_a_line_that_slows_most_steps(tmp_path: Path, stack: Any, computing: float, expected: list[str]) -> None:
    """From step 13 on the rank stops before two of three steps, where no level of the iterations changes for long."""
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)
    slow_most_steps(folder, stack, computing)
    recording = Recording.open(folder)
    findings = [one for one in detect_findings(recording, recording.end_ns) if one.name == "time_lost_in_line"]
    assert [one.headline for one in findings] == expected


def test_a_line_of_several_ranks_is_told_of_the_first_that_shows_it(tmp_path: Path) -> None:
    """Also where a long recording is read a little at a time."""
    folder = recordings.unpack_to_folder("cpu-clean", tmp_path)
    for rank, late_ns in enumerate((110_000_000, 100_000_000)):
        slow_most_steps(folder, COLLECT, rank=rank, late_ns=late_ns)
    found = find_in_pieces(folder, time_in_line.detect, (16384, 30))
    assert [one.ranks for one in found] == [(1,)]


@pytest.mark.parametrize(
    ("stack", "computing", "hidden", "expected"),
    [
        (stack_in(30), 0.0, 0.0, ["4.0 ms of each 39 ms iteration are lost from step 13 on: report.py:30"]),
        (SLEEP, 0.0, 0.0, ["4.0 ms of each 39 ms iteration are lost from step 13 on: train.py:88"]),
        (SLEEP, 0.2, 0.0, []),  # all takes longer: others may use the cores
        (SLEEP, 0.0, 0.004, []),  # the forward became shorter by as much
        (ITEM, 0.0, 0.0, []),  # it waits for the GPU
    ],
)
def test_a_line_that_takes_a_small_share_of_each_step(
    tmp_path: Path, stack: Any, computing: float, hidden: float, expected: list[str]
) -> None:
    """From step 13 on the rank stops for 4 ms before each step, and forwards vary by more, so that no level changes."""
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)
    begins: list[int] = []

    def insert_pauses(spans: Any) -> None:
        for step in range(1, int(spans["step"].max()) + 1):
            late = spans["step"] >= step
            if step >= 13:
                begins.append(int(spans["end_ns"][~late].max()))
                for name in ("begin_ns", "end_ns"):
                    spans[name][late] += 4_000_000
            longer_ns = 8_000_000 * (step % 3) + int((computing if step >= 13 else hidden) * 1e9)
            inside = (spans["step"] == step) & (spans["phase"] == PHASE_CODE["forward"])
            follows = spans["begin_ns"] > spans["begin_ns"][inside]
            spans["begin_ns"][follows] += longer_ns
            spans["end_ns"][follows | inside] += longer_ns

    change_table(folder, "spans-rank0", insert_pauses)
    (path,) = folder.glob("events-rank0-*.jsonl")
    with path.open("a") as file:
        times = {
            "time_ns": begins[-1],
            "begin_ns": begins[1],
            "end_ns": begins[-2],
            "step": 14,
            "last_step": 13 + len(begins),
        }
        facts = format_stacks([stack], 0.03)
        facts["stacks"][0]["count"] = 8
        file.write(json.dumps({"event": "stacks", "where": "between phases", "why": "share", **times, **facts}) + "\n")
    for percent in (50, 99):
        change_table(folder, "gpus", partial(use_gpu, percent))
        recording = Recording.open(folder)
        findings = [one for one in detect_findings(recording, recording.end_ns) if one.name == "time_lost_in_line"]
        # A line that calls nothing may wait for a busy GPU, by a comparison.
        assert [one.headline for one in findings] == expected * (percent == 50 or bool(stack[1]))


def use_gpu(percent: int, rows: Any) -> None:
    rows["utilization_percent"] = percent


def test_an_emptied_cache_is_the_cause(tmp_path: Path) -> None:
    """The staged sleep of gpu-slow, with an allocator that gives its memory back before each step."""
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    before = find_named(Recording.open(folder), "iteration_shift")

    def grow_later(rows: Any) -> None:
        late = rows["step"] >= (before.step or 0)
        rows["reserved_bytes"][late] += np.where(rows["phase"][late] == PHASE_CODE["step"], 1 << 30, 0)

    change_table(folder, "allocator-rank0", grow_later)
    shift = find_named(Recording.open(folder), "iteration_shift")
    assert "at the same time the allocator's cache was emptied in each step." in shift.details
    shift = find_named(add_stacks(folder, before, [ITEM, ITEM, EMPTY], where="between phases"), "iteration_shift")
    assert "emptied in each step: train.py:104 in main (calls torch.cuda.empty_cache)." in shift.details
    assert shift.fix == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@pytest.mark.parametrize(
    "stack",
    [
        ([("transformers/trainer.py", 2300, "Trainer.train", False), ("finetune.py", 333, "main", True)], ""),
        ([("deepspeed/runtime/engine.py", 2100, "DeepSpeedEngine.step", False), LOOP], "torch._foreach_add_"),
    ],
)
def test_the_line_that_trains_is_no_cause(tmp_path: Path, stack: Any) -> None:
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    before = find_named(Recording.open(folder), "iteration_shift")
    shift = find_named(add_stacks(folder, before, [stack], where="between phases"), "iteration_shift")
    assert (shift.headline, shift.details) == (before.headline, before.details)


MODULE = ("torch/nn/modules/module.py", 1845, "Module._call_impl.<locals>.inner", False)
HOOK = ("train.py", 15, "watch.<locals>.hook", True)
COUNT = ("train.py", 7, "count", True)
FORWARD = ("train.py", 20, "Model.forward", True)
ENGINE = ("torch/autograd/graph.py", 979, "_engine_run_backward", False)
STEP = ("train.py", 50, "Lion.step", True)
OPTIMIZER = ("torch/optim/optimizer.py", 533, "Optimizer.profile_hook_step.<locals>.wrapper", False)


@pytest.mark.parametrize(
    ("frames", "is_hook"),
    [
        ([HOOK, MODULE, LOOP], True),
        ([COUNT, HOOK, MODULE, LOOP], True),
        ([("torch/_tensor.py", 30, "Tensor.std", False), HOOK, MODULE, FORWARD, MODULE, LOOP], True),
        ([HOOK, ENGINE, LOOP], True),
        ([HOOK, OPTIMIZER, LOOP], True),
        ([FORWARD, MODULE, LOOP], False),
        ([COUNT, FORWARD, MODULE, LOOP], False),
        ([STEP, OPTIMIZER, LOOP], False),
        ([MODULE, LOOP], False),
        ([LOOP], False),
    ],
)
def test_hooks_that_pytorch_calls_are_known(frames: list[Any], is_hook: bool) -> None:
    named = [SampledFrame(dict(zip(("file", "line", "function", "own"), frame, strict=True))) for frame in frames]
    found = find_own(named, SampledStack({"frames": list(range(len(frames))), "call": "std"}))
    assert found is not None
    assert found.is_hook == is_hook


def test_an_evaluation_is_at_the_line_that_calls_the_model() -> None:
    module = ("torch/nn/modules/module.py", 1790, "Module._call_impl", False)
    called = [("train.py", 43, "Block.forward", True), module, ("train.py", 73, "Model.forward", True), module]
    outside = [("train.py", 228, "generate", True), ("train.py", 281, "main", True)]
    frames = [SampledFrame(dict(zip(("file", "line", "function", "own"), one, strict=True))) for one in (*called, *outside)]
    stack = SampledStack({"frames": list(range(len(frames))), "call": "linear"})
    for wanted, line in ((False, 43), (True, 228)):
        found = find_own(frames, stack, outside_model=wanted)
        assert found is not None
        assert found.line == line
    between = find_own(frames, SampledStack({"frames": [4, 5], "call": "sort"}), outside_model=True)
    assert between is not None
    assert (between.line, between.callees) == (228, ("sort",))


@pytest.mark.parametrize(
    ("callees", "is_lock"),
    [(("__enter__",), True), (("acquire",), True), (("queue.Queue.get", "threading.Condition.wait", "acquire"), False)],
)
def test_a_lock_is_known_only_where_the_line_itself_waits_for_it(callees: tuple[str, ...], is_lock: bool) -> None:
    """A queue, too, waits with a lock, which no other thread holds."""
    known = find_known_call(callees)
    assert (known is not None and "holds the lock" in known.advice) == is_lock


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_a_collective_on_the_cpu_waits_for_the_other_ranks(is_on_gpu: bool) -> None:
    """Work on the GPU goes on while the host has left it."""
    callees = ("torch.distributed._exception_logger.<locals>.wrapper", "torch.distributed.all_reduce", "wait")
    line = StackLine("train.py", 9, "average", callees, 1.0, 1.0, is_on_gpu=is_on_gpu)
    assert line.called.endswith("which waits for the GPU" if is_on_gpu else "all_reduce, which waits for the other ranks")


@pytest.mark.parametrize(
    ("callees", "is_part"),
    [
        (("square",), True),
        (("torch.nn.functional.linear",), True),
        (("gzip.GzipFile.write", "gzip.GzipFile._write_raw", "compress"), False),
        (("numpy._core.fromnumeric.sort", "sort"), False),
        (("einops.einops.rearrange", "reshape"), True),
        (("astype",), False),
        (("encode",), False),
        (("mean",), True),  # of a tensor, or of an array: unknown
    ],
)
def test_methods_of_host_libraries_are_no_training(callees: tuple[str, ...], is_part: bool) -> None:
    assert is_training(callees, "unknown phase") == is_part


def test_an_own_line_comes_before_those_of_a_library_beside_it() -> None:
    """As with DeepSpeed in a folder on PYTHONPATH, which looks like the job's own code."""
    save, engine, script = (
        SampledFrame({"file": file, "line": line, "function": function, "own": True})
        for file, line, function in (
            ("deepspeed/runtime/checkpoint_engine/torch_checkpoint_engine.py", 32, "TorchCheckpointEngine.save"),
            ("deepspeed/runtime/engine.py", 4935, "DeepSpeedEngine.save_checkpoint"),
            ("train.py", 108, "main"),
        )
    )
    frames = [save, engine, script]
    own = find_own(frames, SampledStack({"frames": [0, 1, 2], "count": 1}))
    assert own is not None
    assert (own.file, own.line) == ("train.py", 108)
    assert own.callees[0] == "deepspeed.runtime.engine.DeepSpeedEngine.save_checkpoint"
    alone = find_own(frames, SampledStack({"frames": [0, 1], "count": 1}))
    assert alone is not None
    assert alone.line == 32


def test_wrappers_are_named_as_the_script_calls_them() -> None:
    scheduler = "torch.optim.LRScheduler.__init__.<locals>.patch_track_step_called.<locals>.wrap_step.<locals>.wrapper"
    assert CodeLine("train.py", 3, "main", (scheduler, "torch.optim.Adam.step")).text.endswith(
        "(calls torch.optim.Optimizer.step)"
    )
    assert CodeLine("train.py", 3, "main", ("tools.timed.<locals>.wrapper",)).text == "train.py:3 in main"


@pytest.mark.parametrize(
    ("where", "callees", "named"),
    [
        ("backward", ("torch.Tensor.backward", "run_backward"), False),
        ("step", ("step", "sqrt"), False),
        ("backward", ("torch.svd",), True),  # in a backward of the job's own
        (BETWEEN, ("step",), True),  # of a scheduler
    ],
)
def test_the_call_that_is_a_phase_is_no_cause(where: str, callees: tuple[str, ...], named: bool) -> None:
    process = cast(Process, SimpleNamespace(is_on_gpu=False))
    line = StackLine("train.py", 9, "train", callees, 1.0, 1.0, is_on_gpu=False)
    assert line_findings.is_cause(line, Delay(process, where, 0, 1, 1)) is named
