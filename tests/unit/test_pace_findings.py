"""Changes of pace in small recordings: from which step on they are told, and whether they are worth telling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from in_pieces import find_at_end
from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings import Finding
from zerotop.analysis.findings.host import crowded_cores
from zerotop.analysis.findings.pace import iteration_drift, iteration_shift, long_pause
from zerotop.analysis.findings.support import detection
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, HOSTS, PROCESSES, SPANS
from zerotop_probe.recording.writer import EventWriter

WHOLE = 16384


def write_steps(
    folder: Path,
    seconds: Sequence[float],
    tokens: Sequence[int] = (),
    rank: int = 0,
    evaluated: Sequence[int] = (),
    counted_from: int | None = None,
) -> float:
    """Write a rank whose steps take so long, nine tenths of it in forward and backward. Return when they end.

    Before those ``evaluated`` there is an evaluation of 0.2 s; those ``counted_from`` are recorded without phases.
    """
    at, spans = 0.0, []
    for step, length in enumerate(seconds):
        if step in evaluated:
            spans.append(make_span(at, at + 0.2, "eval", step))
            at += 0.2
        size = tokens[step] if tokens else 512
        edges = np.array([0.0, 0.3, 0.9, 0.95]) * length + at
        for phase, begin, end in zip(("forward", "backward", "step"), edges, edges[1:], strict=False):
            flags, count = (BOUNDARY, -1) if phase == "step" else (0, size if phase == "forward" else -1)
            is_counted = counted_from is not None and step >= counted_from
            if phase == "step" or not is_counted:
                spans.append(make_span(begin, end, phase, step, flags | COUNTED * (flags and is_counted), tokens=count))
        at += length
    write_table(folder, SPANS, make_identity(rank), *spans).close()
    return at


def write_load(folder: Path, until: float, *, others: float) -> None:
    """Write a node of two cores, on which others use so many and the rank waits for as much of a core as it lacks."""
    rank = {"cores_used": min(1.0, 2 - others), "waiting_cores": max(0.0, others - 1), "thread_count": 3}
    _write_samples(folder, [(tick / 10, rank) for tick in range(int(until * 10))])


def write_waits(folder: Path, until: float, *, since: float, others: float) -> None:
    """Write a node of two cores, on which others use so many, and 1.2 threads of the rank wait for one since then."""
    few, many = ({"cores_used": 0.5, "waiting_cores": waiting, "thread_count": 3} for waiting in (0.4, 1.2))
    samples = [(tick / 10, many if tick / 10 >= since else few) for tick in range(int(until * 10))]
    _write_samples(folder, samples, used=0.5 + others)


def write_threads(folder: Path, until: float, *, since: float, waits_until: float = 1000.0) -> None:
    """Write a node of two cores, on which the rank has 34 threads in place of 3 since then, and 16 of them can run."""
    few, many = ({"cores_used": used, "waiting_cores": 14.0 * (used > 1), "thread_count": 3} for used in (1.0, 2.0))
    many["thread_count"] = 34
    times = [tick / 10 for tick in range(int(until * 10))]
    idle = {**few, "thread_count": 34}
    _write_samples(folder, [(at, few if at < since else many if at < waits_until else idle) for at in times])


def _write_samples(folder: Path, samples: Sequence[tuple[float, dict[str, float]]], *, used: float = 2.0) -> None:
    node, rank = make_identity(-1), {"pid": 100, "rank": 0}
    times = [int(at * S) for at, _ in samples]
    processes = (make_record(PROCESSES, time_ns=int(at * S), **rank, **values) for at, values in samples)
    write_table(folder, HOSTS, node, *(make_record(HOSTS, time_ns=at, cores_used=used) for at in times)).close()
    write_table(folder, PROCESSES, node, *processes).close()
    clock = {"monotonic_ns": 0, "unix_ns": BEGIN_NS}
    writer = EventWriter(str(folder), node, clock=clock)
    writer.write(0, events.Node, cores=2)
    writer.close()


def find_changes(folder: Path, piece: int = 16384) -> tuple[Finding, ...]:
    """Return the changes of pace in a recording, read so many phases at a time."""
    return find_at_end(folder, [crowded_cores.detect, iteration_drift.detect, iteration_shift.detect], piece)


def vary(seconds: Sequence[float]) -> list[float]:
    """Return the same with 2 % of noise, the same each time."""
    noise = np.random.default_rng(3).normal(1.0, 0.02, len(seconds))
    return [float(one) for one in seconds * noise]


@pytest.mark.parametrize(
    ("level_s", "count", "told"),
    [(0.06, 6, []), (0.06, 60, [40]), (0.3, 6, [40])],
    ids=["short and cheap", "long and cheap", "short and costly"],
)
def test_changes_that_cost_nothing_are_not_told(tmp_path: Path, level_s: float, count: int, told: list[int]) -> None:
    """Neither is the way back of those that are not, and reading in pieces makes no difference."""
    write_steps(tmp_path, vary([0.05] * 40 + [level_s] * count + [0.05] * 100))
    whole, *others = (find_changes(tmp_path, piece) for piece in (WHOLE, 3, 50))
    assert all(found == whole for found in others)
    assert [finding.step for finding in whole if finding.step is not None and finding.step < 40 + count] == told
    assert (whole == ()) is (not told)


def test_a_change_is_reported_once_it_has_cost_enough(tmp_path: Path) -> None:
    """10 ms a step are 2 % of the training so far after 5 steps, but 0.1 s after 10."""
    write_steps(tmp_path, [0.05] * 40 + [0.06] * 30)
    (shift,) = find_changes(tmp_path, WHOLE)
    known_s = (shift.known_ns - shift.begin_ns) / S
    assert known_s == pytest.approx(10 * 0.06, abs=0.07)


def test_a_drift_begins_where_iterations_begin_to_take_longer(tmp_path: Path) -> None:
    write_steps(tmp_path, vary([0.1] * 44 + [0.1 + 0.001 * step for step in range(100)]))
    drifts = [finding for finding in find_changes(tmp_path, WHOLE) if finding.name == "iteration_drift"]
    assert drifts
    for drift in drifts:
        assert drift.step == pytest.approx(44, abs=4)
        assert drift.evidence["slope_s"] == pytest.approx(0.001, rel=0.15)


@pytest.mark.parametrize(
    ("names", "at", "seen", "told"),
    [
        (("hooks",), range(44, 144, 10), 0, True),
        (("trained_parameters", "parameters"), range(44, 144, 10), 0, True),
        (("hooks",), range(44, 56, 3), 0, False),
        (("hooks",), (60, 130), 0, False),
        (("hooks",), (44, 50, 56), 0, False),
        (("hooks",), (44, 50, 56), 20, True),
    ],
)
def test_a_drift_names_a_change_that_is_made_again_and_again(
    tmp_path: Path, names: tuple[str, ...], at: Sequence[int], seen: int, told: bool
) -> None:
    """And not one that was over long before the iterations stopped becoming longer.

    ``seen``: so many steps later; of several changes up to then, the time of the first one is known.
    """
    seconds = vary([0.1] * 44 + [0.1 + 0.001 * step for step in range(100)])
    end, ends = write_steps(tmp_path, seconds), np.cumsum(seconds)
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    for number, step in enumerate(at):
        moment, look = int(ends[step] * S), int(ends[step + seen] * S)
        facts = {"changed_ns": moment, "file": "train.py", "line": 63, "function": "<module>"}
        changes = [{"name": name, "before": f"{5 + number}", "after": f"{6 + number}", **facts} for name in names]
        writer.write(look, events.TrainingChanged, step=step, last_step=step - 1, begin_ns=moment - 1, changes=changes)
    writer.write(int(end * S), events.Goodbye)
    writer.close()
    drifts = [finding for finding in find_changes(tmp_path, WHOLE) if finding.name == "iteration_drift"]
    assert drifts
    assert ("more steps (train.py:63)" in drifts[-1].details, "no cause was" in drifts[-1].details) == (told, not told)
    assert ("Remove the hook" in drifts[-1].advice) is (told and "hooks" in names)


def test_a_drift_that_goes_on_between_two_rises_is_one(tmp_path: Path) -> None:
    """It begins with the first of the changes that explain it, and each tenth step is much longer, as adding hooks is."""
    lengths = [0.018] * 100 + [0.018 + 0.00022 * step + 0.02 * (step % 10 == 0) for step in range(210)]
    seconds = vary(lengths)
    write_steps(tmp_path, seconds)
    ends = np.cumsum(seconds)
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    for step in range(100, 310, 10):
        moment = int((ends[step] - 0.01) * S)
        facts = {"changed_ns": moment, "file": "train.py", "line": 63, "function": "<module>"}
        changes = [{"name": "hooks", "before": f"{step - 90}", "after": f"{step - 80}", **facts}]
        writer.write(
            moment + 1, events.TrainingChanged, step=step, last_step=step - 10, begin_ns=moment - S // 5, changes=changes
        )
    writer.close()
    drifts = [finding for finding in find_changes(tmp_path, WHOLE) if finding.name == "iteration_drift"]
    assert {one.step for one in drifts} == {100}
    assert drifts[-1].evidence["before_s"] == pytest.approx(0.018, rel=0.05)


@pytest.mark.parametrize(("most_s", "told"), [(0.048, True), (0.036, False)], ids=["far enough", "as noise may"])
def test_a_drift_without_phases_is_told_once_it_has_risen_far_enough(most_s: float, told: bool, tmp_path: Path) -> None:
    """Its first blocks rise by less than iterations without recorded phases may wander."""
    write_steps(tmp_path, vary([0.02] * 150 + np.linspace(0.02, most_s, 250).tolist()), counted_from=20)
    whole, *others = (find_changes(tmp_path, piece) for piece in (WHOLE, 3, 50))
    assert [finding.name for finding in whole] == ["iteration_drift"] * told
    assert all(140 <= (finding.step or 0) <= 160 for finding in whole)
    assert all(found == whole for found in others)


def test_a_drift_by_larger_batches_begins_with_them(tmp_path: Path) -> None:
    """Steps vary too much for a change of level: which step is the first is seen from the batches of the other rank."""
    seconds = [0.1, 0.18] * 15 + [0.23 + 0.02 * (step % 5) + 0.001 * step for step in range(80)]
    write_steps(tmp_path, seconds)
    write_steps(tmp_path, seconds, [512] * 30 + [1664] * 80, rank=1)
    (drift,) = find_changes(tmp_path, WHOLE)
    assert (drift.name, drift.step) == ("iteration_drift", 30)
    assert "rank 1's batches have 1664 tokens instead of 512" in drift.details


@pytest.mark.parametrize(
    ("evaluated", "after_s", "others", "said"),
    [
        ([100], 0.05, 1.0, "an evaluation was run just before"),
        ([20, 100], 0.05, 1.0, "no cause was found"),
        ([20, 100], 0.09, 1.0, "no cause was found"),
        ([100], 0.05, 1.4, None),
    ],
    ids=["the first evaluation", "no change at an earlier one", "none that stayed", "others use the cores"],
)
def test_an_evaluation_just_before_is_a_cause_only_where_that_is_likely(
    tmp_path: Path, evaluated: Sequence[int], after_s: float, others: float, said: str | None
) -> None:
    """``after_s``: what the first steps after the one before step 20 take."""
    seconds = [0.05] * 20 + [after_s] * 3 + [0.05] * 77 + [0.1] * 60
    write_load(tmp_path, write_steps(tmp_path, seconds, evaluated=evaluated), others=others)
    details = [str(finding.details) for finding in find_changes(tmp_path, WHOLE)]
    assert len(details) == (0 if said is None else 1)
    assert all(said is not None and said in one for one in details)


@pytest.mark.parametrize(("first", "slow_s", "told"), [(60, 0.4, True), (60, 0.15, False), (10, 0.4, False)])
def test_a_few_steps_that_take_ten_times_as_long_are_enough(first: int, slow_s: float, told: bool, tmp_path: Path) -> None:
    """The job ends after five of them; the first steps of a job may compile."""
    write_steps(tmp_path, vary([0.02] * first + [slow_s] * 5))
    found = [(one.name, one.step) for one in find_changes(tmp_path)]
    assert found == ([("iteration_shift", first)] if told else [])


@pytest.mark.parametrize(("since", "step"), [(0.0, 2), (2.0, 40)], ids=["from the first step on", "in mid-run"])
def test_threads_that_the_script_starts_are_distinguished_from_others(tmp_path: Path, since: float, step: int) -> None:
    """OMP_NUM_THREADS is of no use where the script itself starts them later."""
    write_threads(tmp_path, write_steps(tmp_path, [0.05] * 40 + [0.1] * 60), since=since)
    found = {finding.name: finding for finding in find_changes(tmp_path, WHOLE)}
    crowd, shift = found["crowded_cores"], found["iteration_shift"]
    assert (crowd.step, shift.step) == (step, 40)
    assert crowd.fix == ("torch.set_num_threads(2)" if since else "export OMP_NUM_THREADS=2")
    assert ("34 threads instead of 3 since step 40" in crowd.details) is (since > 0)
    assert ("34 threads instead of 3" in shift.details) is (shift.fix == "torch.set_num_threads(2)") is (since > 0)


@pytest.mark.parametrize(
    ("others", "fix"), [(1.4, "top -b"), (0.1, "deepspeed --bind")], ids=["others use the cores", "its own threads do"]
)
def test_cores_of_its_own_are_no_help_where_others_use_them(tmp_path: Path, others: float, fix: str) -> None:
    write_waits(tmp_path, write_steps(tmp_path, [0.05] * 40 + [0.2] * 60), since=2.0, others=others)
    (shift,) = find_changes(tmp_path, WHOLE)
    assert "waited for 1.2 cores instead of 0.4" in shift.details
    assert shift.fix.startswith(fix)


@pytest.mark.parametrize("others", [1.4, 0.1])
@pytest.mark.parametrize(("later_s", "told"), [(0.2, True), (0.05, False)])
def test_a_load_that_is_over_before_it_can_be_told_is_no_change(
    later_s: float, others: float, told: bool, tmp_path: Path
) -> None:
    """Of steps that are only counted, records that may say more are waited for."""
    seconds = [0.05] * 40 + [0.2] * 9 + [later_s] * 60
    write_waits(tmp_path, write_steps(tmp_path, seconds, counted_from=30), since=2.0, others=others)
    assert [one.step for one in find_changes(tmp_path, WHOLE) if one.name == "iteration_shift"] == [40] * told


def test_threads_of_a_pause_are_no_cause_of_the_steps_around_it(tmp_path: Path) -> None:
    """A snapshot copies tensors with threads of its own: most of the samples around a few slower steps are of its pause."""
    seconds = [0.1] * 55 + [0.14] * 5 + [2.0] + [0.14] * 3 + [0.1] * 20
    write_threads(tmp_path, write_steps(tmp_path, seconds), since=6.2, waits_until=8.2)
    (shift,) = [one for one in find_changes(tmp_path, WHOLE) if one.name == "iteration_shift"]
    assert "no cause was found" in shift.details


def test_the_batches_show_a_change_before_the_iterations_do(tmp_path: Path) -> None:
    """It is told once, with the step that was known first, also where all is read at once."""
    write_steps(tmp_path, [0.1, 0.14] * 15 + [0.19] * 2 + [0.3] * 60, [512] * 30 + [1664] * 62)
    whole, *others = (find_changes(tmp_path, piece) for piece in (WHOLE, 3, 50))
    assert [(finding.name, finding.step) for finding in whole] == [("iteration_shift", 30)]
    assert all(found == whole for found in others)


def test_two_steps_that_take_most_of_the_time_are_reported_with_the_second(tmp_path: Path) -> None:
    """Whatever the median says: the job may be stopped before it changes."""
    write_steps(tmp_path, [0.05] * 40 + [20.0, 21.0, 1.0])
    whole, *others = (find_changes(tmp_path, piece) for piece in (WHOLE, 3, 50))
    (shift,) = whole
    assert (shift.name, shift.step) == ("iteration_shift", 40)
    assert shift.cost > 0.9
    assert "no cause was found" in shift.details
    assert all(found == whole for found in others)


def test_a_far_level_is_told_again_as_more_of_its_steps_end(tmp_path: Path) -> None:
    """The first steps are no measure of it, and the job may end before it is followed as other changes are."""
    write_steps(tmp_path, [0.05] * 40 + [3.1, 2.0, 5.0, 4.3, 4.6, 4.1, 4.2, 4.2])
    whole, *others = (find_changes(tmp_path, piece) for piece in (WHOLE, 3, 50))
    (shift,) = whole
    assert (shift.step, shift.evidence["after_s"]) == (40, pytest.approx(4.2, rel=0.02))
    assert all(found == whole for found in others)


@pytest.mark.parametrize(("later_s", "until"), [(0.14, None), (0.065, 99)], ids=["still longer", "almost as before"])
def test_a_slowdown_whose_first_steps_are_the_longest_goes_on(later_s: float, until: int | None, tmp_path: Path) -> None:
    """As while files that each step reads come into the cache: a level far from that before is no end."""
    write_steps(tmp_path, vary([0.05] * 80 + [0.3] * 20 + [later_s] * 200))
    whole, *others = (find_changes(tmp_path, piece) for piece in (WHOLE, 3, 50))
    assert all(found == whole for found in others)
    assert [(one.step, one.evidence.get("until_step")) for one in whole][:1] == [(80, until)]


def test_two_far_steps_that_stay_alone_have_an_end(tmp_path: Path) -> None:
    write_steps(tmp_path, [0.05] * 40 + [20.0, 21.0] + [0.05] * 60)
    whole, *others = (find_changes(tmp_path, piece) for piece in (WHOLE, 3, 50))
    (shift,) = whole
    assert "from step 40 to 41" in shift.headline
    assert all(found == whole for found in others)


@pytest.mark.parametrize(("pause_s", "told"), [(30.0, True), (0.5, False)])
def test_a_single_long_pause(tmp_path: Path, pause_s: float, told: bool) -> None:
    write_steps(tmp_path, [0.04] * 100 + [pause_s] + [0.04] * 100)
    recording = read_recording(tmp_path)
    runner = detection.Detection(recording, [iteration_shift.detect, long_pause.detect])
    runner.update()
    found = runner.findings_at(recording.end_ns)
    assert [(one.name, one.step) for one in found] == ([("long_pause", 100)] if told else [])
    assert all(one.evidence["pause_s"] == pytest.approx(pause_s, rel=0.06) for one in found)


@pytest.mark.parametrize(
    ("after", "told"),
    [([5.0, 4.3, 4.6, 4.2, 4.2], []), ([2.5, 1.7, 4.5, 1.9, 4.4], []), ([2.5, 2.4, 2.6, 2.5, 190.0], [177])],
)
def test_a_pause_is_longer_than_the_new_pace(tmp_path: Path, after: list[float], told: list[int]) -> None:
    write_steps(tmp_path, [0.035] * 171 + [1.5, 1.9] + after + [2.5])
    recording = read_recording(tmp_path)
    runner = detection.Detection(recording, [iteration_shift.detect, long_pause.detect])
    runner.update()
    found = runner.findings_at(recording.end_ns)
    assert [one.step for one in found if one.name == "iteration_shift"]
    assert [one.step for one in found if one.name == "long_pause"] == told


def test_a_level_that_goes_up_and_down_is_no_change(tmp_path: Path) -> None:
    """Levels of 50 and 60 ms by turns, for 40 steps each; then 100 ms for good."""
    levels = [0.05] * 40 + [0.06] * 40
    write_steps(tmp_path, vary([*levels * 4, *[0.1] * 60]))
    steps = [finding.step for finding in find_changes(tmp_path, WHOLE)]
    assert 320 in steps
    assert not [step for step in steps if step is not None and 80 < step < 320]


def _levels(*parts: tuple[float, int]) -> list[float]:
    return vary([level for level, count in parts for _ in range(count)])


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([(0.05, 339), (0.06, 9), (0.09, 100)], [(348, 0.05, 0.09)]),
        ([(0.05, 200), (0.065, 12), (0.08, 12), (0.1, 90)], [(212, 0.05, 0.1)]),
        ([(0.1, 240), (0.08, 14), (0.05, 150)], [(254, 0.1, 0.05)]),
        ([(0.05, 150), (0.06, 60), (0.09, 100)], [(150, 0.05, 0.06), (210, 0.06, 0.09)]),
    ],
    ids=["two near parts", "three near parts", "two parts that save time", "two changes"],
)
def test_near_parts_of_a_change_are_one_finding(
    tmp_path: Path,
    parts: list[tuple[float, int]],
    told: list[tuple[int, float, float]],
) -> None:
    write_steps(tmp_path, _levels(*parts))
    found = find_changes(tmp_path, WHOLE)
    assert [finding.step for finding in found] == [pytest.approx(step, abs=12) for step, *_ in told]
    for finding, (_, before, after) in zip(found, told, strict=True):
        assert finding.evidence["before_s"] == pytest.approx(before, rel=0.03)
        assert finding.evidence["after_s"] == pytest.approx(after, rel=0.03)
    assert all(find_changes(tmp_path, piece) == found for piece in (3, 50))


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([(0.057, 109), (0.067, 22), (0.056, 80)], (129, "info")),
        ([(0.05, 109), (0.1, 41), (0.05, 80)], (149, "warning")),
        ([(0.05, 109), (0.1, 90), (0.05, 60)], (None, "warning")),
        ([(0.05, 109), (0.1, 90), (0.05, 95)], (199, "warning")),
    ],
    ids=["cost little", "cost much", "not yet over", "over"],
)
def test_a_slowdown_ends_once_the_old_pace_has_lasted_as_long(
    tmp_path: Path, parts: list[tuple[float, int]], told: tuple[int | None, str]
) -> None:
    """It is a warning then where it took much of the training time so far."""
    write_steps(tmp_path, _levels(*parts))
    (found,) = find_changes(tmp_path, WHOLE)
    assert found.step == pytest.approx(109, abs=3)
    until_step, severity = told
    assert found.evidence.get("until_step") == (until_step and pytest.approx(until_step, abs=10))
    assert found.severity.value == severity
    assert all(find_changes(tmp_path, piece) == (found,) for piece in (3, 50))


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([(0.024, 12), (0.013, 400)], []),  # it warmed up
        ([(0.04, 90), (0.02, 22), (0.04, 150)], []),
        ([(0.04, 90), (0.037, 300)], []),
        ([(0.04, 90), (0.02, 90)], [90]),
        ([(4.0, 30), (2.0, 44)], [30]),
    ],
    ids=["early", "for a while", "by little", "lasting", "long steps"],
)
def test_iterations_that_become_shorter_are_reported_if_they_stay_so(
    tmp_path: Path, parts: list[tuple[float, int]], told: list[int]
) -> None:
    write_steps(tmp_path, _levels(*parts))
    found = find_changes(tmp_path, WHOLE)
    assert [finding.step for finding in found if finding.evidence["change_share"] < 0] == told
    assert all(find_changes(tmp_path, piece) == found for piece in (3, 50))


@pytest.mark.parametrize(("changed_at", "told"), [(200, True), (150, False), (None, False)])
def test_steps_of_few_milliseconds_count_where_the_training_was_changed(
    tmp_path: Path, changed_at: int | None, told: bool
) -> None:
    """The look that finds the change may come after the steps have shown it."""
    end = write_steps(tmp_path, _levels((0.001, 200), (0.003, 2000)))
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    changes = [
        {"name": "trained_parameters", "before": "10", "after": "90", "changed_ns": int(0.001 * S * (changed_at or 0))}
    ]
    if changed_at is not None:
        facts = {"step": 600, "last_step": 0, "begin_ns": 0, "changes": changes}
        writer.write(int(1.4 * S), events.TrainingChanged, **facts)
    writer.write(int(end * S), events.Goodbye)
    writer.close()
    found = find_changes(tmp_path, WHOLE)
    assert [(one.step, "90 parameters are trained" in one.details) for one in found] == ([(200, True)] if told else [])
    assert all(one.severity.value == "info" for one in found)  # it is what the script wants
    assert all(find_changes(tmp_path, piece) == found for piece in (100, 1000))


@pytest.mark.parametrize("is_recorded", [True, False])
def test_another_optimizer_explains_more_micro_batches(tmp_path: Path, is_recorded: bool) -> None:
    """As one that calls a closure several times in each step. The look that finds it comes after the steps have shown it."""
    at, spans = 0.0, []
    for step in range(400):
        for _ in range(1 if step < 200 else 3):
            for phase in ("forward", "backward"):
                spans.append(make_span(at, at + 0.02, phase, step, tokens=512 if phase == "forward" else -1))
                at += 0.02
        spans.append(make_span(at, at + 0.01, "step", step, BOUNDARY))
        at += 0.01
    write_table(tmp_path, SPANS, make_identity(0), *spans).close()
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    place = {"file": "train.py", "line": 36, "function": "main"}
    change = {"name": "optimizers", "before": "AdamW", "after": "LBFGS", "changed_ns": int(10.0 * S), **place}
    if is_recorded:
        writer.write(int(14 * S), events.TrainingChanged, step=230, last_step=0, begin_ns=0, changes=[change])
    writer.write(int(at * S), events.Goodbye)
    writer.close()
    (found,) = find_changes(tmp_path, WHOLE)
    assert (found.step, found.severity.value) == (200, "info")  # its name is in the script
    assert found.cost == pytest.approx(1 - 0.05 / 0.13, abs=0.01)  # also of a change that may be meant
    assert (
        "LBFGS instead of AdamW (train.py:36 in main)" if is_recorded else "3 micro-batches instead of 1"
    ) in found.details


def write_checks(folder: Path, *, last: int, sampled_s: float) -> None:
    """Write a rank whose pace wanders, and who checks something for 15 ms after each step from 120 to the last of these.

    Few steps have phases, and samples of a line that checks are written so much later.
    """
    at, spans, wander, begin = 0.0, [], np.random.default_rng(5), 0.0
    for step in range(300):
        begin = at if step == 120 else begin
        backward = 0.02 + 0.02 * float(wander.random())
        for phase, length in (("forward", 0.02), ("backward", backward), ("step", 0.005)):
            is_counted = step > 20 and step % 10 > 1
            if phase == "step" or not is_counted:
                flags = (BOUNDARY | COUNTED * is_counted) if phase == "step" else 0
                spans.append(make_span(at, at + length, phase, step, flags, tokens=512 if phase == "forward" else -1))
            at += length
        at += 0.001 + 0.015 * (120 <= step <= last)
    write_table(folder, SPANS, make_identity(0), *spans).close()
    writer = EventWriter(str(folder), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    end_ns = int((begin + sampled_s) * S)
    times = {"begin_ns": int(begin * S) + S // 10, "end_ns": end_ns - S // 10}
    frames = [{"file": "train.py", "line": line, "function": "check", "own": True} for line in (44, 45)]
    stacks = [{"count": 6, "seconds": 0.6, "call": "loads", "frames": [line]} for line in (0, 1, 1)]
    facts = {"where": "between phases", "why": "share", "step": 130, "samples": 18, "frames": frames, "stacks": stacks}
    writer.write(end_ns, events.Stacks, **times, **facts)
    writer.write(int(at * S), events.Goodbye)
    writer.close()


@pytest.mark.parametrize(("last", "sampled_s", "told"), [(300, 5.0, True), (150, 5.0, False), (300, 90.0, False)])
def test_a_line_may_show_later_what_the_wandering_pace_hides(
    tmp_path: Path, last: int, sampled_s: float, told: bool
) -> None:
    write_checks(tmp_path, last=last, sampled_s=sampled_s)
    found = find_changes(tmp_path, WHOLE)
    headlines = [finding.headline for finding in found if "train.py:45" in finding.headline]
    assert len(headlines) == told
    assert all(one.step is not None and 118 <= one.step <= 122 for one in found if one.headline in headlines)
    assert all(find_changes(tmp_path, piece) == found for piece in (3, 50))


@pytest.mark.parametrize(
    "ways", [[(0.06, 90), (0.0625, 15), (0.0305, 20), (0.032, 200)], [(0.03, 150), (0.09, 12), (0.14, 150)]]
)
def test_levels_are_those_of_all_steps_on_each_side(tmp_path: Path, ways: list[tuple[float, int]]) -> None:
    """And not those just before and after the change."""
    write_steps(tmp_path, _levels(*ways))
    found = find_changes(tmp_path, WHOLE)
    assert len(found) == 1
    assert found[0].evidence["before_s"] == pytest.approx(ways[0][0], rel=0.03)
    assert found[0].evidence["after_s"] == pytest.approx(ways[-1][0], rel=0.03)
    assert all(find_changes(tmp_path, piece) == found for piece in (3, 50))


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "not recorded"])
def test_a_level_before_begins_where_the_training_was_changed_before(is_recorded: bool, tmp_path: Path) -> None:
    """Layers are unfrozen at steps 110 and 220; the first slowdown is too gradual to be a change of pace of its own."""
    rise = [0.012 + 0.005 * min(1, max(0, step - 110) / 40) for step in range(220)]
    end = write_steps(tmp_path, vary([*rise, *[0.027] * 200]))
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    stages = [(110, "10", "90"), (220, "90", "170")]
    for step, before, after in stages if is_recorded else stages[1:]:
        at_ns = int(sum(rise[:step]) * S)
        change = {"name": "trained_parameters", "before": before, "after": after, "changed_ns": at_ns}
        writer.write(at_ns + S // 100, events.TrainingChanged, step=step, last_step=0, begin_ns=0, changes=[change])
    writer.write(int(end * S), events.Goodbye)
    writer.close()
    (found,) = (one for one in find_changes(tmp_path, WHOLE) if one.step == 220)
    assert found.evidence["before_s"] == pytest.approx(0.017, rel=0.03)
    assert found.evidence["after_s"] == pytest.approx(0.027, rel=0.03)
    assert all(find_changes(tmp_path, piece) == find_changes(tmp_path, WHOLE) for piece in (3, 50))
