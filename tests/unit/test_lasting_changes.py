"""Changes of a pace that wanders, workers that deliver in bursts, and evaluations that come often."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recordings import open_recording
from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings import Finding, Severity, link_findings, load_kinds
from zerotop.analysis.findings.pace import (
    checkpoint_pause,
    data_bursts,
    data_stall,
    evaluations_often,
    iteration_drift,
    iteration_shift,
    long_pause,
    repeated_pause,
    steps_in_turn,
    time_in_line,
    waits_for_launches,
)
from zerotop.analysis.findings.support import detection
from zerotop.analysis.findings.support.links import drop_superseded
from zerotop.analysis.formatting import Text
from zerotop.analysis.reports.finding_costs import rank_findings
from zerotop.analysis.script_terms import set_interval
from zerotop.analysis.stats.wander import find_split, measure_order, refine_split
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, PROCESSES, SPANS
from zerotop_probe.recording.writer import EventWriter

_PHASES = ("forward", "backward", "step")


def write_parts(
    folder: Path,
    steps: Sequence[Sequence[float]],
    *,
    evaluated: Sequence[int] = (),
    saved: Sequence[int] = (),
    tokens: Sequence[int] = (),
    counted_from: int | None = None,
) -> list[float]:
    """Write a rank whose steps take these seconds in forward, backward and step, and before these. Return their ends."""
    at, spans, ends = 0.0, [], []
    for step, (*parts, between) in enumerate(steps):
        for phase, chosen in (("eval", evaluated), ("checkpoint_save", saved)):
            if step in chosen:
                spans.append(make_span(at, at + 0.2, phase, step))
                at += 0.2
        at += between
        for phase, length in zip(_PHASES, parts, strict=True):
            size = tokens[step] if tokens and phase == "forward" else -1
            is_counted = counted_from is not None and step >= counted_from
            flags = (BOUNDARY | COUNTED if is_counted else BOUNDARY) if phase == "step" else 0
            if phase == "step" or not is_counted:
                spans.append(make_span(at, at + length, phase, step, flags, tokens=size))
            at += length
        ends.append(at)
    write_table(folder, SPANS, make_identity(0), *spans).close()
    return ends


def find(folder: Path, *detectors: detection.Detector) -> tuple[Finding, ...]:
    recording = read_recording(folder)
    runner = detection.Detection(recording, detectors)
    runner.update()
    return runner.findings_at(recording.end_ns)


def list_levels(folder: Path, between: Sequence[float]) -> list[tuple[int | None, float | None, int, int]]:
    """Return the first and last step of each change of pace, and its levels in ms, of steps with so long between phases."""
    random = np.random.default_rng(1)
    write_parts(folder, [[0.01, 0.01, 0.01, seconds * random.normal(1.0, 0.01)] for seconds in between])
    shown = drop_superseded(find(folder, iteration_shift.detect))
    levels = [(one.evidence["before_s"], one.evidence["after_s"]) for one in shown]
    return [
        (one.step, one.evidence.get("until_step"), round(100 * before) * 10, round(100 * after) * 10)
        for one, (before, after) in zip(shown, levels, strict=True)
    ]


@pytest.mark.parametrize("piece", [5, 512])
def test_two_near_levels_are_told_each(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "_PIECE", piece)
    told = list_levels(tmp_path, [0.02] * 70 + [0.07] * 15 + [0.22] * 150)
    assert told == [(70, 84, 50, 100), (85, None, 100, 250)]


@pytest.mark.parametrize(
    "between",
    [
        [0.02] * 70 + [0.07] * 5 + [0.22] * 150,
        [0.02] * 70 + [0.17] * 15 + [0.22] * 150,
        [0.02] * 70 + np.linspace(0.03, 0.2, 15).tolist() + [0.22] * 150,
    ],
    ids=["for a moment", "hardly more", "a slope"],
)
def test_parts_of_one_change_are_told_as_one(tmp_path: Path, between: Sequence[float]) -> None:
    assert [told[2:] for told in list_levels(tmp_path, between)] == [(50, 250)]


@pytest.mark.parametrize("later", [0.12, 0.03])
def test_a_wait_for_data_has_the_times_of_its_steps(tmp_path: Path, later: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps that wait take another time than most."""
    at, spans = 0.0, []
    for step in range(240):
        waited = 0.0 if step < 60 else 0.06 if step < 75 else later
        for phase, length in zip(("data", *_PHASES), (waited, 0.02, 0.02, 0.01), strict=True):
            spans.append(make_span(at, at + length, phase, step, BOUNDARY if phase == "step" else 0))
            at += length
    write_table(tmp_path, SPANS, make_identity(0), *spans).close()
    (found,) = find(tmp_path, data_stall.detect)
    assert found.step == 60
    assert found.evidence["iteration_s"] == pytest.approx(later + 0.05, abs=0.001)
    for piece in (5, 100):
        monkeypatch.setattr(detection, "_PIECE", piece)
        assert find(tmp_path, data_stall.detect) == (found,)


