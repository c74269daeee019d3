"""What is said of steps that have more or larger batches when iterations take longer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from in_pieces import find_at_end
from small_recording import make_identity, make_span, write_table
from zerotop.analysis.findings.pace import iteration_shift
from zerotop.analysis.findings.support.causes.batch_causes import (
    Forwards,
    check_batch,
    describe_other_size,
    has_more_forwards,
    name_owner,
    read_forwards,
)
from zerotop.analysis.findings.support.causes.step_change import Cause, StepChange
from zerotop.analysis.script_terms import read_terms
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop_probe.recording import tables
from zerotop_probe.recording.events import EngineFacts
from zerotop_probe.recording.tables import BOUNDARY, EVAL, SPANS


def make_steps(rows: int, tokens: int, micro_steps: int, seconds: float) -> Any:
    steps = np.zeros(12, STEP_DTYPE)
    steps["rows"], steps["tokens"], steps["micro_steps"], steps["iteration_s"] = rows, tokens, micro_steps, seconds
    return steps


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ((16, 1024, 4), "steps have 4 micro-batches instead of 1"),
        ((16, 0, 4), "steps have 4 micro-batches instead of 1"),
        ((16, 1024, 1), "steps have 16 rows instead of 4"),
        ((4, 1024, 1), "batches have 1024 tokens instead of 256"),
        ((16, 1024, 2), "steps have 16 rows instead of 4"),
    ],
    ids=["accumulation", "without tokens", "rows", "length", "both"],
)
def test_the_changed_setting_is_named(size: tuple[int, int, int], text: str) -> None:
    before, after = make_steps(4, 256 if size[1] else 0, 1, 0.1), make_steps(*size, 0.4)
    cause = find_cause(before, after, {"kind": "loop"})
    assert (cause.text, cause.is_expected) == (text, True)
    assert cause.advice.startswith("If ")  # it may be meant
    assert "micro_step" not in cause.fix  # a name that the script may lack


def test_samples_are_grouped_for_each_rank() -> None:
    """LengthGroupedSampler would give all samples to each of them."""
    assert ".DistributedLengthGroupedSampler(" in read_terms(EngineFacts({}))["grouping_fix"]


@pytest.mark.parametrize(
    ("others", "owner"),
    [
        ([(256, 256)], "rank 0's"),
        ([(256, 256), (192, 192)], "rank 0's"),
        ([(256, 512)], "a rank's"),
        ([(256, 256), (256, 272)], "a rank's"),
        ([(0, 0)], "a rank's"),
        ([], "a rank's"),
    ],
)
def test_the_rank_is_named_whose_batches_alone_changed(others: list[tuple[int, int]], owner: str) -> None:
    processes = []
    for rank, sizes in enumerate([(256, 512), *others]):
        rows = np.concatenate([make_steps(4, size, 1, 0.1) for size in sizes])
        rows["step"] = np.arange(len(rows))
        processes.append(SimpleNamespace(rank=rank, phased_steps_until=lambda _, rows=rows: rows))
    assert name_owner(cast(Any, SimpleNamespace(lead=processes[0], processes=processes)), 11, 12, 0) == owner


@pytest.mark.parametrize(
    ("earlier", "is_planned"),
    [([256] * 12, False), ([192] * 12, True), ([256] * 5 + [192] + [256] * 6, False), ([128] * 11 + [192], False)],
    ids=["one jump", "in steps", "back", "at once"],
)
def test_larger_batches_by_a_plan_are_expected(earlier: list[int], is_planned: bool) -> None:
    """Iterations take 1.4 times as long on 1.25 times as many tokens, which without a plan is worth a warning."""
    first = make_steps(4, 128, 1, 0.1)
    first["tokens"] = earlier
    before = np.concatenate([make_steps(4, earlier[0], 1, 0.1), first, make_steps(4, 256, 1, 0.1)])
    after = np.concatenate([make_steps(4, 320, 1, 0.14)] * 3)
    assert find_cause(before, after, {}, first=24).is_expected == is_planned


@pytest.mark.parametrize(
    ("size", "forwards", "text"),
    [
        ((6, 0, 1), (2, 3), "steps have 3 forwards instead of 2"),
        ((6, 384, 1), (2, 3), "steps have 3 forwards instead of 2"),
        ((6, 0, 1), (2, 2), "steps have 6 rows instead of 4"),
        ((12, 0, 1), (2, 3), "steps have 12 rows instead of 4"),
        ((4, 384, 1), (2, 2), "batches have 384 tokens instead of 256"),
    ],
    ids=["one more", "of tokens", "larger ones", "more and larger ones", "longer ones"],
)
def test_more_forwards_are_no_larger_batches(size: tuple[int, int, int], forwards: tuple[int, int], text: str) -> None:
    before, after = make_steps(4, 256 if size[1] else 0, 1, 0.1), make_steps(*size, 0.15)
    assert find_cause(before, after, {}, forwards=forwards).text == text


@pytest.mark.parametrize(
    ("sizes", "is_more"),
    [([8, 3], True), ([8, 8, 8], True), ([8], False), ([12, 3], False), ([], False)],
    ids=["a smaller one more", "two more", "as before", "a larger one and another", "none"],
)
def test_a_step_has_more_forwards_if_the_first_is_as_large_as_before(sizes: list[int], *, is_more: bool) -> None:
    before, after = read_forwards_of([8]), read_forwards_of(sizes)
    assert (after.number, after.rows) == (len(sizes), sizes[0] if sizes else 0)
    assert has_more_forwards(before, after) is is_more


def read_forwards_of(sizes: list[int]) -> Forwards:
    """Return the forwards of three steps that each have these, and one of an evaluation."""
    steps = np.zeros(3, STEP_DTYPE)
    steps["step"] = np.arange(3)
    spans = np.zeros((3, len(sizes) + 1), [(name, code) for name, code in tables.SPANS.dtype])
    spans["step"], spans["rows"] = np.arange(3)[:, None], [*sizes, 4]
    spans["flags"][:, -1] = tables.EVAL
    process: Any = SimpleNamespace(read_phases=lambda begin_ns, end_ns, name: SimpleNamespace(rows=spans.ravel()))
    return read_forwards(process, steps)


def find_cause(
    before: Any, after: Any, engine: dict[str, Any], *, first: int = 0, forwards: tuple[int, int] = (1, 1)
) -> Cause:
    """Return the cause of a change between these steps; a few of them, from ``first`` on, are those nearest to it.

    ``forwards``: in each step before and after. The others are those of an evaluation, and of a model without a batch.
    """
    steps = np.concatenate([before, after])
    steps["step"] = np.arange(len(steps))
    spans = np.zeros(
        len(before) * (forwards[0] + 2) + len(after) * (forwards[1] + 2), [(name, code) for name, code in tables.SPANS.dtype]
    )
    counts = np.repeat(np.add(forwards, 2), (len(before), len(after)))
    spans["step"] = np.repeat(steps["step"], counts)
    for name in ("rows", "tokens"):
        spans[name] = np.repeat(np.maximum(1, steps[name] // (counts - 2)), counts)
    first_of_step = np.cumsum(counts) - counts
    spans["rows"][first_of_step], spans["flags"][first_of_step + 1] = -1, tables.EVAL
    before, after = np.split(steps, [len(before)])
    process: Any = SimpleNamespace(
        engine=EngineFacts(engine),
        source=SimpleNamespace(offset_ns=0),
        events_of=lambda kind: [],
        derive=lambda make: make(process),
        phased_steps=steps,
        phased_steps_until=lambda known_ns: steps,
        read_phases=lambda begin_ns, end_ns, name: SimpleNamespace(rows=spans),
    )
    group = cast(Any, SimpleNamespace(processes=[process], lead=process))
    change = StepChange(group, before[first:], after, known_ns=0)
    vars(change)["phased"] = before[first:], after[: len(after) - first]
    cause = check_batch(change)
    assert cause is not None
    return cause


@pytest.mark.parametrize(
    ("engine", "fix"),
    [
        ({}, '"gradient_accumulation_steps": 2'),
        ({"library": "Trainer"}, "gradient_accumulation_steps=2"),
        ({"kind": "loop"}, ""),
    ],
    ids=["DeepSpeed", "the Trainer", "a loop"],
)
def test_accumulation_is_set_as_in_the_script(engine: dict[str, Any], fix: str) -> None:
    assert find_cause(make_steps(8, 512, 2, 0.1), make_steps(16, 1024, 4, 0.4), engine).fix == fix


@pytest.mark.parametrize(("old", "is_later"), [(0, False), (1, False), (2, True), (3, True)])
def test_batches_that_became_larger_after_the_iterations_are_another_change(old: int, is_later: bool) -> None:
    before, after = make_steps(4, 256, 1, 0.1), make_steps(4, 1024, 1, 0.4)
    after["tokens"][:old] = 256
    assert find_cause(before, after, {}).has_own_finding is is_later


def test_batches_of_varying_sizes_do_not_show_a_later_change() -> None:
    before, after = make_steps(4, 256, 1, 0.1), make_steps(4, 1024, 1, 0.4)
    before["tokens"][::2], after["tokens"][:2] = 500, 256
    assert not find_cause(before, after, {}).has_own_finding


def test_of_sizes_that_vary_more_steps_show_the_usual_ones() -> None:
    """The three steps before the change and after it have other sizes than most."""
    before, after = make_steps(4, 256, 1, 0.1), make_steps(4, 1024, 1, 0.4)
    before["tokens"][-3:], after["tokens"][:3] = (120, 140, 160), (1400, 1500, 1600)
    assert find_cause(before, after, {}, first=9).text == "batches have 1024 tokens instead of 256"


@pytest.mark.parametrize(
    ("counts", "length", "told"),
    [
        pytest.param((1, 6), 0.02, True, id="more"),
        pytest.param((0, 5), 0.02, True, id="begun"),
        pytest.param((1, 6), 0.005, False, id="too short"),
        pytest.param((1, 1), 0.02, False, id="as many"),
    ],
)
def test_more_forwards_that_train_nothing(tmp_path: Path, counts: tuple[int, int], length: float, *, told: bool) -> None:
    """Between the phases: a teacher's, or views of the batch without gradients."""
    spans, at = [], 0.0
    for step in range(100):
        at += 0.01 if step < 40 else 0.11 - (counts[1] - counts[0]) * length
        for _ in range(counts[step >= 40]):
            spans.append(make_span(at, at + length, "forward", step, EVAL))
            at += length
        for phase, flags in (("forward", 0), ("backward", 0), ("step", BOUNDARY)):
            spans.append(make_span(at, at + 0.02, phase, step, flags))
            at += 0.02
    write_table(tmp_path, SPANS, make_identity(0), *spans).close()
    (shift,) = find_at_end(tmp_path, [iteration_shift.detect])
    text = f"steps have {counts[1]} forwards that train nothing instead of {counts[0]}, which take 1"
    assert (text in shift.details) is told


