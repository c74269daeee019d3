"""A leak that fills the GPU: its rows in the ledger at the failure, and a cause and advice that name what leaks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memory_recording import GIB, HELD_LIST, OOM, PlantedRecording, gib_to_bytes, make_reading, record_leak
from small_recording import BEGIN_NS, S, make_identity
from zerotop.analysis.failures.out_of_memory import PostMortem, find_post_mortem
from zerotop.analysis.findings import begin_detection, detect_findings
from zerotop.analysis.findings.support import Finding
from zerotop.analysis.findings.support.memory.growing_readings import GrowthStretch
from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.kept_memory import find_leak
from zerotop.analysis.memory.leak_holders import choose_holder
from zerotop.analysis.memory.ledger_rows import ACTIVATIONS, ALLOCATED, GROWN, HELD
from zerotop.analysis.reports.memory import read_report
from zerotop.commands.common.memory_text import format_report
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events, tables

FULL = {"allocated_bytes": gib_to_bytes(9), "reserved_bytes": gib_to_bytes(9), "limit_bytes": gib_to_bytes(10)} | {
    "requested_bytes": gib_to_bytes(2),
    "free_bytes": gib_to_bytes(1),
    "step": 40,
}


def fail_at_the_end(folder: Path, *, held: dict[str, Any] | None, **facts: Any) -> Recording:
    """Record the leak of 3.8 GiB, of which a list kept 3.2 when it was counted, until memory runs out."""
    record_leak(folder, held=held)
    recording = PlantedRecording(folder)
    recording.write_event(make_identity(0), 50.5, events.OutOfMemory, **(OOM | FULL | facts))
    recording.write_inventory(50.5, "out_of_memory", {"parameters": 4}, unclaimed=5, step=40)
    return recording.open_recording()


def explain(recording: Recording) -> PostMortem:
    post_mortem = find_post_mortem(recording.at(BEGIN_NS + 60 * S))
    assert post_mortem is not None
    return post_mortem


def test_the_fix_is_that_of_the_leak(tmp_path: Path) -> None:
    found = explain(fail_at_the_end(tmp_path, held=HELD_LIST | {"bytes": gib_to_bytes(3.2)}))
    assert "Memory after a step grew by 3.80 GiB between steps 20 and 39." in found.cause
    assert "The list seen in main() (train.py) kept 20 tensors in step 36; train.py:97 adds to it." in found.cause
    assert (found.setting, found.fix) == ("seen", "seen.clear()")
    assert found.advice.startswith("Add a copy of the view to seen: .clone() lets the block go.")


def test_the_command_tells_the_step_of_which_no_micro_step_is_known(tmp_path: Path) -> None:
    report = read_report(fail_at_the_end(tmp_path, held=None, micro_step=None))
    assert report is not None
    (line,) = (line for line in format_report(report) if line.startswith("Out of memory"))
    assert line == "Out of memory: rank 0, GPU 0, step 40, backward"


def test_a_leak_whose_holder_is_unknown_still_comes_before_smaller_batches(tmp_path: Path) -> None:
    found = explain(fail_at_the_end(tmp_path, held=None))
    assert "grew by 3.80 GiB between steps 20 and 39." in found.cause
    assert found.advice.startswith("Find what keeps tensors from step to step")
    assert found.fix == ""


@pytest.mark.parametrize("facts", [{"requested_bytes": gib_to_bytes(6)}, {"allocated_bytes": gib_to_bytes(70)}])
def test_a_leak_without_which_memory_would_have_been_short_too_is_not_blamed(facts: dict[str, Any], tmp_path: Path) -> None:
    found = explain(fail_at_the_end(tmp_path, held=HELD_LIST, **facts))
    assert "grew by" not in found.cause


@pytest.mark.parametrize("held", [None, HELD_LIST | {"bytes": gib_to_bytes(3.2)}])
def test_outputs_of_ever_larger_batches_are_no_leak(held: dict[str, Any] | None, tmp_path: Path) -> None:
    """Unless a variable keeps many of them."""
    record_leak(tmp_path, held=held, grows_batches=True)
    recording = PlantedRecording(tmp_path)
    recording.write_event(make_identity(0), 50.5, events.OutOfMemory, **(OOM | FULL))
    assert ("grew by" in explain(recording.open_recording()).cause) == (held is not None)


def test_growth_after_a_count_is_in_no_other_row(tmp_path: Path) -> None:
    recording = fail_at_the_end(tmp_path, held=HELD_LIST | {"bytes": gib_to_bytes(3.2)})
    (ledger,) = read_ledgers(recording.at(BEGIN_NS + int(50.5 * S)))
    assert ledger.sum_bytes(*ALLOCATED) == ledger.allocated_bytes == gib_to_bytes(9)
    rows = {row.key: row for row in ledger.rows}
    assert [round(rows[key].bytes / 2**30, 3) for key in (HELD, GROWN, ACTIVATIONS)] == [3.2, 0.6, 1.2]
    assert rows[HELD].basis == "tensors counted in step 36, after the update"
    assert rows[GROWN].describe() == "grown since step 36"
    assert rows[GROWN].basis == "allocated after step 39 less that counted in step 36"


def test_memory_that_steps_left_since_the_last_reading_is_named(tmp_path: Path) -> None:
    record_leak(tmp_path, held=None, unread=2)
    recording = PlantedRecording(tmp_path)
    recording.write_event(make_identity(0), 50.5, events.OutOfMemory, **(OOM | FULL))
    (ledger,) = read_ledgers(recording.open_recording().at(BEGIN_NS + int(50.5 * S)))
    rows = {row.key: row for row in ledger.rows}
    assert rows[GROWN].basis == "allocated after step 37 less that counted in step 36"
    assert rows[ACTIVATIONS].basis == "allocated less the other rows, with what steps since 37 have left"


@pytest.mark.parametrize(
    ("held", "leaked"),
    [
        ([4, 4, 4, 5, 6, 7, 8], 4),
        ([4, 4, 9, 9, 9, 9, 9], None),  # a jump
        ([4, 5, 6, 7, 4, 4, 4], None),  # given back
        ([4, 4, 5, 4, 6, 5, 7, 6, 8], 4),  # between evaluations
        ([4, 4, 4.1, 4.3, 8, 8], None),  # mostly a jump
    ],
)
def test_a_leak_grows_in_several_rises(held: list[float], leaked: float | None, tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    readings = [make_reading(at, size, 20, phase="step", edge="end", step=at) for at, size in enumerate([0, *held])]
    recording.write_records(tables.ALLOCATOR, make_identity(0), readings, born=1)
    (source,) = recording.open_recording().at(BEGIN_NS + 60 * S).sources["allocator"]
    leak = find_leak(source, BEGIN_NS + 60 * S)
    assert (leak and leak.bytes) == (None if leaked is None else gib_to_bytes(leaked))


@pytest.mark.parametrize(("bytes_per_step", "count"), [(512, 0), (32 << 20, 1)])
def test_a_jump_among_tiny_rises_is_no_leak(bytes_per_step: int, count: int, tmp_path: Path) -> None:
    sizes = [4 + bytes_per_step / GIB * step + 0.3 * (step >= 20) for step in range(40)]
    found = detect_findings(record_leak(tmp_path, held=None, sizes=sizes), BEGIN_NS + 60 * S)
    assert [one.name for one in found].count("memory_creep") == count


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ([0.2] * 60 + [9] * 25, ["GPU memory grows 9.0 MiB a step on rank 0"]),
        ([0] * 60 + [9] * 25, ["GPU memory grows 9.0 MiB a step on rank 0"]),
        (([0.2] * 9 + [90]) * 12, ["GPU memory grows 9.2 MiB a step on rank 0"]),
        ([2] * 60 + [9] * 60, ["GPU memory grew 2.0 MiB a step on rank 0 to step 60", "GPU memory grows 9.0 MiB a step"]),
    ],
)
def test_the_rate_is_that_of_the_steps_that_are_told(rates: list[float], told: list[str], tmp_path: Path) -> None:
    sizes = 4 + np.cumsum([0, *rates]) / 1024
    recording = record_leak(tmp_path, held=None, sizes=sizes.tolist(), count=(len(rates) - 2, 1))
    found = [one for one in detect_findings(recording, recording.end_ns) if one.name == "memory_creep"]
    assert [one.headline.startswith(text) for one, text in zip(found, told, strict=True)] == [True] * len(told)
    for one in found:  # the steps times what each added is the sum
        added = one.evidence.get("mean_bytes_per_step") or one.evidence["bytes_per_step"]
        assert one.evidence["steps"] * added == pytest.approx(one.evidence["grown_bytes"], rel=0.01)
        is_told = f"in all, {format_bytes(added)} each" in one.details
        assert is_told == (format_bytes(added) != format_bytes(one.evidence["bytes_per_step"]))
    for one in found:
        facts = one.evidence
        assert facts["bytes_per_step"] * facts["steps"] == pytest.approx(facts["grown_bytes"], rel=0.15)


@pytest.mark.parametrize(
    ("counts", "is_told"),
    [
        ([("after_update", 1, 4), ("again", 30, 6)], True),
        ([("again", 24, 4.8), ("again", 34, 6.8)], True),
        ([("after_update", 1, 4), ("again", 30, 4.5)], False),  # a fourth of the growth
        ([("init", 0, 0), ("again", 30, 4)], False),  # the state itself
        ([("again", 30, 6)], False),
    ],
)
def test_an_optimizer_whose_state_grows_holds_the_leak(
    counts: list[tuple[str, int, float]], is_told: bool, tmp_path: Path
) -> None:
    record_leak(tmp_path, held=None, inner_optimizer="Shampoo")
    recording = PlantedRecording(tmp_path)
    for when, step, size in counts:
        recording.write_inventory(10.96 + step, when, {"parameters": 4, "optimizer_state": size}, step=step)
    found = detect_findings(recording.open_recording(), BEGIN_NS + 90 * S)
    (finding,) = (one for one in found if one.name == "memory_creep")
    assert (finding.headline.startswith("The state of Shampoo keeps 0.20 GiB more a step on rank 0")) is is_told
    assert ("It began with step 21. The optimizer's state had" in finding.details) is is_told


def tell_creeps(recording: Recording) -> list[str]:
    return [one.headline for one in detect_findings(recording, recording.end_ns) if one.name == "memory_creep"]


@pytest.mark.parametrize(("kept", "is_told"), [(2.4, True), (1.2, False)])
def test_a_list_is_compared_with_what_had_leaked_when_it_was_counted(kept: float, is_told: bool, tmp_path: Path) -> None:
    """By step 30, when the next reading is that of step 54."""
    sizes = [4 + 0.1 * step if step in {0, 4, 8, 12} or step >= 54 else None for step in range(60)]
    held = HELD_LIST | {"bytes": gib_to_bytes(kept)}
    recording = record_leak(tmp_path, held=held, sizes=sizes, count=(30, 3))
    assert ("seen keeps 0.10 GiB more a step on rank 0" in tell_creeps(recording)[-1]) is is_told


def test_a_list_that_was_as_large_before_the_leak_does_not_hold_it(tmp_path: Path) -> None:
    held = HELD_LIST | {"bytes": gib_to_bytes(3.2)}
    record_leak(tmp_path, held=held)
    recording = PlantedRecording(tmp_path)
    recording.write_inventory(11.95, "after_update", {"parameters": 4}, held=[held], unclaimed=3.2, step=1)
    assert "seen" not in tell_creeps(recording.open_recording())[-1]


def test_a_leak_is_told_again_when_its_holder_is_counted_later(tmp_path: Path) -> None:
    """As soon as it is counted, although memory has not grown by half since."""
    record_leak(tmp_path, held=None, sizes=[4] * 20 + [4 + 0.1 * step for step in range(150)], count=(2, 0))
    recording = PlantedRecording(tmp_path)
    told = [one for one in list_findings(recording.open_recording()) if one.name == "memory_creep"]
    step = int(told[5].evidence["held_step"]) + 36  # when no more is waited for it
    kept = step - 20
    held = HELD_LIST | {"bytes": gib_to_bytes(0.1 * kept), "count": kept}
    recording.write_inventory(10.95 + step, "again", {"parameters": 4}, held=[held], unclaimed=0.1 * kept, step=step)
    again = [one for one in list_findings(recording.open_recording()) if one.name == "memory_creep"]
    named = [one for one in again if one.headline.startswith("seen keeps")]
    assert named[0].known_ns == BEGIN_NS + int((10.95 + step) * S)
    assert int(named[0].evidence["held_step"]) == step
    assert len({one.event for one in again}) == 1


def list_findings(recording: Recording) -> list[Finding]:
    """Return each finding, and each time that it was told again."""
    detection = begin_detection(recording)
    detection.update(recording.end_ns)
    return list(detection.ordered_findings)


@pytest.mark.parametrize(
    ("shape", "view_of", "told"),
    [
        ([8, 32000], [8, 512, 32000], "A view of 8 x 32,000 keeps a block of 8 x 512 x 32,000."),
        ([32, 32, 16000], [32, 8, 32, 16000], "A view of 32 x 32 x 16,000 keeps a block 8 times as large."),  # [:, -32:]
        ([512, 10], [512, 3200, 10], "A view of 512 x 10 keeps a block 3,200 times as large."),  # [:, :10]
        ([], [8, 512], "A view of one element keeps a block 4,096 times as large."),  # losses[0, 0]
        ([4, 1000], [65536], "A view of 4 x 1,000 keeps a block 16 times as large."),
    ],
)
def test_the_block_of_a_view(shape: list[int], view_of: list[int], told: str, tmp_path: Path) -> None:
    held = HELD_LIST | {"bytes": gib_to_bytes(3.2), "shape": shape, "view_of": view_of}
    assert told in explain(fail_at_the_end(tmp_path, held=held)).cause


REPLACED = HELD_LIST | {"name": "out", "kind": "ModelOutput", "bytes": gib_to_bytes(3), "added_line": None}
NO_LINE = HELD_LIST | {"added_line": None}


def count_held(*held: dict[str, Any], allocated: float = 0) -> events.Tensors:
    facts = {"step": 36, "held": list(held), "allocated_bytes": gib_to_bytes(allocated)}
    return events.Tensors(facts, BEGIN_NS, make_identity(0))


def test_a_holder_without_a_name_is_not_told() -> None:
    assert choose_holder(count_held(HELD_LIST | {"name": ""}), gib_to_bytes(4)) is None


@pytest.mark.parametrize(
    ("held", "before", "name"),
    [
        ([REPLACED, HELD_LIST | {"bytes": gib_to_bytes(1)}], [], "seen"),
        ([REPLACED], [], None),
        ([NO_LINE | {"name": "buffer", "bytes": gib_to_bytes(3)}, HELD_LIST | {"bytes": gib_to_bytes(1)}], [], "seen"),
        ([NO_LINE | {"bytes": gib_to_bytes(1)}], [], "seen"),
        ([NO_LINE | {"bytes": gib_to_bytes(1)}], [NO_LINE | {"bytes": gib_to_bytes(1)}], None),
        ([NO_LINE | {"bytes": gib_to_bytes(1)}], [NO_LINE | {"bytes": gib_to_bytes(1), "count": 4}], "seen"),
    ],
    ids=["a local variable is larger", "only that", "no line adds to it", "no line is known", "as before", "it has grown"],
)
def test_what_holds_a_leak_is_added_to(held: list[dict[str, Any]], before: list[dict[str, Any]], name: str | None) -> None:
    found = choose_holder(count_held(*held), gib_to_bytes(1), count_held(*before))
    assert (found.name if found is not None else None) == name


@pytest.mark.parametrize(("added", "is_told"), [(0.5, True), (3, False)])
def test_a_tensor_that_is_made_anew_and_larger_holds_a_leak(added: float, is_told: bool) -> None:
    queue = NO_LINE | {"kind": "Tensor", "count": 1}
    before = count_held(queue | {"bytes": gib_to_bytes(1.6)}, allocated=9 - added)
    event = count_held(queue | {"bytes": gib_to_bytes(2)}, allocated=9)
    assert (choose_holder(event, gib_to_bytes(2), before) is not None) is is_told


@pytest.mark.parametrize(("unclaimed", "is_told"), [(0.5, True), (4.5, False)])
def test_the_variable_that_holds_what_a_step_began_to_keep(unclaimed: float, is_told: bool, tmp_path: Path) -> None:
    held = HELD_LIST | {"bytes": gib_to_bytes(4.5)}
    record_leak(tmp_path, held=held, sizes=[4] * 20 + [9] * 20, count=(21, 5.0))
    recording = PlantedRecording(tmp_path)
    recording.write_inventory(13.95, "again", {"parameters": 4}, unclaimed=unclaimed, step=3)
    found = detect_findings(recording.open_recording(), BEGIN_NS + 60 * S)
    (step,) = [one for one in found if one.name == "memory_step"]
    assert ("train.py:97 adds to it" in step.details) is is_told


@pytest.mark.parametrize(
    ("early", "late", "is_told"), [(False, True, True), (True, True, False), (False, False, False), (None, True, False)]
)
def test_the_variable_that_keeps_its_graph_since_a_rise(
    early: bool | None, late: bool, is_told: bool, tmp_path: Path
) -> None:
    """``early``, ``late``: whether it keeps a graph before the rise (None: it is not found then), and after it."""
    logits = NO_LINE | {"name": "logits", "kind": "Tensor", "count": 1, "keeps_graph": late, "bytes": gib_to_bytes(4.5)}
    record_leak(tmp_path, held=logits, sizes=[4] * 20 + [9] * 20, count=(21, 5.0))
    before = logits | {"keeps_graph": early, "bytes": gib_to_bytes(0.2)}
    held = [before] if early is not None else [before | {"name": "other", "keeps_graph": False}]
    recording = PlantedRecording(tmp_path)
    recording.write_inventory(13.95, "again", {"parameters": 4}, unclaimed=0.5, step=3, held=held)
    found = detect_findings(recording.open_recording(), BEGIN_NS + 60 * S)
    (step,) = [one for one in found if one.name == "memory_step"]
    assert ("logits in main() (train.py) kept the graph that computed it, 4.50 GiB in all" in step.details) is is_told
    assert (step.fix == "del logits") is is_told


@pytest.mark.parametrize(("stream", "is_told"), [(7, True), (0, False)])
def test_a_rise_that_stays_in_memory_of_another_stream(stream: int, is_told: bool, tmp_path: Path) -> None:
    record_leak(tmp_path, held=None, sizes=[4] * 20 + [9] * 20, count=(2, 0.5))
    recording = PlantedRecording(tmp_path)
    side = {"stream": stream, "private": False, "reserved": gib_to_bytes(7), "allocated": gib_to_bytes(4), "sparse": 0}
    recording.write_inventory(31.95, "again", {"parameters": 4}, unclaimed=5, step=21, pools=[side], stream=0)
    found = detect_findings(recording.open_recording(), BEGIN_NS + 60 * S)
    (step,) = [one for one in found if one.name == "memory_step"]
    assert ("; 7.00 GiB are reserved for another stream than the training's" in step.details) is is_told


def test_what_a_variable_takes_once_where_a_leak_begins_is_no_part_of_it(tmp_path: Path) -> None:
    """The model's output keeps 1.5 GiB more from step 21 on, and a list 0.1 GiB more in each."""
    sizes = tuple(4 + (1.5 + 0.1 * (step - 20) if step > 20 else 0) for step in range(40))
    held = HELD_LIST | {"bytes": gib_to_bytes(0.5), "count": 5}
    recording = record_leak(tmp_path, held=held, sizes=sizes, count=(25, 2.0))
    (creep,) = [one for one in detect_findings(recording, BEGIN_NS + 60 * S) if one.name == "memory_creep"]
    assert "The list seen in main() (train.py) kept 5 tensors in step 25" in creep.details