def wander(seed: int, count: int = 400, spread: float = 0.1) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the parts of steps that all become longer and shorter together, for 20 steps at a time."""
    random = np.random.default_rng(seed)
    pace = np.repeat(random.normal(1.0, spread, count // 20), 20)[:, None]
    return np.asarray([0.015, 0.015, 0.002, 0.01] * pace * random.normal(1.0, 0.05, (count, 4)))


@pytest.mark.parametrize("seed", range(3))
def test_a_part_that_stays_longer_is_reported_where_the_pace_wanders(tmp_path: Path, seed: int) -> None:
    steps = wander(seed, 600)
    steps[300:, 3] += 0.012
    write_parts(tmp_path, steps.tolist())
    found = [one for one in find(tmp_path, iteration_shift.detect) if abs((one.step or 0) - 300) <= 20]
    assert ["between the phases" in one.details for one in found] == [True]


@pytest.mark.parametrize("change", [None, 340, 400, 600, 620])
def test_a_pace_that_changes_for_good_does_not_wander(tmp_path: Path, change: int | None) -> None:
    """Steps 320 to 639 are judged: the change may be in the first of them, among them, or in the last ones."""
    steps = wander(2, 640, 0.2 if change is None else 0.08)
    steps[change or 640 :] *= 8
    write_parts(tmp_path, steps.tolist())
    found = find(tmp_path, waits_for_launches.detect)
    assert [one.name for one in found[:1]] == (["pace_wanders"] if change is None else [])
    for one in found[:1]:
        first, last = (one.headline.values[name] for name in ("first_step", "last_step"))  # type: ignore[attr-defined]
        levels = np.median(steps.sum(axis=1)[first : last + 1].reshape(-1, 20), axis=1)
        assert one.evidence["iteration_s"] == pytest.approx(float(np.median(levels)), rel=0.01)
        assert one.evidence["low_s"] <= one.evidence["iteration_s"] <= one.evidence["high_s"]


def test_the_range_of_a_wandering_pace_is_of_the_steps_since_the_last_change(tmp_path: Path) -> None:
    steps = wander(2, 1280, 0.2)
    steps[:900] *= 4
    write_parts(tmp_path, steps.tolist())
    found = [one for one in find(tmp_path, waits_for_launches.detect) if one.name == "pace_wanders"]
    assert [one.headline.values["first_step"] for one in found[-1:]] == [900]  # type: ignore[attr-defined]
    assert found[-1].evidence["low_s"] <= found[-1].evidence["iteration_s"] <= found[-1].evidence["high_s"]


def test_the_split_with_the_clearest_order() -> None:
    levels = np.array([5.0, 6, 5, 7, 6, 8, 9, 7, 8, 9, 8])
    split = refine_split(levels, find_split(levels, 3), 3)
    assert split == 5
    assert measure_order(levels[:split], levels[split:]) == pytest.approx(29.5 / 30)


@pytest.mark.parametrize(
    ("period", "sampled", "elsewhere_s", "pauses"),
    [(8, 1, 0.0, 20), (60, 1, 0.0, 0), (2, 3, 0.0, 20), (4, 3, 0.03, 20), (4, 3, 0.9, 19)],
)
def test_workers_that_deliver_in_bursts(tmp_path: Path, period: int, sampled: int, elsewhere_s: float, pauses: int) -> None:
    """In counted steps, only stacks show that training waits; every 60th step, that is the begin of an epoch.

    Stacks of each so many pauses are sampled: those of the second one show where the others are, for so many seconds.
    """
    waits = [step for step in range(40, 40 + 20 * period) if step % period == 0]
    ends = write_parts(
        tmp_path,
        [[0.01, 0.02, 0.005, 1.0 if step in waits else 0.005] for step in range(40 + 20 * period)],
        counted_from=20,
    )
    frames = [{"file": "torch/utils/data/dataloader.py", "line": 1, "function": "_MultiProcessingDataLoaderIter._next_data"}]
    frames.append({"file": "train.py", "line": 82, "function": "main", "own": True})
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    for step in waits[period == 4 :: sampled]:
        is_elsewhere = bool(elsewhere_s) and step == waits[1 + sampled]
        stacks = [{"seconds": elsewhere_s, "frames": [1]} if is_elsewhere else {"seconds": 0.9, "frames": [0, 1]}]
        times = {"begin_ns": int((ends[step] - 0.95) * S), "end_ns": int((ends[step] - 0.05) * S), "step": step}
        facts = {"where": "unknown phase", "why": "slow", "last_step": step, "frames": frames, "stacks": stacks}
        writer.write(int((ends[step] + 0.01) * S), events.Stacks, **times, **facts)
    writer.close()
    workers = {"loader_workers": 8, "loader_cores": 7.6, "loader_waiting_cores": 0.0, "loader_blocked": 0.0}
    ticks = (int(S * tick / 2) for tick in range(int(2 * ends[-1])))
    rows = (make_record(PROCESSES, time_ns=tick, pid=100, rank=0, **workers) for tick in ticks)
    write_table(tmp_path, PROCESSES, make_identity(-1), *rows).close()
    found = find(tmp_path, data_bursts.detect)
    told = [(one.name, one.step, one.evidence["pauses"]) for one in found]
    assert told == ([("data_stall", waits[0], pauses)] if pauses else [])
    assert all(one.evidence["iteration_s"] == pytest.approx(0.04) for one in found)
    assert all("each is busy" in one.details and "train.py:82" in one.details for one in found)


@pytest.mark.parametrize(("period", "told"), [(10, True), (60, False)])
def test_evaluations_that_come_often(tmp_path: Path, period: int, told: bool) -> None:
    write_parts(tmp_path, [[0.02, 0.04, 0.005, 0.005]] * 500, evaluated=range(60, 500, period))
    found = find(tmp_path, evaluations_often.detect)
    assert [(one.name, one.step) for one in found] == ([("evaluations_often", 60)] if told else [])
    assert all("steps: that takes at most 5 % of the time." in one.advice and not one.fix for one in found)


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [(230, 500, [230]), (0, 500, []), (230, 245, [])],
    ids=["in mid-run", "from the first step on", "for a few steps"],
)
def test_an_evaluation_before_each_step(tmp_path: Path, first: int, last: int, told: list[int]) -> None:
    """Before each step of all it may be a part of the training, as where a policy plays."""
    write_parts(tmp_path, [[0.01, 0.02, 0.002, 0.002]] * 500, evaluated=range(first, last))
    found = find(tmp_path, evaluations_often.detect)
    assert [one.step for one in found] == told
    assert all("one before each step" in one.headline and "If training does not need" in one.advice for one in found)
    costs = rank_findings(found, read_steps(read_recording(tmp_path)), BEGIN_NS + 1000 * S)
    assert [one.seconds for one in costs] == pytest.approx([0.2 * (last - first)] * len(told))


def test_iterations_that_begin_to_take_turns(tmp_path: Path) -> None:
    steps = [[0.004, 0.006, 0.002, 0.05 if step >= 300 and step % 5 == 0 else 0.004] for step in range(500)]
    write_parts(tmp_path, steps)
    (turns,) = find(tmp_path, steps_in_turn.detect)
    assert (turns.step, turns.evidence["period"]) == (300, 5)
    (tmp_path / "always").mkdir()
    write_parts(tmp_path / "always", [[0.004, 0.006, 0.002, 0.05 * (step % 5 == 0)] for step in range(500)])
    assert not find(tmp_path / "always", steps_in_turn.detect)


@pytest.mark.parametrize(("last", "shift"), [(360, 0), (460, 2), (490, 0)])
def test_iterations_that_took_turns_for_a_while(tmp_path: Path, last: int, shift: int) -> None:
    """They end only where none is as long any more: a new epoch may count from another step. The loss is of those alone."""
    is_long = [300 <= step <= last and (step + (shift if step > 400 else 0)) % 5 == 0 for step in range(500)]
    steps = [[0.004, 0.006, 0.002, 0.05 if long else 0.004] for long in is_long]
    steps += [[0.004, 0.006, 0.002, 0.02]] * 500  # longer for another reason
    write_parts(tmp_path, steps)
    (turns,) = find(tmp_path, steps_in_turn.detect)
    until = max(step for step in range(500) if is_long[step])
    assert (turns.step, turns.evidence["until_step"], turns.severity) == (300, until, Severity.WARNING)
    (cost,) = rank_findings([turns], read_steps(read_recording(tmp_path)), BEGIN_NS + 1000 * S)
    assert cost.seconds == pytest.approx(0.046 * sum(is_long), rel=0.05)
    assert turns.headline.startswith(f"In steps 300 to {until}, one of 5 iterations took 46 ms longer")


def test_turns_that_are_long_only_at_times_are_not_told(tmp_path: Path) -> None:
    """Of turns that differ, the last one alone would be a beginning: nothing follows from one."""
    longer_s = [0.0] * 18 + [0.2, 0.2, 0.06, 0.2, 0.2, 0.2, 0.0, 0.05, 0.06, 0.05, 0.05, 0.2]
    steps = [[0.04, 0.04, 0.01, 0.01 + (0.0 if step % 3 else longer_s[step // 3])] for step in range(88)]
    write_parts(tmp_path, steps)
    assert not find(tmp_path, steps_in_turn.detect)


@pytest.mark.parametrize(("ahead_s", "told"), [(0.01, 0), (0.045, 1)])
def test_a_long_step_after_which_the_host_runs_ahead_loses_no_time(tmp_path: Path, ahead_s: float, told: int) -> None:
    """Each twentieth waits for the GPU, whose work takes longer from step 281 on."""
    before, since = [0.07, 0.01, 0.01, 0.016, *[0.0205] * 16], [0.12, ahead_s, ahead_s, 0.041, *[0.0455] * 16]
    each_s = [0.0205, *before * 14, *since * 8, *since[:7]]
    write_parts(tmp_path, [[0.002, 0.003, 0.001, one - 0.006] for one in each_s])
    assert len(find(tmp_path, steps_in_turn.detect)) == told


@pytest.mark.parametrize(("is_kept", "grown"), [(True, 8 << 20), (False, None)], ids=["in these", "in all"])
def test_memory_that_grows_in_the_iterations_that_take_longer(tmp_path: Path, is_kept: bool, grown: int | None) -> None:
    """It explains them where it is kept in a known container."""
    each_s = [0.05 if step >= 300 and step % 25 == 0 else 0.016 for step in range(750)]
    ends = write_parts(tmp_path, [[0.004, 0.006, 0.002, one - 0.012] for one in each_s])
    times = np.arange(1, ends[-1] * 10) / 10
    done = np.searchsorted(ends, times)
    kept = (done + 24) // 25 * (8 << 20) if is_kept else done * (8 << 20) // 25
    rows = zip((times * S).astype(int).tolist(), ((1 << 30) + kept).tolist(), strict=True)
    samples = (make_record(PROCESSES, time_ns=at, pid=100, rank=0, rss_bytes=held, held_bytes=held) for at, held in rows)
    write_table(tmp_path, PROCESSES, make_identity(-1), *samples).close()
    (turns,) = find(tmp_path, steps_in_turn.detect)
    assert turns.evidence.get("grown_bytes") == (grown and pytest.approx(grown, rel=0.1))
    kept_in = Text("{kept_in}", {"kept_in": "outputs"})
    kind = dataclasses.replace(load_kinds()["host_growth"], lasts=True)
    growth = dataclasses.replace(turns, name="host_growth", headline=kept_in, kind=kind)
    (linked,) = (one for one in link_findings([growth, turns]) if one.finding is turns)
    assert (linked.cause is growth) is is_kept


def test_frequent_checkpoints_are_counted_on(tmp_path: Path) -> None:
    write_parts(tmp_path, [[0.02, 0.04, 0.005, 0.005]] * 300, saved=range(60, 300, 10))
    (saves,) = find(tmp_path, checkpoint_pause.detect)
    assert (saves.step, saves.evidence["period"]) == (59, 10)
    assert 22 <= saves.evidence["saves"] <= 24
    assert saves.evidence["pause_s"] == pytest.approx(0.2 * saves.evidence["saves"])
    # 0.2 s in 10.2 s
    assert saves.advice.startswith("Save every 200 steps: that takes at most 2 % of the time.")
    assert saves.fix == ""
    assert set_interval(events.EngineFacts({"library": "Trainer"}), "save", 200) == 'save_strategy="steps", save_steps=200'


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        pytest.param({}, None, id="no line"),
        pytest.param({87: [(0, 1), (1, 2), (3, 4)]}, 87, id="one line"),
        pytest.param({87: [(0, 1)], 120: [(1, 1), (2, 2), (4, 4), (8, 8)]}, 120, id="the line with most of the saves"),
        pytest.param({87: [(0, 1)], 120: [(1, 1)], 130: [(2, 1)]}, None, id="no line with most of them"),
    ],
)
def test_the_line_that_saves_is_named_without_samples(
    tmp_path: Path, lines: dict[int, list[tuple[int, int]]], told: int | None
) -> None:
    """Each line has some of its saves: the index among all, and the number of the line's saves until then."""
    write_parts(tmp_path, [[0.02, 0.04, 0.005, 0.005]] * 300, saved=range(60, 300, 10))
    writer = EventWriter(str(tmp_path), make_identity(0))
    for index, line, count in sorted((index, line, count) for line, known in lines.items() for index, count in known):
        begin_ns = int(((60 + 10 * index) * 0.07 + index * 0.2 + 0.001) * S)
        writer.write(begin_ns, events.CheckpointLine, saves=count, file="train.py", line=line, function="save")
    writer.close()
    (saves,) = find(tmp_path, checkpoint_pause.detect)
    assert (f"train.py:{told}" in saves.headline) is ("saved at" in saves.details) is (told is not None)
    assert saves.fix == (f"train.py:{told}" if told is not None else "")