@pytest.mark.parametrize(
    ("new", "on_gpu", "is_named"),
    [(4, True, True), (4, False, False), (12, True, False), (0, True, True)],
    ids=["in the queue", "no queue", "too long before", "at once"],
)
def test_larger_batches_take_longer_once_the_queue_of_launches_is_full(new: int, *, on_gpu: bool, is_named: bool) -> None:
    """The host of a GPU runs ahead: iterations become longer ``new`` steps after the batches have become larger."""
    steps = np.concatenate([make_steps(4, 256, 1, 0.1)] * 6 + [make_steps(4, 512, 1, 0.1)] * 6)
    steps["step"] = steps["end_unix_ns"] = np.arange(len(steps))
    first = int(np.argmax(steps["tokens"] == 512)) + new
    steps["iteration_s"][first:] = 0.15
    process: Any = SimpleNamespace(is_on_gpu=on_gpu, phased_steps_until=lambda known_ns: steps[: known_ns + 1])
    group = cast(Any, SimpleNamespace(processes=[process], lead=process))
    change = StepChange(group, steps[first - 4 : first] if new else steps[:first], steps[first:], known_ns=0)
    before, after = change.phased
    assert bool(before["tokens"].max() < after["tokens"].min()) is is_named


def test_an_optimizer_that_runs_its_closure_again_has_no_more_micro_batches() -> None:
    cause = find_cause(make_steps(4, 256, 1, 0.1), make_steps(16, 1024, 4, 0.4), {"optimizers": [{"class": "LBFGS"}]})
    assert (cause.text, cause.advice, cause.fix) == ("steps have 4 passes instead of 1", "", "")


@pytest.mark.parametrize(("rows", "text"), [(56, "steps have 56 rows instead of 24, first recorded in step 50"), (25, "")])
def test_a_change_of_the_batch_that_is_too_small_is_no_silence(rows: int, text: str) -> None:
    steps = np.concatenate([make_steps(24, 0, 1, 0.01)] * 10 + [make_steps(rows, 0, 1, 0.1)] * 10)
    steps["step"] = steps["end_unix_ns"] = np.arange(len(steps))
    first = int(np.argmax(steps["iteration_s"] > 0.05))
    steps["step"][first:] += 50 - first
    process: Any = SimpleNamespace(is_on_gpu=False, phased_steps_until=lambda known_ns: steps)
    group = cast(Any, SimpleNamespace(processes=[process], lead=process))
    change = StepChange(group, steps[:first], steps[first:], known_ns=0)
    told = describe_other_size(change)
    assert (told is not None) is bool(text)
    assert text in str(told or "")
