"""Findings that name the lines which allocate memory, on real recordings with looks written into them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recordings
from declared_events import check_event
from memory_recording import HELD_LIST, PlantedRecording, make_reading
from small_recording import make_identity, make_span
from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop.analysis.views.memory_view import read_memory_view
from zerotop.recording.reader import Recording
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.memory.allocation_lines import count_look_rows, draw_look
from zerotop_probe.recording.tables import ALLOCATOR, BOUNDARY, PHASE_CODE, SPANS

MAIN = ("train.py", 120, "main", True)
KEEP = [("train.py", 57, "keep", True), MAIN]
ENCODE, DECODE = ([("model.py", line, "forward", True), MAIN] for line in (12, 30))
MODEL = [
    ("torch/nn/functional.py", 7, "cross_entropy", False),
    ("transformers/loss/loss_utils.py", 36, "fixed_cross_entropy", False),
    ("torch/nn/modules/module.py", 9, "_call_impl", False),
    MAIN,
]
LINEAR = [
    ("torch/nn/modules/linear.py", 134, "forward", False),
    ("torch/nn/modules/module.py", 9, "_call_impl", False),
    ("train.py", 30, "forward", True),
    MAIN,
]
Blocks = tuple[int, int, Sequence[tuple[str, int, str, bool]]]
MIB = 1 << 20


def find_named(recording: Recording, name: str) -> list[Finding]:
    return [finding for finding in detect_findings(recording, recording.end_ns) if finding.name == name]


def add_look(folder: Path, why: str, at_ns: int, step: int, blocks: Sequence[Blocks], **facts: Any) -> Recording:
    """Write a look of rank 0 that ends at ``at_ns``. ``blocks``: number, size and stack."""
    info = json.loads((folder / "session.json").read_text())
    (folder / "session.json").write_text(json.dumps(info | {"stacks": True}))
    (path,) = folder.glob("events-rank0-*.jsonl")
    (source,) = [one for one in Recording.open(folder).sources["spans"] if one.rank == 0]
    frames = list(dict.fromkeys(frame for _, _, stack in blocks for frame in stack))
    event = {
        "time_ns": at_ns - source.offset_ns + 1000,
        "event": "memory_lines",
        "why": why,
        "first_step": step,
        "steps": 1,
        "begin_ns": at_ns - source.offset_ns - 200_000_000,
        "end_ns": at_ns - source.offset_ns,
        "frames": [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in frames],
        "stacks": [
            {"count": count, "size_bytes": size, "unix_us": 0, "frames": [frames.index(frame) for frame in stack]}
            for count, size, stack in blocks
        ],
        **facts,
    }
    check_event(event)
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
    return Recording.open(folder)


@pytest.mark.parametrize(
    ("name", "finding", "headline", "details"),
    [
        (
            "gpu-lines-leak",
            "memory_creep",
            "memory_on_gpu.py:58 leaks 32.0 MiB a step on rank 0; full near step 2716",
            "The leaked memory was allocated at memory_on_gpu.py:58 in keep.",
        ),
        (
            "gpu-lines-jump",
            "memory_step",
            "Steps allocate up to 10.02 GiB instead of 3.66 GiB from step 300 on",
            "1.56 GiB more are allocated at memory_on_gpu.py:51 in disturb;",
        ),
        (
            "gpu-lines-evaluation",
            "evaluation_peak",
            "3.91 GiB of the evaluation's peak are allocated at memory_on_gpu.py:46",
            "3.91 GiB of them from memory_on_gpu.py:46 in forward (torch.nn.modules.linear).",
        ),
        (
            "gpu-lines-leak",
            "logits_peak",
            "Logits take 1.95 GiB of the memory peak of 3.66 GiB in backward",
            "allocated at memory_on_gpu.py:46 in forward (torch.nn.modules.linear) and memory_on_gpu.py:88 in main"
            " (torch.nn.functional.cross_entropy).",
        ),
        (
            "gpu-lines-leak",
            "peak_owner",
            "In steps 1 to 3, memory peaks in backward: 3.66 GiB of 79.18 GiB",
            "Peak memory of step 4, by line: 1.25 GiB at memory_on_gpu.py:32 in forward,",
        ),
        (
            "hand-threads",
            "peak_owner",
            "In steps 1 to 3, memory peaks in backward: 4.17 GiB of 140 GiB",
            "Peak memory of step 4, by line: 2.11 GiB at plants3.py:95.",  # of ten calls below it
        ),
    ],
)
def test_the_lines_that_the_probe_found_on_a_gpu(name: str, finding: str, headline: str, details: str) -> None:
    (findings,) = find_named(recordings.open_recording(name), finding)
    assert findings.headline == headline
    assert details in findings.details


@pytest.fixture
def leak_finding(tmp_path: Path) -> tuple[Path, Finding]:
    folder = recordings.unpack_to_folder("gpu-leak", tmp_path)
    (finding,) = find_named(Recording.open(folder), "memory_creep")
    return folder, finding


def test_the_line_of_a_leak(leak_finding: tuple[Path, Finding]) -> None:
    folder, before = leak_finding
    recording = add_look(folder, "creep", before.known_ns - 10**8, 20, [(1, 32 * MIB, KEEP)], staying_bytes=33 * MIB)
    (creep,) = find_named(recording, "memory_creep")
    assert creep.headline.startswith("train.py:57 leaks 32.0 MiB a step on rank 0; full near step ")
    assert len(creep.headline) <= 80
    assert "The leaked memory was allocated at train.py:57 in keep." in creep.details
    assert "train.py:57" in creep.advice
    assert (creep.evidence, creep.known_ns) == (before.evidence, before.known_ns)


def test_a_leak_is_told_with_all_that_it_added() -> None:
    """`zerotop memory` shows 9.345 GiB after step 599, the last one; it was first told after twelve steps."""
    recording = recordings.open_recording("gpu-lines-leak")
    (creep,) = find_named(recording, "memory_creep")
    assert creep.evidence["grown_bytes"] / 2**30 == pytest.approx(9.345, abs=0.01)
    assert creep.evidence["held_step"] == 599
    (first,) = (one for one in detect_findings(recording, creep.detected_ns) if one.name == "memory_creep")
    assert first.known_ns == creep.detected_ns < creep.known_ns
    assert first.evidence["grown_bytes"] < 2**30


def test_a_leak_waits_for_its_line(leak_finding: tuple[Path, Finding]) -> None:
    folder, before = leak_finding
    add_calls(folder, lambda rows: 0)  # of a probe that looks
    later_ns = before.detected_ns + 10**8
    recording = add_look(folder, "creep", later_ns, 26, [(1, 32 * MIB, KEEP)], staying_bytes=32 * MIB)
    (creep,) = find_named(recording, "memory_creep")
    assert creep.headline.startswith("train.py:57 leaks")
    assert creep.known_ns >= later_ns
    assert creep.evidence == before.evidence, "the newest numbers of those that waited"
    assert "memory_creep" not in [one.name for one in detect_findings(recording, later_ns - 1)]


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_leak_without_a_line_is_reported_when_the_job_is_gone(leak_finding: tuple[Path, Finding], is_seen: bool) -> None:
    """The rank is killed a second after the leak is seen, and perhaps the node with it."""
    folder, before = leak_finding
    info = json.loads((folder / "session.json").read_text())
    (folder / "session.json").write_text(json.dumps(info | {"stacks": True}))
    add_calls(folder, lambda rows: 0)
    for path in folder.glob("events-*.jsonl"):
        lines = [line for line in path.read_text().splitlines() if '"goodbye"' not in line and '"job_ended"' not in line]
        lines = [line for line in lines if is_seen or '"rank_gone"' not in line]
        path.write_text("\n".join(lines) + "\n")
    (creep,) = find_named(Recording.open(folder), "memory_creep")
    assert creep.headline == before.headline
    assert creep.known_ns > before.known_ns


@pytest.mark.parametrize(
    "blocks",
    [[(1, 8 * MIB, KEEP), (1, 9 * MIB, LINEAR)], [(1, 32 * MIB, [])], []],
)
def test_a_leak_of_no_one_line(leak_finding: tuple[Path, Finding], blocks: Sequence[Blocks]) -> None:
    folder, before = leak_finding
    recording = add_look(folder, "creep", before.known_ns - 10**8, 20, blocks, staying_bytes=32 * MIB)
    (creep,) = find_named(recording, "memory_creep")
    assert (creep.headline, creep.fix) == (before.headline, before.fix)
    assert creep.advice == "", "nothing points to a loss"


@pytest.mark.parametrize(("per_step", "is_told"), [(400 * MIB, True), (0, False)])
def test_a_leak_fills_the_device_by_what_is_reserved(per_step: int, is_told: bool, tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-leak", tmp_path)
    (path,) = folder.glob("allocator-*.rec")
    header, _, records = path.read_bytes().partition(b"\n")
    rows = np.frombuffer(bytearray(records), [tuple(field) for field in json.loads(header)["dtype"]])
    rows["reserved_peak_bytes"] += rows["step"].astype(np.int64) * per_step + (0 if is_told else 20 << 30)
    path.write_bytes(header + b"\n" + rows.tobytes())
    (before,) = find_named(recordings.open_recording("gpu-leak"), "memory_creep")
    (creep,) = find_named(Recording.open(folder), "memory_creep")
    assert (creep.headline.endswith("; full near step 341") and "0.39 GiB a step more" in creep.details) is is_told, creep
    assert (creep.headline == before.headline) is not is_told
    assert ("new blocks find no room in them" in creep.details) is is_told


def test_the_line_of_a_step(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-long", tmp_path)
    (before,) = find_named(Recording.open(folder), "memory_step")
    low = [(4, 100 * MIB, LINEAR), (1, 500 * MIB, KEEP)]
    high = [(4, 200 * MIB, LINEAR), (2, 400 * MIB, MODEL), (1, 600 * MIB, KEEP)]
    recording = add_look(folder, "peak", before.begin_ns - 10**9, 8, low, peak_bytes=1500 * MIB, before_bytes=600 * MIB)
    (unknown,) = find_named(recording, "memory_step")
    assert unknown.details == before.details
    recording = add_look(folder, "peak", before.known_ns, 22, high, peak_bytes=3000 * MIB, before_bytes=600 * MIB)
    (step,) = find_named(recording, "memory_step")
    assert step.headline == before.headline
    line = "train.py:120 in main (loss_utils.py:36 in fixed_cross_entropy: torch.nn.functional.cross_entropy)"
    assert f"; 0.78 GiB more are allocated at {line}; " in step.details


@pytest.mark.parametrize(
    ("high", "told"),
    [
        ([(4, 170 * MIB, ENCODE), (2, 340 * MIB, DECODE), (1, 500 * MIB, KEEP)], "1.7 times as large: inputs are larger;"),
        ([(4, 200 * MIB, ENCODE), (2, 400 * MIB, DECODE), (1, 500 * MIB, KEEP)], "inputs are larger, or of a wider type;"),
        ([(4, 170 * MIB, ENCODE), (3, 340 * MIB, DECODE), (1, 500 * MIB, KEEP)], ""),  # more blocks
        ([(4, 110 * MIB, ENCODE), (2, 900 * MIB, DECODE), (1, 500 * MIB, KEEP)], ""),  # of one line
    ],
)
def test_larger_blocks_of_the_same_lines_are_of_larger_inputs(high: list[Blocks], told: str, tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("hand-fp32", tmp_path)
    before = find_named(Recording.open(folder), "memory_step")[0]
    low = [(4, 100 * MIB, ENCODE), (2, 200 * MIB, DECODE), (1, 500 * MIB, KEEP)]
    add_look(folder, "peak", before.begin_ns - 10**9, 8, low, peak_bytes=1500 * MIB, before_bytes=600 * MIB)
    recording = add_look(folder, "peak", before.known_ns - 2000, 200, high, peak_bytes=3000 * MIB, before_bytes=600)
    step = find_named(recording, "memory_step")[0]
    assert ("as many blocks, each" in step.details) is bool(told)
    assert told in step.details


def test_the_lines_of_the_highest_peak(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)
    (before,) = find_named(Recording.open(folder), "peak_owner")
    blocks = [(2, 400 * MIB, []), (1, 300 * MIB, KEEP)]
    recording = add_look(folder, "peak", before.end_ns, 4, blocks, peak_bytes=9 << 30, before_bytes=1 << 30)
    (owner,) = find_named(recording, "peak_owner")
    lines = "0.78 GiB by threads without Python, 0.29 GiB at train.py:57 in keep"
    assert owner.details == f"{before.details} Peak memory of step 4, by line: {lines}."


@pytest.mark.parametrize(("size", "is_told"), [(1 << 30, True), (1 << 20, False)])
def test_a_variable_that_keeps_much_of_what_stays_is_named(size: int, is_told: bool, tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-long", tmp_path)
    (before,) = find_named(Recording.open(folder), "peak_owner")
    (path,) = folder.glob("events-rank0-*.jsonl")
    (source,) = [one for one in Recording.open(folder).sources["spans"] if one.rank == 0]
    event = {"time_ns": before.known_ns - source.offset_ns - 1000, "event": "tensors", "engine": 0, "step": 4}
    held = HELD_LIST | {"bytes": size, "count": 9}
    event |= {"when": "again", "device": {}, "host": {}, "host_pinned": {}, "unclaimed_bytes": 1 << 30, "held": [held]}
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
    (owner,) = find_named(Recording.open(folder), "peak_owner")
    assert (", of which the list seen in main() (train.py) keeps 1.00 GiB in 9 tensors." in owner.details) is is_told


def test_the_lines_of_logits(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-trainer-gpt2", tmp_path)
    (before,) = find_named(Recording.open(folder), "logits_peak")
    assert "allocated at" not in before.details
    size = 8 * 1024 * 50257 * 4
    blocks = [(2, size, MODEL), (1, size // 50257 * 50257, LINEAR), (9, 768 * MIB // 9, KEEP)]
    recording = add_look(folder, "peak", before.known_ns + 10**8, 3, blocks, peak_bytes=9 << 30, before_bytes=1 << 30)
    (logits,) = find_named(recording, "logits_peak")
    assert (
        "elements, allocated at train.py:120 in main (loss_utils.py:36 in fixed_cross_entropy:"
        " torch.nn.functional.cross_entropy) and train.py:30 in forward (torch.nn.modules.linear). The backward"
    ) in logits.details


def record_evaluation(folder: Path, after: float, *, kept: float = 16, steps: int = 20) -> Recording:
    """Return a recording with an evaluation before step 10; ``after``: allocated after each later step, in GiB."""
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.write_engine()
    spans, readings = [], []
    for step in range(steps):
        at = 10 + step
        if step == 10:
            spans.append(make_span(at, at + 0.3, "eval", step))
            readings.append(make_reading(at, 4.5, 10, phase="eval", edge="begin", step=step))
            readings.append(make_reading(at + 0.2, 9, 16, phase="eval", edge="end", step=step))
            readings.append(make_reading(at + 0.3, 9, kept, phase="eval", edge="end", step=step))
        spans.append(make_span(at + 0.5, at + 0.9, "step", step, BOUNDARY))
        held, reserved = (5.0, 10) if step < 10 else (after, 16)
        readings.append(make_reading(at + 0.9, held, reserved, phase="step", edge="end", step=step))
    if steps == 11:  # the process ends in the evaluation, and reads the allocator a last time
        spans.pop()
    recording.write_records(SPANS, who, spans)
    recording.write_records(ALLOCATOR, who, readings, peaks="window")
    return recording.open_recording()


@pytest.mark.parametrize(("after", "told"), [(5.0, ""), (7.0, ", 2.00 GiB of them in tensors that outlived the next step")])
def test_tensors_that_evaluation_leaves_are_told_once_a_step_has_ended(after: float, told: str, tmp_path: Path) -> None:
    """A variable has the last outputs of an evaluation until it gets others, at the latest in the next step."""
    (jump,) = find_named(record_evaluation(tmp_path, after), "validation_jump")
    assert f"6.00 GiB stay reserved afterwards{told}" in jump.details
    assert ("tensors" in jump.details) is bool(told)


def test_tensors_that_are_more_than_the_reserved_memory_that_stays_are_no_part_of_it(tmp_path: Path) -> None:
    (jump,) = find_named(record_evaluation(tmp_path, 7, kept=11), "validation_jump")
    assert "1.00 GiB stay reserved afterwards, and tensors of 2.00 GiB outlived the next step, which" in jump.details


def test_tensors_that_nothing_is_known_to_keep_may_be_what_an_evaluation_loads_once(tmp_path: Path) -> None:
    *_, jump = find_named(record_evaluation(tmp_path, 8), "validation_jump")
    assert (jump.severity, jump.advice) == (Severity.INFO, "")
    assert "tensors of 3.00 GiB" in jump.details or "3.00 GiB of them in tensors" in jump.details


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_tensors_that_are_a_large_part_of_the_peak_are_told_with_what_keeps_them(keeps_graph: bool, tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    recording.write_inventory(12, "after_update", {"parameters": 5})
    held = [HELD_LIST | {"keeps_graph": keeps_graph, "view_of": []}]
    recording.write_inventory(20.95, "again", {"parameters": 5}, unclaimed=4, held=held, step=10)
    *_, jump = find_named(record_evaluation(tmp_path, 8), "validation_jump")
    assert (jump.severity, jump.headline) == (
        Severity.WARNING,
        "Evaluation leaves tensors of 3.00 GiB allocated: seen keeps them",
    )
    assert "They outlived the next step; before, steps needed up to 5.00 GiB in all." in jump.details
    assert ("had gradients enabled" in jump.details) is (jump.fix == "with torch.no_grad():") is bool(keeps_graph)
    assert "train.py:97 adds to it." in jump.details
    assert keeps_graph or "(.item())" in jump.advice


def test_nothing_stays_where_the_process_ended_in_the_evaluation(tmp_path: Path) -> None:
    (jump,) = find_named(record_evaluation(tmp_path, 8, steps=11), "validation_jump")
    assert jump.headline == "Evaluation raised reserved memory by 6.00 GiB to 16.00 GiB"
    assert not any(word in jump.details for word in ("afterwards", "outlived", "to training"))


def test_the_line_of_an_evaluation(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2", tmp_path)
    recording = Recording.open(folder)
    (jump,) = find_named(recording, "validation_jump")
    blocks = [(2, 400 * MIB, MODEL), (1, 300 * MIB, KEEP), (1, 900 * MIB, [])]
    recording = add_look(
        folder, "evaluation", jump.end_ns + 10**9, 16, blocks, peak_bytes=3000 * MIB, before_bytes=1000 * MIB
    )
    (peak,) = find_named(recording, "evaluation_peak")
    assert peak.headline == "0.78 GiB of the evaluation's peak are allocated at train.py:120"
    assert (peak.step, peak.advice) == (16, "")


def test_the_lines_before_memory_ran_out(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2-oom", tmp_path)
    (before,) = find_named(Recording.open(folder), "out_of_memory")
    blocks = [(2, 400 * MIB, MODEL), (1, 300 * MIB, KEEP), (1, 900 * MIB, [])]
    facts = {"peak_bytes": 3000 * MIB, "before_bytes": 1000 * MIB}
    recording = add_look(folder, "peak", before.begin_ns - 10**9, 3, blocks, **facts)
    (error,) = find_named(recording, "out_of_memory")
    line = "train.py:120 in main (loss_utils.py:36 in fixed_cross_entropy: torch.nn.functional.cross_entropy)"
    parts = f"0.88 GiB by threads without Python, 0.78 GiB at {line}, 0.29 GiB at train.py:57 in keep"
    lines = f" Peak memory of step 3, by line: {parts}."
    assert error.details == before.details + lines


def test_the_screen_lists_the_lines(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("z2", tmp_path)
    recording = Recording.open(folder)
    blocks = [(2, 1024 * MIB, MODEL), (3, 512 * MIB, [])]
    recording = add_look(folder, "peak", recording.end_ns - 10**9, 3, blocks, peak_bytes=4 << 30, before_bytes=1 << 29)
    look = read_memory_view(recording.at(recording.end_ns)).look
    assert look is not None
    assert count_look_rows(look) == 6
    drawn = ["".join(text for text, _ in row).rstrip() for row in draw_look(look, None, "A hint.", (60, 6), BLOCKS)]
    assert drawn[0].startswith("Peak memory of step 3, by line, GiB ")
    assert [line.strip()[:34] for line in drawn[1:4]] == [
        "2.00 ■ train.py:120 in main (loss_",
        "1.50 ■ threads without Python",
        "0.50   allocated before",
    ]
    assert drawn[4] == "A hint."


def add_calls(folder: Path, count: Callable[[Any], Any], *, with_frees: bool = False) -> None:
    """Add the columns of cudaMalloc's and cudaFree's calls to the allocator's table."""
    (path,) = folder.glob("allocator-*.rec")
    with path.open("rb") as file:
        header = json.loads(file.readline())
        rows = np.frombuffer(file.read(), np.dtype([tuple(field) for field in header["dtype"]]))
    header["dtype"] += [["device_allocs", "<i4"], ["device_frees", "<i4"]]
    wide = np.zeros(len(rows), np.dtype([tuple(field) for field in header["dtype"]]))
    for name in rows.dtype.names or ():
        wide[name] = rows[name]
    wide["device_allocs"] = count(rows)
    wide["device_frees"] = wide["device_allocs"] if with_frees else 0
    path.write_bytes(json.dumps(header).encode() + b"\n" + wide.tobytes())