@pytest.mark.parametrize(("begins", "told"), [((4.25, 9.0), True), ((1.0, 1.005), False)])
def test_one_long_save_has_the_line_that_began_it(tmp_path: Path, begins: tuple[float, float], told: bool) -> None:
    write_parts(tmp_path, [[0.02, 0.04, 0.005, 0.005]] * 60, saved=())
    identity = make_identity(0)
    spans = [make_span(1.0, 1.01, "checkpoint_save", 14), make_span(4.2, 6.2, "checkpoint_save", 60)]
    write_table(tmp_path, SPANS, identity, *spans).close()
    writer = EventWriter(str(tmp_path), identity)
    for line, begin in enumerate(begins, 87):
        writer.write(int(begin * S), events.CheckpointLine, saves=1, file="train.py", line=line, function="save")
    writer.close()
    (pause,) = find(tmp_path, checkpoint_pause.detect)
    assert ("train.py:87" in pause.details) is told
    assert (pause.advice, pause.fix) == ("", "")  # one save is no reason to save less


@pytest.mark.parametrize(("step_s", "count", "told"), [(0.007, 4, "warning"), (0.007, 3, None), (0.07, 5, None)])
def test_few_checkpoints_that_take_much_of_the_time(tmp_path: Path, step_s: float, count: int, told: str | None) -> None:
    """Each takes 0.2 s, which alone is no finding; other parts of the time are theirs if iterations are shorter."""
    write_parts(tmp_path, [[step_s / 2, step_s / 4, 0.0, step_s / 4]] * 200, saved=range(100, 100 + 10 * count, 10))
    found = find(tmp_path, checkpoint_pause.detect)
    assert [one.severity.value for one in found] == ([told] if told else [])