@pytest.mark.parametrize(("more", "per_step"), [(0, None), (200, 200)])
def test_only_a_reserve_that_grows_fills_the_device(more: int, per_step: int | None) -> None:
    """The peak falls by 100 MiB a step: without more reserve, only what is unused grows."""
    rows = np.zeros(20, [("step", "<i8"), ("allocated_peak_bytes", "<i8"), ("reserved_peak_bytes", "<i8")])
    rows["step"] = np.arange(20)
    rows["allocated_peak_bytes"] = (3000 - 100 * rows["step"]) << 20
    rows["reserved_peak_bytes"] = (9000 + more * rows["step"]) << 20
    growth = GrowthStretch.reserve_growth.fget(SimpleNamespace(rows=rows, held=[0, 1]))  # type: ignore[attr-defined]
    assert (growth and growth.per_step) == (None if per_step is None else per_step << 20)


@pytest.mark.parametrize(
    ("steps", "step_s", "is_told"), [(9, 1.0, False), (11, 1.0, True), (11, 0.1, False), (14, 0.1, True)]
)
def test_few_long_steps_show_a_leak(tmp_path: Path, steps: int, step_s: float, is_told: bool) -> None:
    """After ten steps with level memory, each of so many more leaves 0.2 GiB."""
    sizes = [4.0] * 10 + [4.2 + 0.2 * step for step in range(steps)]
    recording = record_leak(tmp_path, held=None, sizes=sizes, count=(8, 1), step_s=step_s)
    assert ("memory_creep" in [one.name for one in detect_findings(recording, BEGIN_NS + 60 * S)]) is is_told