@pytest.mark.parametrize("cleared", ["reserved memory falls", "cudaFree is called", ""])
def test_calls_of_the_allocator_are_counted(tmp_path: Path, cleared: str) -> None:
    """The staged sleep of gpu-slow, with an allocator that asks the driver 14 times in each step from then on."""
    folder = recordings.unpack_to_folder("gpu-slow", tmp_path)
    (before,) = find_named(Recording.open(folder), "iteration_shift")
    first = before.step or 0

    def count_allocations(rows: Any) -> Any:
        steps = np.maximum(0, rows["step"] - first + 1) * 14
        return 100 + np.where((rows["step"] >= first) & (rows["phase"] != PHASE_CODE["step"]), steps - 14, steps)

    add_calls(folder, count_allocations, with_frees=cleared == "cudaFree is called")
    if cleared == "reserved memory falls":
        (path,) = folder.glob("allocator-*.rec")
        header, _, records = path.read_bytes().partition(b"\n")
        rows = np.frombuffer(bytearray(records), np.dtype([tuple(field) for field in json.loads(header)["dtype"]]))
        rows["reserved_bytes"] += np.where((rows["step"] >= first) & (rows["phase"] == PHASE_CODE["step"]), 1 << 30, 0)
        path.write_bytes(header + b"\n" + rows.tobytes())
    (shift,) = find_named(Recording.open(folder), "iteration_shift")
    if cleared:
        assert "the allocator's cache was emptied in each step, and cudaMalloc called 14 times in each." in shift.details
    else:
        assert "PyTorch's allocator called cudaMalloc 14 times in each step" in shift.details