def test_turns_that_also_save_a_checkpoint_count_all_of_it(tmp_path: Path) -> None:
    """Each fifth step copies what it saves for 50 ms; the checkpoint itself, of 200 ms, is not a part of its iteration."""
    steps = [[0.004, 0.006, 0.002, 0.054 if step >= 300 and step % 5 == 0 else 0.004] for step in range(500)]
    write_parts(tmp_path, steps, saved=range(300, 500, 5))
    (turns,) = find(tmp_path, steps_in_turn.detect)
    assert (turns.step, turns.evidence["pause_s"]) == (300, pytest.approx(0.25))
    assert turns.evidence["after_s"] == pytest.approx(0.016 + 0.25 / 5, rel=0.1)
    assert "200 ms in that one" in turns.details
    saves = find(tmp_path, checkpoint_pause.detect)
    assert [one.severity.value for one in saves] == ["warning"]
    assert drop_superseded([*saves, turns]) == (turns,)


@pytest.mark.parametrize(("long_s", "turns", "told"), [(0.1, 6, 1), (0.1, 4, 0), (0.03, 6, 0), (0.03, 13, 1)])
def test_far_longer_turns_show_sooner(tmp_path: Path, long_s: float, turns: int, told: int) -> None:
    """Also where iterations before were now and then as long, without taking turns."""
    steps = [[0.004, 0.006, 0.002, 0.04 if step in (31, 58, 62, 77) else 0.004] for step in range(100)]
    steps += [[0.004, 0.006, 0.002, 0.004 + long_s * (step % 8 == 0)] for step in range(8 * turns)]
    write_parts(tmp_path, steps)
    found = find(tmp_path, steps_in_turn.detect)
    assert [(one.step, one.evidence["period"]) for one in found] == [(100, 8)] * told


@pytest.mark.parametrize(("count", "told"), [(2, 0), (3, 0), (4, 1), (7, 1)])
def test_four_far_steps_are_a_change_though_most_time_was_before(tmp_path: Path, count: int, told: int) -> None:
    steps = [[0.004, 0.006, 0.002, 0.004]] * 2000 + [[0.5 + 0.1 * (at % 3), 0.3, 0.2, 0.1] for at in range(count)]
    write_parts(tmp_path, steps)
    found = find(tmp_path, iteration_shift.detect)
    assert [(one.step, one.severity) for one in found] == [(2000, Severity.WARNING)] * told


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_pause_in_the_last_step_is_reported_once_the_job_has_ended(tmp_path: Path, says_goodbye: bool) -> None:
    ends = write_parts(tmp_path, [[0.004, 0.006, 0.002, 0.004]] * 100 + [[4.0, 0.006, 0.002, 0.004]])
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Hello)
    if says_goodbye:
        writer.write(int(1e9 * (ends[-1] + 0.1)), events.Goodbye)
    writer.close()
    assert [one.step for one in find(tmp_path, long_pause.detect)] == [100] * says_goodbye


def test_samples_that_come_later_name_the_line(tmp_path: Path) -> None:
    """A line that takes a share of each iteration is sampled now and then, perhaps when its change has long been told."""
    ends = write_parts(tmp_path, [[0.004, 0.006, 0.002, 0.004 if step < 200 else 0.024] for step in range(1000)])
    frames = [{"file": "train.py", "line": 60, "function": "main", "own": True}]
    stacks = [{"count": 20, "seconds": 0.4, "call": "json.dumps", "frames": [0]}]
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    facts = {"where": "between phases", "why": "share", "frames": frames, "step": 500, "last_step": 600, "stacks": stacks}
    begin_ns, end_ns = int(ends[500] * S), int(ends[600] * S)
    writer.write(end_ns, events.Stacks, begin_ns=begin_ns, end_ns=end_ns, **facts)
    writer.write(int(ends[-1] * S), events.Goodbye)
    writer.close()
    found = find(tmp_path, iteration_shift.detect)
    assert [one.headline.endswith("from step 200 on: train.py:60") for one in found] == [True]


@pytest.mark.parametrize(("saved_s", "count"), [(0.008, 0), (0.0, 1)])
def test_a_line_that_costs_next_to_nothing_is_not_told(tmp_path: Path, saved_s: float, count: int) -> None:
    """The line takes 9 ms more of 62, and the forward phase perhaps 8 less."""
    ends = write_parts(
        tmp_path, [[0.02 - saved_s * (step >= 60), 0.03, 0.01, 0.002 + 0.009 * (step >= 60)] for step in range(120)]
    )
    frames = [{"file": "train.py", "line": 60, "function": "main", "own": True}]
    stacks = [{"count": 20, "seconds": 0.4, "call": "json.dumps", "frames": [0]}]
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    facts = {"where": "between phases", "why": "slow", "frames": frames, "step": 60, "last_step": 64, "stacks": stacks}
    writer.write(int(ends[64] * S), events.Stacks, begin_ns=int(ends[60] * S), end_ns=int(ends[64] * S), **facts)
    writer.write(int(ends[-1] * S), events.Goodbye)
    writer.close()
    assert len(find(tmp_path, iteration_shift.detect)) == count


