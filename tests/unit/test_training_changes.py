"""Findings and ledgers say what changed in the training, and who keeps memory: recordings by the real writers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memory_recording import (
    GIB,
    HELD_LIST,
    OOM,
    PlantedRecording,
    gib_to_bytes,
    make_gpu_process_sample,
    make_gpu_sample,
    make_reading,
    make_record,
    record_leak,
    record_two_steps,
)
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.analysis.code_line import CodeLine
from zerotop.analysis.engine import read_first_engine
from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop.analysis.findings.support.causes.training_causes import check_memory
from zerotop.analysis.findings.support.memory.looks import find_growth
from zerotop.analysis.memory.block_lines import LineBlocks, Look
from zerotop.analysis.memory.expected.zero_model import Difference
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.ledger_rows import (
    ALLOCATED,
    HELD,
    OTHER_RANKS,
    OTHER_STREAMS,
    OUTSIDE,
    PRIVATE,
    UNALLOCATED,
    GpuLedger,
)
from zerotop.analysis.memory.memory_table import OUTDATED, build_gpu_lines
from zerotop.analysis.steps.training_changes import TrainingChange, choose_changes, describe_changes, list_changes
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.tables import BOUNDARY, PHASE_CODE


def read_at(recording: Recording, second: float) -> GpuLedger:
    (ledger,) = read_ledgers(recording.at(BEGIN_NS + int(second * S)))
    assert sum(row.bytes for row in ledger.rows) == ledger.total_bytes
    assert ledger.sum_bytes(*ALLOCATED) == ledger.allocated_bytes
    return ledger


def record_changed(folder: Path, *, counted_at: float, held: Any = HELD_LIST, unclaimed: float = 4) -> Recording:
    """Record two steps after which memory has grown by 4 GiB, with a second count."""
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.node_event()
    recording.write_engine(kind="loop", zero_stage=None)
    spans, readings = [], []
    for step, (start, size) in enumerate(((10, 6.0), (20, 10.0))):
        spans.append(make_span(start, start + 2, "step", step, tables.BOUNDARY))
        readings.append(make_reading(start + 2, size, 20, phase="step", edge="end", step=step))
        readings.append(make_reading(start + 2.5, size, 20, step=step))
    begins = [make_record(tables.BEGINS, at, step=step, phase=PHASE_CODE["step"]) for step, at in enumerate((10, 20))]
    recording.write_records(tables.SPANS, who, spans, born=1)
    recording.write_records(tables.BEGINS, who, begins, born=1)
    recording.write_records(tables.ALLOCATOR, who, readings, born=1, peaks="window")
    recording.write_inventory(1, "init", {"parameters": 2})
    facts: dict[str, Any] = {"step": 1, "held": [held]} if counted_at > 20 else {"step": 0}
    recording.write_inventory(
        counted_at, "again", {"parameters": 2, "optimizer_state": 4}, unclaimed=unclaimed if counted_at > 20 else 0, **facts
    )
    return recording.open_recording()


def test_a_row_counted_before_a_change_says_so(tmp_path: Path) -> None:
    ledger = read_at(record_changed(tmp_path, counted_at=12.05), 23)
    (row,) = (row for row in ledger.rows if row.key == "parameters")
    assert row.is_outdated
    assert "counted in step 0" in row.basis
    expected = [Difference("parameters", row.bytes, row.bytes)]
    (line,) = (line for line in build_gpu_lines(ledger, None, expected) if line.key == "parameters")
    assert line.absence_reason == OUTDATED
    assert len([note for note in ledger.notes if "may be outdated" in note]) == 1


def test_a_tensor_of_a_few_bytes_is_not_told(tmp_path: Path) -> None:
    small = {**HELD_LIST, "bytes": 4096}
    ledger = read_at(record_changed(tmp_path, counted_at=22.05, held=small, unclaimed=4096 / GIB), 23)
    (row,) = (row for row in ledger.rows if row.key == HELD)
    assert (row.bytes, row.note) == (4096, "")


def test_tensors_kept_in_a_list_have_a_row_of_their_own(tmp_path: Path) -> None:
    ledger = read_at(record_changed(tmp_path, counted_at=22.05), 23)
    assert ledger.sum_bytes(HELD) == 4 * GIB
    (row,) = (row for row in ledger.rows if row.key == HELD)
    assert (
        row.note == "Kept by the script, counted in step 1, after the update: the list seen in main() (train.py) 4.00 GiB."
    )
    assert not any(one.is_outdated for one in ledger.rows)
    assert ledger.sum_bytes("optimizer_state") == 4 * GIB, "from the later count"


def test_gradients_do_not_hide_what_is_kept(tmp_path: Path) -> None:
    """Freed gradients whose place a state dict of their size takes."""
    recording, who = PlantedRecording(tmp_path), make_identity(0)
    recording.node_event()
    recording.write_engine(kind="loop", zero_stage=None)
    recording.write_records(tables.SPANS, who, [make_span(10, 12, "step", 0, tables.BOUNDARY)], born=1)
    recording.write_records(
        tables.ALLOCATOR, who, [make_reading(15, 8, 12, phase="forward", edge="begin", step=1)], born=1, peaks="window"
    )
    recording.write_inventory(1, "init", {"parameters": 2}, unclaimed=2)
    recording.write_inventory(12, "after_update", {"parameters": 2, "gradients": 2, "optimizer_state": 4}, unclaimed=2)
    ledger = read_at(recording.open_recording(), 16)
    assert ledger.sum_bytes("gradients") == 0
    assert ledger.sum_bytes("unexplained") == 2 * GIB


def test_memory_that_only_a_stream_or_a_graph_can_use(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    pools = [
        {"stream": 0, "private": False, "reserved": 16 * GIB, "allocated": 14 * GIB, "sparse": 0},
        {"stream": 7, "private": False, "reserved": 4 * GIB, "allocated": 0, "sparse": 0},
        {"stream": 0, "private": True, "reserved": 2 * GIB, "allocated": GIB, "sparse": 0},
    ]
    recording.write_inventory(18.6, "again", {"parameters": 2, "master_weights": 4}, step=0, pools=pools, stream=0)
    ledger = read_at(recording.open_recording(), 29.2)
    assert (ledger.sum_bytes(OTHER_STREAMS), ledger.sum_bytes(PRIVATE)) == (4 * GIB, GIB)


@pytest.mark.parametrize(("sparse", "is_told"), [(3.0, True), (0.5, False)])
def test_segments_that_are_almost_free_are_distinguished(sparse: float, is_told: bool, tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    general = {"stream": 0, "private": False, "reserved": 22 * GIB, "allocated": 14 * GIB, "sparse": gib_to_bytes(sparse)}
    recording.write_inventory(18.6, "again", {"parameters": 2, "master_weights": 4}, step=0, pools=[general], stream=0)
    notes = [row.note for row in read_at(recording.open_recording(), 29.2).rows if row.key == UNALLOCATED]
    told = "3.00 GiB of the unallocated memory are in segments that small blocks keep from the driver."
    assert notes == [told if is_told else ""]


def test_the_ledger_at_a_failure_holds_what_pytorch_held(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    assert read_at(recording.open_recording(), 25.6).allocated_bytes < 50 * GIB
    tensors: dict[str, float] = {"parameters": 2, "master_weights": 4, "gradients": 2}
    recording.write_inventory(25.4, "out_of_memory", tensors, unclaimed=42, step=1)
    recording.write_event(make_identity(0), 25.5, events.OutOfMemory, **OOM)
    ledger = read_at(recording.open_recording(), 25.6)
    assert ledger.allocated_bytes == 50 * GIB
    assert ledger.sum_bytes("gradients") == 2 * GIB
    assert ledger.sum_bytes("activations") >= 41 * GIB


def test_a_context_of_another_rank_is_distinguished(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    other = make_identity(1)
    begins = [make_record(tables.BEGINS, at, step=0, phase=PHASE_CODE["forward"]) for at in (10, 20)]
    recording.write_records(tables.BEGINS, other, begins, born=1)
    sampler = make_identity(-1, pid=8)
    held = [
        row
        for at in range(2, 30)
        for row in (make_gpu_process_sample(at, make_identity(0).pid, 24), make_gpu_process_sample(at, other.pid, 0.75))
    ]
    recording.write_records(tables.GPU_PROCESSES, sampler, held)
    recording.write_records(tables.GPUS, sampler, [make_gpu_sample(at, 28.5) for at in range(30)])
    ledger = read_at(recording.open_recording(), 29.2)
    assert ledger.sum_bytes(OTHER_RANKS) == gib_to_bytes(0.75)
    (note,) = (row.note for row in ledger.rows if row.key == OTHER_RANKS)
    assert note == "Held here by processes that train on other GPUs: rank 1 0.75 GiB."
    assert ledger.sum_bytes(OUTSIDE) == 2 * GIB


CHANGES = [
    ("dtypes", "120 bfloat16", "120 float32", "parameters are float32 instead of bfloat16"),
    ("trained_parameters", "12", "120", "120 parameters are trained instead of 12"),
    ("module.gradient_checkpointing", "8", "0", "gradient checkpointing was switched off"),
    ("checkpointing", "False", "True", "gradient checkpointing was switched on"),
    ("checkpointing", "True", "False", "gradient checkpointing was switched off"),
    ("module.training", "9", "4", "5 modules went into evaluation mode"),
    ("module.recompute", "0", "2", "recompute became True in 2 modules"),
    ("optimizers", "AdamW", "SGD", "the optimizer is SGD instead of AdamW"),
    ("optimizer.foreach", "None", "False", "the optimizer's foreach is False instead of None"),
    ("optimizer_objects", "", "", "the optimizer was made anew"),
    ("hooks", "0 all modules", "1 Block, 0 all modules", "1 hook of Block was added"),
    ("parameter_hooks", "2", "0", "2 hooks of parameters were removed"),
    ("autocast", "", "bf16", "autocast is bf16 instead of off"),
    ("other_autocast", "bf16", "", "autocast is off instead of bf16 in a model that is not trained"),
    ("cudnn.benchmark", "True", "False", "cudnn.benchmark is False instead of True"),
    ("parameters", "10", "20", "the model has 20 parameters instead of 10"),
    ("no_sync", "on", "off", "the first micro-step of a step is outside of DDP's no_sync()"),
    ("no_sync", "off", "on", "the first micro-step of a step is within DDP's no_sync()"),
    *(
        ("inputs.Net", f"{old} float32", f"{new} {dtype}", text)
        for old, new, dtype, text in (
            (
                "500 x 2",
                "1000 x 2",
                "float32",
                "each row of Net's inputs is 1000 x 2 instead of 500 x 2, 2.0 times as many values",
            ),
            ("8", "4", "float32", "each row of Net's inputs is 4 instead of 8"),
            ("8", "8", "float64", "inputs of Net are float64 instead of float32"),
        )
    ),
    ("unoptimized", "", "30 elements, 4 tensors", "no optimizer updates 30 trained parameters"),
    ("unoptimized", "30 elements, 4 tensors", "", "optimizers update all parameters again"),
]


def write_change(recording: PlantedRecording, at: float, *changes: dict[str, Any], since_s: float = 3) -> Recording:
    facts = {"step": 5, "last_step": 2, "begin_ns": int((at - since_s) * S), "changes": list(changes)}
    recording.write_event(make_identity(0), at, events.TrainingChanged, **facts)
    return recording.open_recording()


@pytest.mark.parametrize(("name", "before", "after", "text"), CHANGES)
def test_a_change_in_a_sentence(name: str, before: str, after: str, text: str, tmp_path: Path) -> None:
    line = {"file": "train.py", "line": 82, "function": "main"}
    recording = write_change(PlantedRecording(tmp_path), 20, {"name": name, "before": before, "after": after, **line})
    found = list_changes(recording.events_of(events.TrainingChanged, recording.end_ns), BEGIN_NS)
    assert describe_changes(list(found)) == f"{text} (train.py:82 in main)"


def test_screens_show_the_autocast_that_was_on_last(tmp_path: Path) -> None:
    recording = write_change(record_pace(tmp_path, 0.5, 0.5), 20, {"name": "autocast", "before": "", "after": "bf16"})
    assert [read_first_engine(recording.at(BEGIN_NS + at * S)).autocast for at in (19, 21)] == [None, "bf16"]


def test_parameters_changed_when_their_optimizer_was_made(tmp_path: Path) -> None:
    """A change that the probe sees in a step long after its last look is dated by the line that made it."""
    made: dict[str, Any] = {"name": "optimizer_objects", "before": "", "after": "", "changed_ns": 19 * S}
    trained: dict[str, Any] = {"name": "trained_parameters", "before": "8", "after": "64"}
    for index, changes in enumerate(([made, trained], [trained])):
        folder = tmp_path / str(index)
        folder.mkdir()
        recording = write_change(PlantedRecording(folder), 20, *changes, since_s=18)
        found = list(list_changes(recording.events_of(events.TrainingChanged, recording.end_ns), BEGIN_NS))
        chosen = [
            [one.name for one in choose_changes(found, BEGIN_NS + at * S, BEGIN_NS + (at + 1) * S, BEGIN_NS + 30 * S)]
            for at in (5, 19)
        ]
        assert chosen[0] == ["trained_parameters"] * index
        assert "trained_parameters" in chosen[1]


@pytest.mark.parametrize("is_undone", [True, False])
def test_a_change_that_stays_explains_no_slowdown_that_ends(is_undone: bool, tmp_path: Path) -> None:
    """Iterations take twice as long from second 25 to second 55, and 0.5 s again for 60 s."""
    planted = record_pace(tmp_path, 0.5, 1.0, back=120)
    undone = {"name": "dtypes", "before": "9 float32", "after": "9 bfloat16", "changed_ns": int(54.9 * S)}
    if is_undone:
        write_change(planted, 57.1, undone)
    made = {"name": "dtypes", "before": "9 bfloat16", "after": "9 float32", "changed_ns": int(24.9 * S)}
    (finding,) = find_named(write_change(planted, 27.1, made), "iteration_shift")
    assert finding.headline.endswith("from step 30 to 59")
    assert ("parameters are float32" in finding.details) is is_undone


def test_one_change_is_not_both_the_begin_and_the_end_of_a_slowdown(tmp_path: Path) -> None:
    """Looks in second 20 and in second 60 enclose the whole slowdown."""
    planted = record_pace(tmp_path, 0.5, 1.0, back=120)
    change = {"name": "dtypes", "before": "9 bfloat16", "after": "9 float32"}
    (finding,) = find_named(write_change(planted, 60, change, since_s=40), "iteration_shift")
    assert finding.headline.endswith("from step 30 to 59")
    assert "float32" not in finding.details


def test_a_setting_that_switches_checkpointing_has_the_time_of_its_calls(tmp_path: Path) -> None:
    calls = {"name": "checkpointing", "before": "False", "after": "True", "changed_ns": 15 * S}
    setting = {"name": "module.use_checkpoint", "before": "0", "after": "6", "file": "train.py", "line": 48}
    for folder, seen in (("on", setting), ("off", setting | {"before": "6", "after": "0"})):
        (tmp_path / folder).mkdir()
        recording = write_change(PlantedRecording(tmp_path / folder), 20, seen, calls, since_s=18)
        found = list(list_changes(recording.events_of(events.TrainingChanged, recording.end_ns), BEGIN_NS))
        (change,) = choose_changes(found, BEGIN_NS + 14 * S, BEGIN_NS + 16 * S, BEGIN_NS + 30 * S)
        assert (change.begin_ns == change.end_ns == BEGIN_NS + 15 * S) is (folder == "on")
        assert change.text.endswith("in 6 modules (train.py:48)")


def test_options_that_only_one_class_of_optimizer_has_are_no_change_of_their_own(tmp_path: Path) -> None:
    changes = [
        {"name": "optimizer.amsgrad", "before": "False", "after": ""},
        {"name": "optimizer.momentum", "before": "", "after": "0.9"},
        {"name": "optimizer.foreach", "before": "None", "after": "False"},
        {"name": "optimizers", "before": "AdamW", "after": "SGD"},
    ]
    recording = write_change(PlantedRecording(tmp_path), 20, *changes)
    found = list(list_changes(recording.events_of(events.TrainingChanged, recording.end_ns), BEGIN_NS))
    chosen = choose_changes(found, BEGIN_NS + 17 * S, BEGIN_NS + 20 * S, BEGIN_NS + 30 * S)
    assert [one.name for one in chosen] == ["optimizers", "optimizer.foreach"]


def test_changes_at_another_time_are_no_cause(tmp_path: Path) -> None:
    recording = write_change(PlantedRecording(tmp_path), 20, {"name": "compiled", "before": "0", "after": "1"})
    found = list(list_changes(recording.events_of(events.TrainingChanged, recording.end_ns), BEGIN_NS))
    at = [BEGIN_NS + second * S for second in (5, 10, 18, 19, 30)]
    assert choose_changes(found, at[0], at[1], at[4]) == []
    assert choose_changes(found, at[2], at[3], at[3]) == [], "not known yet"
    assert choose_changes(found, at[2], at[3], at[4]) == found


def record_pace(
    folder: Path,
    before_s: float,
    after_s: float,
    *,
    gpu_use: float | tuple[float, float] = -1,
    passes: Sequence[float] = (),
    with_step: bool = False,
    back: int = 0,
) -> PlantedRecording:
    """Record 30 steps of one length and 30 of another, from second 10 on; then forwards and backwards of these seconds.

    ``back``: so many steps of the first length before these. ``with_step``: after each of them, one of several optimizers
    makes a step, which ends no step of the loop.
    """
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.node_event()
    recording.write_engine(kind="loop", zero_stage=None, device="cuda:0")
    at = 10.0
    spans: list[Any] = []
    begins: list[Any] = []
    for step in range(60 + back):
        long = after_s if 30 <= step < 60 else before_s
        for share, name in ((0.3, "forward"), (0.9, "backward"), (1.0, "step")):
            begin = at if name == "forward" else spans[-1][1] / S
            flags = tables.BOUNDARY if name == "step" else 0
            spans.append(make_span(begin, at + share * long, name, step, flags))
            begins.append(make_record(tables.BEGINS, begin, step=step, phase=PHASE_CODE[name]))
        at += long
    for long in passes:
        spans += [make_span(at, at + long / 2, "forward", 60), make_span(at + long / 2, at + long, "backward", 60)]
        at += long
        spans += [make_span(at - 0.001, at, "step", 60)] * with_step
    recording.write_records(tables.SPANS, who, spans, born=1)
    recording.write_records(tables.BEGINS, who, begins, born=1)
    recording.write_records(tables.ALLOCATOR, who, [make_reading(11, 2, 4)], born=1)
    early, late = gpu_use if isinstance(gpu_use, tuple) else (gpu_use, gpu_use)
    uses = [early] * 25 + [late] * 175
    samples = [
        make_record(tables.GPUS, second, utilization_percent=use, total_bytes=80 * GIB) for second, use in enumerate(uses)
    ]
    recording.write_records(tables.GPUS, recording.node, samples)
    return recording


def find_named(recording: Recording, name: str) -> list[Finding]:
    return [finding for finding in detect_findings(recording, recording.end_ns) if finding.name == name]


@pytest.mark.parametrize(
    ("changed_s", "said"),
    [
        (25.1, "; at the same time parameters are float32 instead of bfloat16 (train.py:86 in main)."),
        (24.9, "; parameters are float32 instead of bfloat16 (train.py:86 in main); this changed in step 29."),
    ],
)
def test_slower_iterations_are_explained_by_what_was_changed(changed_s: float, said: str, tmp_path: Path) -> None:
    """The host is a step ahead of the GPU where it waits for it only in the next step, 30."""
    planted = record_pace(tmp_path, 0.5, 1.0)
    change = {
        "name": "dtypes",
        "before": "9 bfloat16",
        "after": "9 float32",
        "file": "train.py",
        "line": 86,
        "function": "main",
    }
    recording = write_change(planted, 27.1, change | {"changed_ns": int(changed_s * S)})
    (finding,) = find_named(recording, "iteration_shift")
    assert finding.headline.endswith("from step 30 on")
    assert said in finding.details
    assert "If train.py:86 in main needs a float32 copy, convert a copy of the model" in finding.advice
    assert finding.fix == "copy.deepcopy(model).float()"
    assert finding.confidence >= 0.9


@pytest.mark.parametrize(("uses", "may_wait"), [((40, 100), True), ((97, 100), True), ((40, 60), False), ((-1, -1), False)])
def test_a_phase_in_which_the_host_may_wait_for_a_gpu_that_is_busy(
    uses: tuple[int, int], *, may_wait: bool, tmp_path: Path
) -> None:
    planted = record_pace(tmp_path, 0.5, 1.0, gpu_use=uses)
    made = {"name": "dtypes", "before": "9 bfloat16", "after": "9 float32", "changed_ns": int(24.9 * S)}
    (finding,) = find_named(write_change(planted, 27.1, made), "iteration_shift")
    assert (
        "in the backward phase on the host, which may wait for the GPU there, also for the step before;" in finding.details
    ) is may_wait


def test_another_optimizer_is_meant_to_take_its_time(tmp_path: Path) -> None:
    """Its name is in the script; options of the same one, such as foreach, may be there by mistake."""
    line = {"changed_ns": int(24.9 * S), "file": "train.py", "line": 46, "function": "main"}
    names = [("optimizers", "Adam", "LBFGS"), ("optimizer.foreach", "None", "False")]
    for at, (name, before, after) in enumerate(names):
        folder = tmp_path / str(at)
        folder.mkdir()
        change = {"name": name, "before": before, "after": after} | line
        (finding,) = find_named(write_change(record_pace(folder, 0.5, 1.0), 27.1, change), "iteration_shift")
        assert "(train.py:46 in main)" in finding.details
        assert finding.severity is (Severity.WARNING if at else Severity.INFO)


@pytest.mark.parametrize(
    ("after_s", "others", "severity"),
    [(1.1, [], Severity.INFO), (1.5, [], Severity.WARNING), (1.5, ["checkpointing"], Severity.INFO)],
)
def test_larger_inputs_take_their_time(after_s: float, others: list[str], severity: Severity, tmp_path: Path) -> None:
    """Time that grows by far more than the inputs is told with both; checkpointing adds forwards."""
    inputs = {"name": "inputs.Net", "before": "500 x 2 float32", "after": "1000 x 2 float32", "begin_ns": int(24.4 * S)}
    made = [{"name": name, "before": "False", "after": "True", "changed_ns": int(25.1 * S)} for name in others]
    (finding,) = find_named(write_change(record_pace(tmp_path, 0.5, after_s), 27.1, inputs, *made), "iteration_shift")
    assert finding.severity is severity
    assert "each row of Net's inputs is 1000 x 2 instead of 500 x 2, 2.0 times as many values" in finding.details
    assert bool(finding.advice) is (severity is Severity.WARNING)


def test_parameters_of_several_dtypes_have_no_one_conversion(tmp_path: Path) -> None:
    change = {"name": "dtypes", "before": "9 bfloat16, 1 float32", "after": "8 float32, 2 float64"}
    line = {"changed_ns": int(24.9 * S), "file": "train.py", "line": 86, "function": "main"}
    (finding,) = find_named(write_change(record_pace(tmp_path, 0.5, 1.0), 27.1, change | line), "iteration_shift")
    assert "If train.py:86 in main needs a copy, convert" in finding.advice
    assert finding.fix == "train.py:86"


def test_a_change_that_is_found_late_explains_what_was_reported_before(tmp_path: Path) -> None:
    planted = record_pace(tmp_path, 0.5, 1.0)
    recording = write_change(planted, 54.0, {"name": "autocast", "before": "bf16", "after": ""}, since_s=32)
    told = [one for one in detect_findings(recording, BEGIN_NS + 50 * S) if one.name == "iteration_shift"]
    assert ["no cause was found" in one.details for one in told] == [True]
    (finding,) = find_named(recording, "iteration_shift")
    assert "autocast is off instead of bf16; this changed between steps 23 and 58" in finding.details
    assert finding.known_ns >= BEGIN_NS + 54 * S


def test_a_setting_may_have_stood_before_the_last_look(tmp_path: Path) -> None:
    """The last look did not see it as it was then, but as it was read before."""
    changes: list[dict[str, Any]] = [{"name": "autocast", "before": "bf16", "after": "", "begin_ns": 12 * S}]
    changes.append({"name": "dtypes", "before": "9 bfloat16", "after": "9 float32"})
    recording = write_change(PlantedRecording(tmp_path), 20, *changes)
    found = list(list_changes(recording.events_of(events.TrainingChanged, recording.end_ns), BEGIN_NS))
    assert [one.begin_ns - BEGIN_NS for one in found] == [12 * S, 17 * S]


def test_a_change_of_the_training_explains_time_and_memory() -> None:
    """Between the steps with readings around the slowdown, of which the other steps are only counted."""
    rows = np.zeros(9, [(name, "i8") for name in ("step", "allocated_peak_bytes", "end_unix_ns")])
    rows["step"], rows["end_unix_ns"] = (*range(6), 32, 38, 44), np.array((*range(6), 32, 38, 44)) * S
    rows["allocated_peak_bytes"] = np.repeat((4 << 30, 6 << 30), (7, 2))
    line = CodeLine("train.py", 82, "main", ())
    made = TrainingChange("autocast", "bf16", "", 33 * S, 36 * S, 36 * S, line)

    def find_changes(earliest_ns: int, latest_ns: int, known_ns: int) -> list[TrainingChange]:
        return choose_changes([made], earliest_ns, latest_ns, known_ns)

    process = SimpleNamespace(phased_steps_until=lambda time_ns: rows, find_changes=find_changes)
    change: Any = SimpleNamespace(process=process, added_s=0.1, step=35, latest_ns=44 * S)
    cause = check_memory(change)
    assert cause is not None
    assert str(cause.text) == (
        "autocast is off instead of bf16 (train.py:82 in main), and steps began to allocate 2.00 GiB more"
    )
    assert (cause.finding, cause.advice) == ("memory_step", "")


@pytest.mark.parametrize(
    ("name", "before", "after", "text"),
    [("dtypes", "9 float32", "9 bfloat16", "bfloat16"), ("module.training", "9", "0", "evaluation mode")],
)
def test_a_change_that_makes_steps_cheaper_explains_no_slowdown(
    name: str, before: str, after: str, text: str, tmp_path: Path
) -> None:
    recording = write_change(record_pace(tmp_path, 0.5, 1.0), 27.1, {"name": name, "before": before, "after": after})
    (finding,) = find_named(recording, "iteration_shift")
    assert text not in finding.details


@pytest.mark.parametrize("is_lost", [True, False])
def test_gradients_that_are_reduced_in_each_micro_step(is_lost: bool, tmp_path: Path) -> None:
    """Reducing gradients in each micro-step explains longer steps, and no longer doing so does not."""
    values = ("on", "off") if is_lost else ("off", "on")
    change = {"name": "no_sync", "before": values[0], "after": values[1], "file": "train.py", "line": 82, "function": "main"}
    (finding,) = find_named(write_change(record_pace(tmp_path, 0.5, 1.0), 27.1, change), "iteration_shift")
    assert ("outside of DDP's no_sync() (train.py:82 in main)" in finding.details) is is_lost
    assert ("no_sync()" in finding.fix) is is_lost


@pytest.mark.parametrize(
    ("after_s", "since_s", "is_named"),
    [(0.6, 3.0, True), (0.6, 20.0, False), (1.0, 40.0, True)],
    ids=["between near looks", "between far looks", "a large change between far looks"],
)
def test_a_small_change_of_pace_is_no_proof_of_a_setting_that_changed_at_some_time_around_it(
    after_s: float, since_s: float, is_named: bool, tmp_path: Path
) -> None:
    change = {"name": "attention", "before": "sdpa", "after": "eager"}
    recording = write_change(record_pace(tmp_path, 0.5, after_s), 27.1, change, since_s=since_s)
    told = find_named(recording, "iteration_shift")
    assert any("attention is eager" in finding.details for finding in told) is is_named
    when = "at the same time attention" if since_s < 10 else "; this changed between steps "
    assert not is_named or any(when in finding.details for finding in told), told


_MODE = {"name": "module.training", "before": "9", "after": "0", "file": "train.py", "line": 82, "function": "evaluate"}
_LAYERS = {"name": "training_layers", "before": "2 Dropout", "after": ""}


@pytest.mark.parametrize(
    ("changes", "headlines"),
    [
        ([[_MODE, _LAYERS]], ["Step 5 trained the model in evaluation mode: train.py:82"]),
        ([[_MODE | {"after": "6"}, _LAYERS]], []),  # layers of a kind are frozen
        ([[_MODE]], []),  # none that the mode changes
        (
            [[_MODE, _LAYERS], [{"name": "training_layers", "before": "", "after": "2 Dropout"}]],
            ["Step 5 trained the model in evaluation mode, and step 5 did not: train.py:82"],
        ),
    ],
)
def test_a_model_that_trains_in_evaluation_mode(
    changes: list[list[dict[str, Any]]], headlines: list[str], tmp_path: Path
) -> None:
    planted = record_pace(tmp_path, 0.5, 0.5)
    for at, found in enumerate(changes):
        recording = write_change(planted, 20 + at, *found)
    told = find_named(recording, "evaluation_mode")
    assert [one.headline for one in told][-1:] == headlines
    assert all("train.py:82 in evaluate changed that. 2 Dropout: in evaluation mode" in one.details for one in told)


@pytest.mark.parametrize(
    ("after", "line", "headlines", "told"),
    [
        ("0 dropped, 30 elements, 4 left, 4 tensors, 0 unfrozen", True, "since step 20: train.py:82", "made the first of"),
        (
            "4 dropped, 30 elements, 4 left, 4 tensors, 0 unfrozen",
            True,
            "since step 20: train.py:82",
            "without them. The optimizer still",
        ),
        (
            "0 dropped, 30 elements, 0 left, 4 tensors, 4 unfrozen",
            True,
            "since step 20: train.py:82",
            "set them to be trained.",
        ),
        (
            "0 dropped, 30 elements, 4 left, 4 tensors, 0 unfrozen",
            False,
            "Since a step between 1 and 2",
            "parameter. The optimizer still",
        ),
        ("", False, "", ""),
        ("odd", True, "", ""),
    ],
)
def test_parameters_that_lost_their_optimizer(after: str, line: bool, headlines: str, told: str, tmp_path: Path) -> None:
    change: dict[str, Any] = {"name": "unoptimized", "before": "", "after": after, "begin_ns": int(10.6 * S)}
    if line:
        change |= {"changed_ns": 20 * S, "file": "train.py", "line": 82, "function": "main"}
    recording = write_change(record_pace(tmp_path, 0.5, 0.5), 25, change)
    found = find_named(recording, "unoptimized_parameters")
    assert len(found) == bool(headlines)
    assert all(headlines in one.headline and told in one.details for one in found)


@pytest.mark.parametrize("last_s", [19.4, 17.4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_is_called_without_its_ddp(ranks: int, last_s: float, tmp_path: Path) -> None:
    """Steps take half a second from second 10 on; where DDP was seen steps before, those between were only counted."""
    planted = record_pace(tmp_path, 0.5, 0.5)
    if ranks == 2:
        planted.write_engine(1, kind="loop", zero_stage=None, device="cuda:0")
        spans = [make_span(10 + step / 2, 10.4 + step / 2, "forward", step, BOUNDARY) for step in range(60)]
        planted.write_records(tables.SPANS, make_identity(1), spans)
    change = {"name": "no_sync", "before": "off", "after": "bypassed"}
    times = {"begin_ns": int(last_s * S), "changed_ns": int(19.8 * S)}
    recording = write_change(planted, 25, change | times)
    found = find_named(recording, "bypassed_ddp")
    assert len(found) == ranks - 1
    for one in found:
        earlier = "" if last_s > 19 else " or earlier"
        assert one.headline == f"Gradients are not reduced since step 19{earlier}: model called without DDP"
        assert one.details.startswith(f"DistributedDataParallel was last seen in step {18 if last_s > 19 else 14};")


def test_adapters_that_are_added_again_and_again_are_one_change_at_their_line(tmp_path: Path) -> None:
    planted, counts = PlantedRecording(tmp_path), ("8", "24", "40")
    for at, before, after in zip((20, 21), counts, counts[1:], strict=False):
        line = {"file": "adapters.py", "line": 31, "function": "grow", "changed_ns": int((at - 0.5) * S)}
        numbers = [{"name": name, "before": before, "after": after} for name in ("trained_parameters", "parameters")]
        kinds = {"name": "dtypes", "before": f"{before} bfloat16", "after": f"{after} bfloat16"}
        modules = [{"name": name, "before": before, "after": after} for name in ("module.training", "modules")]
        recording = write_change(planted, at, *numbers, *modules, kinds | line)
    found = list_changes(recording.events_of(events.TrainingChanged, recording.end_ns), BEGIN_NS)
    chosen = choose_changes(found, BEGIN_NS + 19 * S, BEGIN_NS + 21 * S, BEGIN_NS + 30 * S)
    assert describe_changes(chosen) == (
        "40 parameters are trained instead of 8, in 2 or more steps (adapters.py:31 in grow)"
    )


@pytest.mark.parametrize("name", ["dtypes", "devices"])
def test_more_parameters_of_the_same_kind_are_no_other_kind(tmp_path: Path, name: str) -> None:
    planted = record_pace(tmp_path, 0.5, 1.0)
    recording = write_change(planted, 27.1, {"name": name, "before": "9 cpu", "after": "18 cpu"})
    (finding,) = find_named(recording, "iteration_shift")
    assert "instead of" not in finding.details


@pytest.mark.parametrize("replays", [0, 4096])
def test_steps_that_are_not_seen_are_admitted(replays: int, tmp_path: Path) -> None:
    recording = record_pace(tmp_path, 0.1, 0.1, gpu_use=90)
    for number in (1, replays) if replays else ():
        facts = {"begin_ns": int(17 * S), "replays": number, "file": "train.py", "line": 40, "function": "main"}
        recording.write_event(make_identity(0), 17 if number == 1 else 22, events.GraphReplays, **facts)
    (finding,) = find_named(recording.open_recording(), "steps_unseen")
    assert finding.step == 59
    if replays:
        assert finding.headline == "No steps seen since step 59: replays of a CUDA graph are not visible"
        assert "train.py:40 in main" in finding.details
    else:
        assert "GPU 0 works" in finding.headline


@pytest.mark.parametrize("growth_s", [0.0, 0.01])
def test_passes_without_a_step_are_admitted(growth_s: float, tmp_path: Path) -> None:
    """Iterations take 0.1 s; each later pass, which no step follows, takes as long, or longer than the one before."""
    passes = [0.1 + growth_s * number for number in range(200 if growth_s else 600)]
    recording = record_pace(tmp_path, 0.1, 0.1, passes=passes).open_recording()
    told = [one for one in detect_findings(recording, BEGIN_NS + 27 * S) if one.name == "steps_unseen"]
    assert [one.step for one in told] == [59]
    finding = find_named(recording, "steps_unseen")[0]
    assert finding.evidence["backwards"] > 1.5 * told[0].evidence["backwards"]
    count = f"{finding.evidence['backwards']:.0f}"
    assert finding.headline == f"No optimizer step since step 59: {count} forwards and backwards seen"
    assert (finding.severity is Severity.WARNING) is bool(growth_s)
    assert ("instead of 100 ms" in finding.details) is ("detach" in finding.advice) is bool(growth_s)


@pytest.mark.parametrize(
    ("growth_s", "optimizer", "headline"),
    [
        (0.0, "", "No optimizer step is seen: 2"),
        (0.002, "", "Backwards come 3"),
        (0.0, "AdamW", ""),  # it may accumulate over many batches
    ],
)
def test_backwards_of_a_job_without_any_step(growth_s: float, optimizer: str, headline: str, tmp_path: Path) -> None:
    """A script that updates its weights itself: nothing of PyTorch shows its steps."""
    times = np.cumsum([0.05 + growth_s * number for number in range(300 if not growth_s else 150)])
    taken_s = [0.02 + growth_s * number / 2 for number in range(len(times))]
    spans = [make_span(1 + end - took, 1 + end, "backward", 0, 0) for end, took in zip(times, taken_s, strict=True)]
    planted = PlantedRecording(tmp_path)
    planted.write_engine(0, kind="loop", zero_stage=None, device="cpu", optimizer=optimizer)
    planted.write_records(tables.SPANS, make_identity(0), spans)
    found = find_named(planted.open_recording(), "steps_unseen")
    assert len(found) == bool(headline)
    assert all(one.headline.startswith(headline) and one.step is None for one in found)
    assert {one.severity is Severity.WARNING for one in found} == ({growth_s > 0} if found else set())


@pytest.mark.parametrize(("passes", "with_step"), [(150, True), (12, False)])
def test_a_step_in_progress_is_not_called_unseen(passes: int, with_step: bool, tmp_path: Path) -> None:
    """One of several optimizers makes steps, or there are only as many passes as in a larger accumulation."""
    recording = record_pace(tmp_path, 0.1, 0.1, passes=[12.0 / passes] * passes, with_step=with_step)
    assert find_named(recording.open_recording(), "steps_unseen") == []


@pytest.mark.parametrize(
    "file", ["torch/_dynamo/convert_frame.py", "torch/utils/data/dataloader.py", "torch/cuda/graphs.py"]
)
def test_a_step_that_is_compiled_or_awaits_its_batch_is_not_called_unseen(file: str, tmp_path: Path) -> None:
    recording = record_pace(tmp_path, 0.1, 0.1, gpu_use=90)
    frames = [{"file": file, "line": 9, "function": "run", "own": False}]
    facts = {"where": "unknown phase", "why": "slow", "begin_ns": 18 * S, "end_ns": 19 * S, "samples": 1}
    stacks = [{"count": 1, "seconds": 0.1, "frames": [0]}]
    recording.write_event(make_identity(0), 20, events.Stacks, **facts, step=60, frames=frames, stacks=stacks)
    found = find_named(recording.open_recording(), "steps_unseen")
    assert [one.step for one in found] == [59] * ("graphs" in file)


def test_an_idle_gpu_does_not_train_unseen(tmp_path: Path) -> None:
    assert find_named(record_pace(tmp_path, 0.1, 0.1, gpu_use=0).open_recording(), "steps_unseen") == []


def test_a_leak_names_the_list_that_keeps_views(tmp_path: Path) -> None:
    (finding,) = find_named(record_leak(tmp_path, held=HELD_LIST | {"bytes": gib_to_bytes(3.2)}), "memory_creep")
    assert finding.headline.startswith("seen keeps 0.20 GiB more a step on rank 0")
    assert "The list seen in main() (train.py) kept 20 tensors in step 36; train.py:97 adds to it." in finding.details
    assert "A view of 8 x 32,000 keeps a block of 8 x 512 x 32,000." in finding.details
    assert finding.fix == "seen.clear()"


def test_a_list_with_graphs_is_named_although_its_own_tensors_are_small(tmp_path: Path) -> None:
    """As the norms of gradients with their graphs: the probe does not count a large graph to its end."""
    small = HELD_LIST | {"name": "norms", "bytes": 20 * 512, "keeps_graph": True, "shape": [], "view_of": None}
    (finding,) = find_named(record_leak(tmp_path, held=small), "memory_creep")
    assert finding.headline.startswith("norms keeps ")
    assert "The list norms in main() (train.py) kept 20 tensors in step 36, with the graphs" in finding.details
    assert "train.py:97 adds to it" in finding.details


@pytest.mark.parametrize("held", [None, HELD_LIST | {"bytes": gib_to_bytes(0.5)}, HELD_LIST | {"count": 1}])
def test_a_holder_of_little_is_not_blamed(held: dict[str, Any] | None, tmp_path: Path) -> None:
    (finding,) = find_named(record_leak(tmp_path, held=held), "memory_creep")
    assert "seen" not in f"{finding.headline} {finding.details}"


def test_a_leak_that_slight_falls_interrupt_began_with_its_first_rise(tmp_path: Path) -> None:
    """Copies of the weights after every fourth step from 16 on; what else is left varies a little until step 32."""
    sizes = [4 + 0.12 * max(0, step // 4 - 3) - 0.004 * (step < 32 and step % 2) for step in range(90)]
    held = HELD_LIST | {"bytes": gib_to_bytes(0.12), "view_of": None}
    recording = record_leak(tmp_path, held=held, sizes=sizes, count=(17, 0.12))
    (finding,) = find_named(recording, "memory_creep")
    assert finding.step == 16
    assert finding.headline.startswith("seen keeps ")
    assert finding.evidence["grown_bytes"] / finding.evidence["steps"] == pytest.approx(gib_to_bytes(0.03), rel=0.1)


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        (((64 << 20, 6), (8 << 20, 12)), (6, 18)),  # a loop with three times as many iterations
        (((192 << 20, 2), (8 << 20, 4)), None),  # larger blocks
        (((64 << 20, 6), (8 << 20, 4)), None),  # the line runs as often, and one of its calls does not
    ],
)
def test_a_line_that_allocates_the_same_sizes_more_often(
    sizes: tuple[tuple[int, int], ...], counts: tuple[int, int] | None
) -> None:
    line = CodeLine("net.py", 40, "forward", ())
    then, now = (
        Look("peak", 4, 0, 1, 1, 1 << 30, 0, (LineBlocks(line, "forward", one),))
        for one in (((64 << 20, 2), (8 << 20, 4)), sizes)
    )
    growth = find_growth(now, then)
    assert growth is not None
    assert (growth.line, growth.counts) == (line, counts)


@pytest.mark.parametrize(
    ("values", "headlines"),
    [
        (["51300", "2048"], ["2,048 parameters are trained instead of 51,300 by step 20"]),
        (["2048", "51300"], []),
        (["51300", "32000"], []),
        (["51300", "32000", "51300", "2048"], []),  # in turn
    ],
)
def test_far_fewer_parameters_that_are_trained(values: list[str], headlines: list[str], tmp_path: Path) -> None:
    recording = record_pace(tmp_path, 0.5, 0.5)
    for number, (before, after) in enumerate(pairwise(values)):
        write_change(
            recording, 20 + 2 * number, {"name": "trained_parameters", "before": before, "after": after}, since_s=1.5
        )
    assert [one.headline for one in find_named(recording.open_recording(), "fewer_trained")] == headlines