@pytest.mark.parametrize(
    ("forward", "before_backward", "told"),
    [
        (3, 3, "in backward: 4.00 GiB|The peak of forward is 3.00 GiB there, that of step 2.00 GiB."),
        (
            1,
            3,
            "|The peak of forward is 1.00 GiB there, that of step 2.00 GiB, that of the time between the phases 3.00 GiB.",
        ),
        (1, 5, "between the phases: 5.00 GiB|The peak of forward is 1.00 GiB there, that of backward 4.00 GiB,"),
    ],
    ids=["a module", "modules one by one", "a loss"],
)
def test_the_peak_outside_the_phases(forward: int, before_backward: int, told: str, tmp_path: Path) -> None:
    """Gradients are freed before the next forward: 1.50 of 2 GiB stay allocated."""
    owner = find_peak(tmp_path, {"forward": (1.5, 2), "backward": (2, before_backward)}, forward)
    assert told in f"{owner.headline.removesuffix(' of 79.00 GiB')}|{owner.details}"
    assert "1.50 GiB" in owner.details


def test_what_stays_is_unknown_where_memory_is_read_at_the_ends_of_phases_alone(tmp_path: Path) -> None:
    assert find_peak(tmp_path, {}, 3).details == "The peak of forward is 3.00 GiB there, that of step 2.00 GiB."


def find_peak(folder: Path, begins: dict[str, tuple[float, float]], forward_peak: float) -> Finding:
    """Return the owner of the peak of steps, with what was allocated, and its peak, at the begin of phases (GiB)."""
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.node_event()
    recording.write_engine(kind="loop", zero_stage=None, device="cuda:0")
    spans, readings = [], []
    ends = {"forward": (2, forward_peak), "backward": (2, 4), "step": (2, 2)}
    for step in range(6):
        for index, phase in enumerate(ends):
            at = 10 + step + 0.3 * index
            spans.append(make_span(at, at + 0.2, phase, step, BOUNDARY * (phase == "step")))
            for edge, end, sizes in (("begin", at, begins.get(phase)), ("end", at + 0.2, ends[phase])):
                if sizes is not None:
                    peak = {"allocated_peak_bytes": int(sizes[1] * (1 << 30))}
                    readings.append(make_reading(end, sizes[0], 8, phase=phase, edge=edge, step=step, **peak))
    recording.write_records(SPANS, who, spans, born=1)
    recording.write_records(ALLOCATOR, who, readings, born=1, peaks="window")
    (owner,) = find_named(recording.open_recording(), "peak_owner")
    return owner