@pytest.mark.parametrize(
    ("calls", "told", "fix"),
    [
        ({"torch.nn.functional.conv3d": 30, "run_backward": 80, "torch.relu": 4}, "in torch.nn.functional.conv3d", True),
        ({"torch.nn.functional.scaled_dot_product_attention": 30}, "functional.scaled_dot_product_attention", False),
        ({"torch.nn.functional.conv3d": 20, "torch.nn.functional.linear": 20}, "", False),
    ],
)
def test_a_pause_within_the_model_names_the_library_call(
    calls: dict[str, int], told: str, fix: bool, tmp_path: Path
) -> None:
    ends = write_parts(tmp_path, [[4.0 if step == 100 else 0.004, 0.006, 0.002, 0.001] for step in range(110)])
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Engine, engine=0, device="cuda:0")
    frames = [{"file": "net.py", "line": 60, "function": "forward", "own": True}]
    stacks = [{"count": count, "seconds": count / 50, "call": call, "frames": [0]} for call, count in calls.items()]
    facts = {"where": "forward", "why": "slow", "frames": frames, "stacks": stacks, "step": 100, "last_step": 100}
    writer.write(int(ends[100] * S), events.Stacks, begin_ns=int(ends[99] * S), end_ns=int(ends[100] * S), **facts)
    writer.close()
    (pause,) = find(tmp_path, long_pause.detect)
    assert told in pause.details
    assert ("cudnn.benchmark" in pause.fix) is fix
    assert (pause.severity is Severity.INFO) is (bool(told) and not fix)
    assert ("profile" in pause.fix) is (not told)


@pytest.mark.parametrize("is_switched", [True, False])
def test_a_pause_in_a_convolution_names_when_cudnn_began_to_try_its_algorithms(is_switched: bool, tmp_path: Path) -> None:
    ends = write_parts(tmp_path, [[4.0 if step == 100 else 0.004, 0.006, 0.002, 0.001] for step in range(110)])
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Engine, engine=0, device="cuda:0")
    writer.write(0, events.TorchFlags, step=0, cudnn_benchmark=False)
    frames = [{"file": "net.py", "line": 60, "function": "forward", "own": True}]
    stacks = [{"count": 30, "seconds": 0.6, "call": "torch.nn.functional.conv3d", "frames": [0]}]
    facts = {"where": "forward", "why": "slow", "frames": frames, "stacks": stacks, "step": 100, "last_step": 100}
    begin_ns, end_ns = int(ends[99] * S), int(ends[100] * S)
    writer.write(end_ns, events.Stacks, begin_ns=begin_ns, end_ns=end_ns, **facts)
    if is_switched:
        line = {"file": "train.py", "line": 9, "function": "main"}
        change = {"name": "cudnn.benchmark", "before": "False", "after": "True", **line}
        writer.write(end_ns, events.TrainingChanged, step=100, last_step=98, begin_ns=int(ends[98] * S), changes=[change])
    writer.close()
    (pause,) = find(tmp_path, long_pause.detect)
    assert "in torch.nn.functional.conv3d" in pause.details
    assert ("since then cudnn.benchmark is True instead of False (train.py:9" in pause.details) is is_switched
    assert (pause.fix, pause.severity is Severity.INFO) == (
        ("torch.backends.cudnn.benchmark = False", False) if is_switched else ("", True)
    )


@pytest.mark.parametrize("call", ["item", "json.dumps"])
def test_a_line_that_waits_for_the_gpu_is_not_the_place_of_a_drift(tmp_path: Path, call: str) -> None:
    between = [0.004] * 100 + np.linspace(0.004, 0.06, 100).tolist()
    ends = write_parts(tmp_path, [[0.004, 0.006, 0.002, one] for one in between])
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Engine, engine=0, device="cuda:0")
    frames = [{"file": "train.py", "line": 60, "function": "main", "own": True}]
    stacks = [{"count": 20, "seconds": 0.4, "call": call, "frames": [0]}]
    facts = {"where": "between phases", "why": "slow", "frames": frames, "stacks": stacks}
    for step in range(105, 200, 5):
        begin_ns, end_ns = int(ends[step - 5] * S), int(ends[step] * S)
        writer.write(end_ns, events.Stacks, begin_ns=begin_ns, end_ns=end_ns, step=step - 5, last_step=step, **facts)
    writer.write(int(ends[-1] * S), events.Goodbye)
    writer.close()
    (drift,) = find(tmp_path, iteration_drift.detect)
    assert ("train.py:60" in drift.details) is (call != "item")


def test_a_rise_within_what_the_run_visited_before_is_no_drift(tmp_path: Path) -> None:
    rise = np.linspace(1.0, 1.5, 60)
    for name, before in (("calm", np.ones(300)), ("visited", np.repeat([1.0, 1.3, 1.0], 100))):
        (tmp_path / name).mkdir()
        seconds = 0.02 * np.concatenate([before, rise]) * np.random.default_rng(2).normal(1.0, 0.01, 360)
        write_parts(tmp_path / name, [[0.3 * one, 0.4 * one, 0.1 * one, 0.2 * one] for one in seconds])
        assert [one.name for one in find(tmp_path / name, iteration_drift.detect)] == ["iteration_drift"] * (name == "calm")


@pytest.mark.parametrize(("times", "told"), [(1.6, False), (3.0, True)])
def test_a_rise_of_short_steps_without_phases_is_large(times: float, told: bool, tmp_path: Path) -> None:
    """As of a reinforcement learner that asks its policy more often, the longer it trains."""
    seconds = 0.004 * np.linspace(1.0, times, 800) * np.random.default_rng(2).normal(1.0, 0.01, 800)
    write_parts(tmp_path, [[0.3 * one, 0.4 * one, 0.1 * one, 0.2 * one] for one in seconds], counted_from=2)
    assert bool(find(tmp_path, iteration_drift.detect)) is told


@pytest.mark.parametrize(
    ("since", "told"),
    [
        ({63: ("sort", 22), 60: ("item", 58)}, True),
        ({63: ("cpu", 22), 60: ("item", 58)}, False),  # the wait for the GPU has moved there
        ({60: ("item", 80)}, False),
    ],
)
def test_a_rise_that_may_be_wandering_is_told_with_a_line_that_is_new(
    since: dict[int, tuple[str, int]], told: bool, tmp_path: Path
) -> None:
    """As of a metric that looks at all results so far."""
    seconds = 0.006 * np.concatenate([np.ones(400), np.linspace(1.0, 1.7, 800)])
    write_sampled(tmp_path, seconds, (10, 390, {60: ("item", 80)}), (700, 1190, since))
    found = find(tmp_path, iteration_drift.detect)
    assert [one.named_line for one in found] == ["train.py:63"] * told


@pytest.mark.parametrize("told", [True, False])
def test_a_slowdown_within_what_the_run_wanders_is_told_with_a_line_that_is_new(told: bool, tmp_path: Path) -> None:
    seconds = np.repeat([0.020, 0.028, 0.022, 0.029, 0.020, 0.029], [40, 40, 40, 40, 240, 400])
    since = {60: ("relu", 60), 63: ("sort", 20)} if told else {60: ("relu", 80)}
    write_sampled(tmp_path, seconds, (170, 390, {60: ("relu", 80)}), (410, 600, since))
    found = [one for one in find(tmp_path, iteration_shift.detect) if one.step is not None and one.step >= 390]
    assert [one.named_line for one in found] == ["train.py:63"] * told


@pytest.mark.parametrize(("sort", "told"), [(28, True), (0, False)])
def test_a_line_that_is_new_explains_few_steps(sort: int, told: bool, tmp_path: Path) -> None:
    """As of a loop that begins to look at each element, in a pace that wanders, in the last 40 steps of a job."""
    pace = np.repeat([1.0, 0.85, 1.2, 0.8, 1.15, 0.9, 1.05], 12)
    seconds = np.concatenate([0.065 * pace, np.full(44, 0.115)]) * np.random.default_rng(3).normal(1.0, 0.17, 128)
    since = {60: ("relu", 80 - sort)} | ({63: ("sort", sort)} if sort else {})
    write_sampled(tmp_path, seconds, (11, 29, {60: ("relu", 80)}), (58, 79, {60: ("relu", 40)}), (86, 98, since))
    found = [one for one in find(tmp_path, iteration_shift.detect) if one.severity is Severity.WARNING]
    assert [one.named_line for one in found][-1:] == ["train.py:63"] * told
    assert all(abs((one.step or 0) - 84) <= 6 for one in found)


@pytest.mark.parametrize(("sort", "told"), [(24, True), (0, False)])
@pytest.mark.parametrize("seed", range(3))
def test_a_slowdown_that_only_its_line_tells_from_noise(sort: int, told: bool, seed: int, tmp_path: Path) -> None:
    """As where a callback writes its whole history: single steps vary by as much as that adds, and no step has phases."""
    noise = np.random.default_rng(seed).normal(0.0, 0.004, 290)
    seconds = 0.025 + noise + np.concatenate([np.zeros(170), np.linspace(0.009, 0.012, 120)])
    since = {60: ("relu", 80 - sort)} | ({63: ("sort", sort)} if sort else {})
    write_sampled(tmp_path, seconds, (11, 120, {60: ("relu", 80)}), (190, 225, since), (230, 260, since))
    found = [one for one in find(tmp_path, iteration_shift.detect) if one.severity is Severity.WARNING]
    assert [one.named_line for one in found][-1:] == ["train.py:63"] * told
    assert all(abs((one.step or 0) - 170) <= 6 for one in found)


@pytest.mark.parametrize("early", [0, 20])
def test_time_between_phases_is_not_told_of_all_steps_by_a_line_that_is_new(early: int, tmp_path: Path) -> None:
    usual = {60: ("relu", 80 - early)} | ({63: ("json.dump", early)} if early else {})
    write_sampled(tmp_path, np.full(400, 0.04), (11, 120, usual), (260, 390, {60: ("relu", 60), 63: ("json.dump", 20)}))
    assert [one.named_line for one in find(tmp_path, time_in_line.detect)][-1:] == ["train.py:63"] * (early > 0)


@pytest.mark.parametrize(("following_s", "told"), [(0.02, True), (0.002, False)])
def test_a_wait_for_queued_work_is_no_pause(following_s: float, told: bool, tmp_path: Path) -> None:
    """Where CUDA graphs are replayed, the host runs ahead, and waits where a loss is read: the next steps are short."""
    pauses = list(range(60, 240, 20))
    seconds = [0.11 if step in pauses else following_s if (step - 1) // 5 * 5 in pauses else 0.02 for step in range(250)]
    ends = write_parts(tmp_path, [[0.0, 0.0, 0.001, one - 0.001] for one in seconds])
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Engine, engine=0, kind="loop", device="cuda:0")
    frames = [{"file": "train.py", "line": 47, "function": "log", "own": True}]
    for step in pauses:
        facts = {"where": "between phases", "why": "slow", "step": step, "last_step": step, "samples": 3, "frames": frames}
        facts |= {"stacks": [{"count": 3, "seconds": 0.09, "frames": [0]}]}
        times = {"begin_ns": int(ends[step - 1] * S), "end_ns": int((ends[step] - 0.01) * S)}
        writer.write(int(ends[step] * S), events.Stacks, **times, **facts)
    writer.close()
    assert [one.step for one in find(tmp_path, repeated_pause.detect)] == [60] * told


def write_sampled(
    folder: Path,
    seconds: np.ndarray[tuple[int], np.dtype[np.float64]],
    *samples: tuple[int, int, dict[int, tuple[str, int]]],
) -> None:
    """Write counted steps, and samples from a step to another: the called function and the number, by line."""
    ends = write_parts(folder, [[0.3 * one, 0.4 * one, 0.1 * one, 0.2 * one] for one in seconds], counted_from=2)
    writer = EventWriter(str(folder), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Engine, engine=0, device="cuda:0")
    for begin, end, lines in samples:
        frames = [{"file": "train.py", "line": line, "function": "main", "own": True} for line in lines]
        stacks = [
            {"count": count, "seconds": count / 50, "call": call, "frames": [number]}
            for number, (call, count) in enumerate(lines.values())
        ]
        facts = {"where": "unknown phase", "why": "share", "frames": frames, "stacks": stacks, "samples": 80}
        facts |= {"step": begin, "last_step": end, "begin_ns": int(ends[begin] * S), "end_ns": int(ends[end] * S)}
        writer.write(int(ends[end] * S), events.Stacks, **facts)
    writer.close()


@pytest.mark.parametrize(("where", "column"), [("between phases", 3), ("step", 2)])
def test_iterations_that_take_turns_name_the_line_of_the_long_ones(tmp_path: Path, where: str, column: int) -> None:
    steps = [[0.004, 0.006, 0.002, 0.004] for _ in range(400)]
    for step in range(300, 400, 5):
        steps[step][column] += 0.046
    ends = write_parts(tmp_path, steps)
    frames = [{"file": "train.py", "line": line, "function": "main", "own": True} for line in (82, 90)]
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    facts = {"frames": frames, "where": where}
    for step in range(300, 400):  # what usually takes a share is another line
        why, shown = ("slow", 0) if step % 5 == 0 else ("share", 1)
        stacks = [{"count": 1, "seconds": 0.04, "call": "time.sleep", "frames": [shown]}]
        times = {"begin_ns": int((ends[step] - 0.015) * S), "end_ns": int(ends[step] * S), "step": step, "last_step": step}
        writer.write(int((ends[step] + 0.001) * S), events.Stacks, **times, **facts, why=why, stacks=stacks)
    writer.close()
    (turns,) = find(tmp_path, steps_in_turn.detect)
    assert turns.headline.endswith("of 5 iterations takes 46 ms longer: train.py:82")
    assert "train.py:82" in turns.details


def test_time_in_a_line_is_told_of_the_steps_before_a_change(tmp_path: Path) -> None:
    """The samples that show the line are written after the pace has changed, before the change is known."""
    random = np.random.default_rng(5)
    between = np.where(np.arange(200) < 100, 0.009, 0.025) * random.uniform(0.97, 1.03, 200)
    ends = write_parts(tmp_path, [[0.01, 0.01, 0.003, one] for one in between])
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    frames = [{"file": "train.py", "line": 38, "function": "main", "own": True}]
    stacks = [{"count": 20, "seconds": 0.4, "call": "time.sleep", "frames": [0]}]
    facts = {"frames": frames, "where": "between phases", "why": "share", "stacks": stacks, "samples": 20}
    times = {"begin_ns": int(ends[12] * S), "end_ns": int(ends[104] * S), "step": 12, "last_step": 104}
    writer.write(int(ends[104] * S), events.Stacks, **facts, **times)
    writer.close()
    found = find(tmp_path, iteration_shift.detect, time_in_line.detect)
    (shift,), (always,) = ([one for one in found if one.name == name] for name in ("iteration_shift", "time_between_phases"))
    assert shift.step == 100
    assert always.headline == "28 % of each 32 ms iteration is spent between the phases: train.py:38"
    assert "In steps 1 to 99, 9.0 ms of it" in always.details
    assert "Some of the samples are of later steps, up to 104." in always.details


def test_a_wait_for_data_is_measured_anew_at_another_pace(tmp_path: Path) -> None:
    spans, at = [], 0.0
    for step in range(120):
        for phase, seconds in (("data", 0.03 if step < 60 else 0.06), ("forward", 0.02), ("backward", 0.02), ("step", 0.01)):
            spans.append(make_span(at, at + seconds, phase, step, BOUNDARY if phase == "step" else 0))
            at += seconds
    write_table(tmp_path, SPANS, make_identity(0), *spans).close()
    (found,) = find(tmp_path, data_stall.detect)
    assert found.step == 0
    assert found.headline == "55 % of each 110 ms iteration is spent waiting for data"
    begin, _, end = found.details.partition("60 ms on rank 0 (steps ")
    assert begin == "From step 0 on, "
    first, last = map(int, end.removesuffix(").").split(" to "))
    assert 60 <= first < last < 120


@pytest.mark.parametrize("factor", [1.0, 1.6, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_longer_batches_where_lengths_vary(tmp_path: Path, factor: float, seed: int) -> None:
    """Half of the time follows the length of the batch. From step 300 on batches are longer, and nothing else is named."""
    random = np.random.default_rng(seed)
    tokens = random.integers(200, 520, 600)
    tokens[300:] = tokens[300:] * factor
    steps = wander(seed, 600)
    steps[:, :2] *= (0.5 + tokens / 720)[:, None]
    write_parts(tmp_path, steps.tolist(), tokens=tokens.tolist())
    found = find(tmp_path, iteration_shift.detect)
    assert [one for one in found if one.severity != Severity.INFO] == []
    told = [one for one in found if "batches have" in one.details]
    assert [abs((one.step or 0) - 300) <= 20 for one in told] == [True] * (factor > 1)
    assert all(" tokens instead of 3" in one.details for one in told)


@pytest.mark.parametrize(("faster", "is_told"), [(8, False), (20, False), (60, True)])
@pytest.mark.parametrize("first_s", [0.0, 8.0])
def test_steps_that_are_faster_at_first_are_no_finding(tmp_path: Path, faster: int, is_told: bool, first_s: float) -> None:
    """Before queues and caches are full, as in the steps after one that compiles. Later, the same is a slowdown."""
    steps = np.array([0.006, 0.01, 0.003, 0.001]) * np.random.default_rng(1).normal(3.0, 0.03, (200, 4))
    steps[:faster] /= 2
    steps[0] += first_s / 4
    write_parts(tmp_path, steps.tolist())
    found = find(tmp_path, iteration_shift.detect, long_pause.detect)
    assert [(one.severity, bool(one.cost)) for one in found] == [(Severity.WARNING, True)] * is_told


def test_code_between_the_phases_that_begins_early_is_a_warning(tmp_path: Path) -> None:
    """On a CPU it waits for no queue."""
    write_parts(tmp_path, [[0.02, 0.03, 0.01, 0.05 * (step >= 20)] for step in range(200)])
    (found,) = find(tmp_path, iteration_shift.detect)
    assert (found.severity, found.step) == (Severity.WARNING, 20)


@pytest.mark.parametrize(("step", "told"), [(9, Severity.INFO), (60, Severity.WARNING)])
def test_a_pause_among_the_first_steps_is_no_warning(tmp_path: Path, step: int, told: Severity) -> None:
    steps = np.tile([0.01, 0.02, 0.005, 0.001], (200, 1))
    steps[step, 1] += 6
    write_parts(tmp_path, steps.tolist())
    assert [one.severity for one in find(tmp_path, iteration_shift.detect, long_pause.detect)] == [told]


@pytest.mark.parametrize(
    ("compiled", "steps", "told"),
    [
        ((60, 90), 120, [(60, Severity.WARNING, 2)]),
        ((60, 75, 90), 120, [(60, Severity.WARNING, 3)]),
        ((300, 301), 400, [(300, Severity.WARNING, 2)]),
        ((3000, 3030), 3100, [(3000, Severity.INFO, 0)]),  # a small part of the time
        ((60,), 120, [(60, Severity.INFO, 0)]),
    ],
)
def test_pauses_that_compile_again_and_again(
    tmp_path: Path, compiled: Sequence[int], steps: int, told: list[tuple[int, Severity, int]]
) -> None:
    """As where a shape or an attribute of the model keeps changing: the first alone is no fault, more are."""
    rows = np.tile([0.01, 0.02, 0.005, 0.001], (steps, 1))
    rows[list(compiled), 0] += 4.0
    ends = write_parts(tmp_path, rows.tolist())
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Hello)
    for step in compiled:
        begin_ns = int(1e9 * (ends[step] - 4.0))
        writer.write(int(1e9 * ends[step]), events.Compiled, step=step, begin_ns=begin_ns, graphs=1, seconds=3.9)
    writer.close()
    found = find(tmp_path, long_pause.detect)
    assert [(one.step, one.severity, int(one.evidence.get("times", 0))) for one in found] == told
    assert all(one.evidence["pause_s"] == pytest.approx(4 * max(1, one.evidence.get("times", 1)), rel=0.01) for one in found)


@pytest.mark.parametrize(
    ("guards", "told", "fix"),
    [
        ([f"self.every == {number}" for number in (1, 2)], "self.every == 2 (net.py:40 in forward)", "config.allow_unspec"),
        (["tensor 'x' size mismatch at index 0. expected 8, actual 9"] * 2, "size mismatch", "dynamic=True"),
        (["self.mode == ..."] * 2, "self.mode == ... (net.py:40 in forward)", "net.py:40"),
        (["self.mode == ...", "self.every == 1"], "", "TORCH_LOGS=recompiles "),
        ([], "", "TORCH_LOGS=recompiles "),
        (["self.every == 1"], "self.every == 1 (net.py:40 in forward)", "config.allow_unspec"),
    ],
)
def test_the_assumption_that_keeps_failing_is_named(tmp_path: Path, guards: Sequence[str], told: str, fix: str) -> None:
    rows = np.tile([0.01, 0.02, 0.005, 0.001], (120, 1))
    compiled = (60, 90)[: len(guards) or 2]
    rows[list(compiled), 0] += 4.0
    ends = write_parts(tmp_path, rows.tolist())
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Hello)
    for step, guard in zip_longest(compiled, guards):
        facts: dict[str, Any] = {"begin_ns": int(1e9 * (ends[step] - 4.0)), "graphs": 1, "seconds": 3.9}
        if guard is not None:
            hint = {"setting": "allow_unspec_int_on_nn_module"} if "every" in guard else {}
            facts["failed"] = [{"guard": guard, "file": "net.py", "line": 40, "function": "forward", **hint}]
        writer.write(int(1e9 * ends[step]), events.Compiled, step=step, **facts)
    writer.close()
    (found,) = find(tmp_path, long_pause.detect)
    assert told in found.details
    assert ("check that failed" in found.details) is bool(told)
    assert fix in found.fix


@pytest.mark.parametrize(("name", "ends"), [("hand-threads", True), ("cpu-stuck", True), ("x2-hang-collectives", False)])
def test_a_long_step_is_told_to_last_until_it_ends(name: str, ends: bool) -> None:
    recording = open_recording(name)
    runner = detection.Detection(recording, [long_pause.detect])
    runner.update()
    told = [one for one in runner.ordered_findings if "not ended" in one.details or ", others " in one.headline]
    last = told[-1]
    steps = read_steps(recording)
    ended = steps["end_unix_ns"][(steps["step"] == last.step) & (steps["rank"] == 0)].tolist()
    assert ("not ended" in last.details) is not ends
    assert ended == ([last.known_ns] if ends else [])
    assert last.evidence["pause_s"] == pytest.approx((last.known_ns - last.begin_ns) / 1e9)


@pytest.mark.parametrize(
    ("phases", "told"),
    [
        (("forward",), "Forwards without any optimizer step since step 99: 20 s"),
        (("forward", "backward"), "Step 100 has taken 20 s, others 16 ms"),
        ((), "Step 100 has taken 20 s, others 16 ms"),
    ],
)
def test_a_loop_that_skips_all_backwards_is_no_long_step(tmp_path: Path, phases: Sequence[str], told: str) -> None:
    spans = []
    for step in range(100):
        at = 0.016 * step
        spans += [make_span(at, at + 0.006, "forward", step), make_span(at + 0.006, at + 0.016, "step", step, BOUNDARY)]
    for number in range(50):
        at = 1.7 + 0.1 * number
        spans += [make_span(at + 0.01 * index, at + 0.01 * (index + 1), phase, 100) for index, phase in enumerate(phases)]
    write_table(tmp_path, SPANS, make_identity(0), *spans).close()
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Hello)
    facts = {"step": 100, "last_step": 100, "begin_ns": 2 * S, "end_ns": 21 * S, "samples": 1, "frames": [], "stacks": []}
    writer.write(round(21.6 * S), events.Stacks, where="unknown phase", why="silent", **facts)
    writer.close()
    (pause,) = find(tmp_path, long_pause.detect)
    assert pause.headline == told
    assert ("skips the backward" in pause.advice) is pause.headline.startswith("Forwards")
    recording = read_recording(tmp_path)
    (cost,) = rank_findings([pause], read_steps(recording), recording.end_ns)
    assert cost.share == pytest.approx(20 / 21.6, rel=0.01)  # of the steps before and of this one
