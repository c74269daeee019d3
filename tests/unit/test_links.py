"""Findings that explain others: in labelled recordings, and where numbers decide."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import polars
import pytest

import recordings
from zerotop import cli
from zerotop.analysis.findings import Finding, Severity, detect_findings, link_findings, load_kinds, order_by_cause
from zerotop.analysis.findings.support.finding import FindingKind
from zerotop.analysis.findings.support.lines.line_findings import line_values
from zerotop.analysis.findings.support.lines.stack_lines import StackLine
from zerotop.analysis.findings.support.links import drop_repeats, drop_superseded, name_relation
from zerotop.analysis.formatting import Text
from zerotop.analysis.reports.recording_report import read_recording_report
from zerotop.report.recording_page import write_recording_page

GIB = 1 << 30


def list_links(name: str) -> list[tuple[str, str]]:
    recording = recordings.open_recording(name)
    linked = link_findings(detect_findings(recording, recording.end_ns))
    return [(one.finding.name, one.cause.name) for one in linked if one.cause is not None]


@pytest.mark.parametrize("name", ["cpu-straggler", "unseen-late-data"])
def test_a_rank_that_waits_for_data_delays_the_others(name: str) -> None:
    assert list_links(name) == [("straggler", "data_stall")]


def test_a_rank_that_is_slow_among_gathers_makes_iterations_longer() -> None:
    assert list_links("cpu-slow-cores") == [("iteration_shift", "slow_cores")]
    assert list_links("x2-slow-gpu") == [("iteration_shift", "slow_gpu")]


def make_finding(name: str, step: int | None, ranks: tuple[int, ...] = (0,), **evidence: float) -> Finding:
    time_ns = (100 + (step or 0)) * 10**9
    kind = load_kinds().get(name)
    return Finding(name, time_ns, time_ns, time_ns, step, ranks, Severity.WARNING, 0.9, name, evidence=evidence, kind=kind)


LEAK = make_finding("memory_creep", 10, (0, 1), bytes_per_step=0.1 * GIB)
LONGER = {"before_s": 0.01, "after_s": 0.04}
FULL = make_finding("out_of_memory", 60, requested_bytes=6 * GIB, free_bytes=2 * GIB)


def find_names(*findings: Finding) -> list[str | None]:
    return [one.cause.name if one.cause is not None else None for one in link_findings(findings)]


def test_a_leak_explains_an_error_if_it_took_what_was_missing() -> None:
    assert find_names(LEAK, FULL) == [None, "memory_creep"]
    small = make_finding("memory_creep", 10, (0, 1), bytes_per_step=0.05 * GIB)
    assert find_names(small, FULL) == [None, None]
    assert find_names(dataclasses.replace(LEAK, ranks=(1,)), FULL) == [None, None]
    assert find_names(LEAK, dataclasses.replace(FULL, evidence={})) == [None, None]


def test_an_error_takes_the_other_ranks_down_in_its_step() -> None:
    dead = make_finding("dead_rank", 60, (1,))
    assert find_names(LEAK, FULL, dead) == [None, "memory_creep", "out_of_memory"]
    assert [one.depth for one in link_findings([LEAK, FULL, dead])] == [0, 1, 2]
    assert find_names(FULL, make_finding("dead_rank", 61, (1,))) == [None, None]
    assert find_names(FULL, make_finding("dead_rank", 60, (0,))) == [None, None]


def make_hang(second: int, end: int, ranks: tuple[int, ...] = (0,), **evidence: float) -> Finding:
    """Return ranks that stand still from a second on, as known 10 s later, and until another one."""
    begin_ns, end_ns = ((100 + at) * 10**9 for at in (second, end))
    hung = make_finding("hung_ranks", None, ranks, iteration_s=0.2, **evidence)
    seen_ns = min(end_ns, begin_ns + 10 * 10**9)
    return dataclasses.replace(
        hung, severity=Severity.ERROR, begin_ns=begin_ns, end_ns=end_ns, known_ns=end_ns, first_known_ns=seen_ns
    )


S = 10**9


@pytest.mark.parametrize("name", ["dead_rank", "runs_after_error"])
@pytest.mark.parametrize(
    ("end", "names"),
    [
        (make_finding("", 75, exit_code=1), ["", "hung_ranks"]),  # os._exit by a watchdog, or an exception
        (make_finding("", 75, signal_number=6), ["", "hung_ranks"]),  # that of NCCL
        (make_finding("", 75, (1,), signal_number=15), ["", "hung_ranks"]),  # that of a launcher, of another rank
        (make_finding("", 75, signal_number=11), ["", ""]),
        (make_finding("", 75, signal_number=9, oom_kills=1), ["", ""]),
        (make_finding("", 200, exit_code=1), ["", ""]),  # ranks had gone on
        (make_finding("", 67, exit_code=1), ["", ""]),  # nothing had shown them standing still
        (make_finding("", 62, exit_code=1), ["end", ""]),
        (make_finding("", 66, exit_code=1, exit_ns=5 * S), ["end", ""]),  # its exception was printed before
        (make_finding("", 50, signal_number=6), ["end", ""]),
    ],
)
def test_an_end_explains_ranks_that_stand_still_after_it_and_not_before(name: str, end: Finding, names: list[str]) -> None:
    end = dataclasses.replace(end, name=name, kind=load_kinds()[name])
    found = [make_hang(60, 76), end]
    assert find_names(*found) == [{"end": name}.get(one, one) or None for one in names]
    if "hung_ranks" in names:
        assert name_relation(end, found[0]) == "Likely because of"


def test_the_end_of_long_iterations_and_ranks_whose_stacks_are_not_known() -> None:
    end = make_finding("dead_rank", 75, exit_code=1)
    hung = make_hang(60, 76)
    slow = dataclasses.replace(hung, evidence={"iteration_s": 10.0})
    assert find_names(slow, end) == ["dead_rank", None]
    assert find_names(make_hang(60, 76, behind_s=0.5), end) == [None, None]
    assert find_names(dataclasses.replace(hung, severity=Severity.WARNING), end) == [None, None]


@pytest.mark.parametrize(
    ("error", "second", "explains"),
    [("KeyError", 65, True), ("KeyError", 130, False), ("TimeoutError", 59, True), ("_queue.Empty", 65, False)],
)
def test_a_thread_that_waited_in_vain_ended_because_of_the_hang(error: str, second: int, explains: bool) -> None:
    died = make_finding("thread_died", second)
    died = dataclasses.replace(died, headline=Text("{thread} ended with {error}", {"thread": "Thread-1", "error": error}))
    assert find_names(died, make_hang(60, 90, dead_threads=1)) == [None, "thread_died" if explains else None]


def test_growth_that_ends_with_a_killed_rank() -> None:
    growth, short = make_finding("host_growth", 3, (0, 1)), make_finding("host_memory_short", 20, (0, 1))
    killed = make_finding("dead_rank", 21, (1,), oom_kills=1)
    assert find_names(growth, short, killed) == [None, "host_growth", "host_memory_short"]
    assert find_names(growth, short, make_finding("dead_rank", 21, (1,))) == [None, "host_growth", None]


def test_a_measured_cause_must_hold_at_that_time() -> None:
    taken = dataclasses.replace(make_finding("cores_taken", 20, (0, 1)), end_ns=125 * 10**9)
    kind = FindingKind(name="iteration_shift", confidence=0.9, headline="slower", measured_cause="cores_taken")
    slower = dataclasses.replace(make_finding("iteration_shift", 22), kind=kind)
    assert find_names(taken, slower) == [None, "cores_taken"]
    assert find_names(taken, dataclasses.replace(slower, kind=None)) == [None, None]
    later = dataclasses.replace(slower, begin_ns=130 * 10**9, end_ns=131 * 10**9)
    assert find_names(taken, later) == [None, None]


def test_a_change_of_pace_is_reported_once_by_the_line_that_takes_nearly_all_of_it() -> None:
    """As of a rank that resampled audio: 40 ms longer from step 95 on, 41 ms lost at a line from step 93 on."""
    slower = make_finding("iteration_shift", 95, before_s=0.065, after_s=0.105)
    line = make_finding("time_lost_in_line", 93, added_s=0.041)
    assert drop_superseded([slower, line]) == (line,)
    half = make_finding("time_lost_in_line", 93, added_s=0.02)
    assert drop_superseded([slower, half]) == (slower, half)
    named = dataclasses.replace(slower, headline=Text("{place}", {"place": "train.py:4"}))
    assert drop_superseded([named, line]) == (named, line)
    later = dataclasses.replace(line, step=110, begin_ns=line.begin_ns + 17 * 10**9)
    assert drop_superseded([slower, later]) == (slower, later)


def test_a_line_that_was_sampled_late_is_reported_once_with_the_change_that_names_it() -> None:
    """As of a loop that sleeps from step 601 on: 25 ms longer there, and from the samples since step 613 on 31 ms lost."""

    def make(name: str, step: int, place: str, end_s: int, **evidence: float) -> Finding:
        finding = make_finding(name, step, (0,), **evidence)
        headline = Text("{place}", {"place": place})
        return dataclasses.replace(finding, headline=headline, end_ns=finding.begin_ns + end_s * 10**9)

    slower = make("iteration_shift", 601, "clip.py:55", 30, before_s=0.012, after_s=0.037)
    lost = make("time_lost_in_line", 613, "clip.py:55", 10, added_s=0.031)
    assert drop_superseded([slower, lost]) == (slower,)
    assert drop_superseded([slower, make("time_lost_in_line", 590, "clip.py:55", 30, added_s=0.031)]) == (slower,)
    for other in (
        make("time_lost_in_line", 613, "clip.py:56", 10, added_s=0.031),
        make("time_lost_in_line", 613, "clip.py:55", 10, added_s=0.06),
        make("time_lost_in_line", 640, "clip.py:55", 10, added_s=0.031),  # after the change had ended
        make("time_lost_in_line", 560, "clip.py:55", 10, added_s=0.031),
    ):
        assert drop_superseded([slower, other]) == (slower, other)


def test_pauses_are_reported_once() -> None:
    first, each = make_finding("long_pause", 40, pause_s=7.0), make_finding("repeated_pause", 40, pause_s=7.1, period=8.0)
    assert drop_superseded([first, each]) == (each,)
    longer = make_finding("long_pause", 40, pause_s=15.0)
    assert drop_superseded([longer, each]) == (longer, each)
    unseen = dataclasses.replace(make_finding("steps_unseen", 39), end_ns=first.end_ns)  # the rank trains on
    assert drop_superseded([first, unseen]) == (unseen,)
    saves = dataclasses.replace(make_finding("checkpoint_pause", 39, period=8.0), end_ns=each.end_ns)
    assert find_names(saves, each) == [None, "checkpoint_pause"]
    rare = dataclasses.replace(saves, evidence={"period": 24.0})
    assert find_names(rare, each) == [None, None]


def test_pauses_that_begin_with_a_known_slowdown_are_a_part_of_it() -> None:
    """As those at a line that waits for a thread, which has held Python's lock since then."""
    shift = make_finding("iteration_shift", 40, before_s=0.03, after_s=0.06)
    each = dataclasses.replace(make_finding("repeated_pause", 45, period=4.0), end_ns=shift.end_ns + 10**10)
    shift = dataclasses.replace(shift, end_ns=each.end_ns)
    assert find_names(shift, each) == [None, "iteration_shift"]
    assert find_names(dataclasses.replace(shift, confidence=0.5), each) == [None, None]
    assert find_names(shift, dataclasses.replace(each, step=60)) == [None, None]


@pytest.mark.parametrize("name", ["iteration_shift", "iteration_drift"])
def test_frequent_checkpoints_explain_iterations_that_become_longer_with_them(name: str) -> None:
    longer = dataclasses.replace(make_finding(name, 40, before_s=0.03, after_s=0.04), confidence=0.5)
    saves = make_finding("checkpoint_pause", 41, period=2.0)
    assert find_names(saves, longer) == [None, "checkpoint_pause"]
    assert name_relation(longer, saves) == "Likely because of"
    assert find_names(dataclasses.replace(saves, severity=Severity.INFO), longer) == [None, None]
    assert find_names(saves, dataclasses.replace(longer, confidence=0.9)) == [None, None]


def test_slow_steps_at_the_line_of_a_mode_are_a_part_of_it() -> None:
    """As of steps 413 to 418 of a loop that empties the cache from step 290 on."""

    def make(name: str, step: int, place: str, **evidence: float) -> Finding:
        return dataclasses.replace(make_finding(name, step, (0,), **evidence), headline=Text("{place}", {"place": place}))

    emptied, slower = (
        make(name, step, "sde.py:66", **LONGER) for name, step in (("cache_emptied", 290), ("iteration_shift", 413))
    )
    assert drop_superseded([emptied, slower]) == (emptied,)
    for other in (make("iteration_shift", 413, "sde.py:70", **LONGER), make("iteration_shift", 200, "sde.py:66", **LONGER)):
        assert drop_superseded([emptied, other]) == (emptied, other)


def test_a_change_that_a_late_rank_explains_is_because_of_it() -> None:
    assert list_links("host-cache") == [("iteration_shift", "straggler")]


def test_links_lead_to_kinds_of_findings() -> None:
    kinds = load_kinds()
    links = [link for kind in kinds.values() for link in (*kind.explained_by, *kind.repeats, *kind.superseded_by)]
    assert {cause for link in links for cause in link.names} <= kinds.keys()
    assert len(links) > 40


def test_causes_come_first() -> None:
    other, late = make_finding("peak_owner", 1), make_finding("straggler", 20, late_s=0.1, data_s=0.1)
    data = make_finding("data_stall", 20)
    ordered = order_by_cause([other, late, data])
    assert [(one.finding.name, one.depth) for one in ordered] == [("peak_owner", 0), ("data_stall", 0), ("straggler", 1)]


def test_every_list_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table = recordings.unpack_to_folder("cpu-straggler", tmp_path), tmp_path / "findings.csv"
    assert cli.main(["findings", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    data, late = (next(at for at, line in enumerate(lines) if f"  {name}  " in line) for name in ("data_stall", "straggler"))
    assert data < late
    assert lines[late].startswith(" " * 4 + lines[data][:5])
    assert lines[late + 2] == f"        Because of: {lines[data + 1].strip()}."

    assert cli.main(["findings", str(path), "--json"]) == 0
    by_name = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert by_name["straggler"]["because_of"] == {"name": "data_stall", "step": 15, "ranks": [1]}
    assert by_name["data_stall"]["because_of"] is None

    assert cli.main(["export", str(path), "--table", "findings", "-o", str(table)]) == 0
    frame = polars.read_csv(table).filter(polars.col("finding") == "straggler")
    assert frame["because_of"].to_list() == ["data_stall"]
    assert frame["because_of_step"].to_list() == [15]

    page = write_recording_page(read_recording_report(recordings.open_recording("cpu-straggler")))
    assert '<p>Because of <a href="#finding-1">finding 1</a>: Rank 1 waits for data for 61 % of each' in page


def test_a_cause_is_only_likely_where_no_more_than_the_times_agree() -> None:
    shift = make_finding("iteration_shift", 15, before_s=1.0, after_s=2.0)
    assert name_relation(shift, make_finding("throttled", 15)) == "Likely because of"
    assert name_relation(shift, make_finding("slow_gpu", 16, wait_s=1.0)) == "Because of"
    assert name_relation(shift, make_finding("time_lost_in_line", 15, added_s=0.9)) == "Because of"
    assert name_relation(shift, make_finding("time_lost_in_line", 15, added_s=0.2)) == "Likely because of"
    with_memory = dataclasses.replace(
        shift, kind=FindingKind(name="iteration_shift", confidence=0.9, headline="", measured_cause="memory_step")
    )
    assert name_relation(with_memory, make_finding("memory_step", 15)) == "Together with"
    late = make_finding("straggler", 15, data_s=1.0, late_s=1.5)
    assert name_relation(late, make_finding("data_stall", 15)) == "Because of"
    room = make_finding("host_memory_forecast", 6, fallen_bytes=5.8e8)
    assert name_relation(room, make_finding("host_growth", 6, grown_bytes=4.0e8)) == "Because of"
    assert name_relation(room, make_finding("host_growth", 6, grown_bytes=2.0e8)) == "Likely because of"
    assert name_relation(make_finding("swapping", 15), make_finding("host_growth", 5)) == "Likely because of"


def test_a_change_whose_line_was_named_before_is_no_finding() -> None:
    def make(name: str, known_s: int, place: str, step: int = 20) -> Finding:
        finding = make_finding(name, step, before_s=0.1, after_s=0.2)
        headline = Text("{place}", {"place": place})
        return dataclasses.replace(finding, headline=headline, known_ns=known_s * 10**9)

    lost, shift = make("time_lost_in_line", 200, "train.py:7"), make("iteration_shift", 210, "train.py:7")
    assert drop_repeats([lost, shift]) == (lost,)
    for other in (
        make("iteration_shift", 190, "train.py:7"),
        make("iteration_shift", 210, "train.py:8"),
        make("iteration_shift", 210, "train.py:7", 60),
    ):
        assert drop_repeats([lost, other]) == (lost, other)
    for added_s, told in ((0.15, 1), (0.05, 2)):  # at step 60 iterations become 0.1 s longer
        finding = dataclasses.replace(lost, evidence={"added_s": added_s})
        assert len(drop_repeats([finding, make("iteration_shift", 210, "train.py:7", 60)])) == told
    finding = dataclasses.replace(lost, evidence={"added_s": 0.08})  # of 0.1 s, from nearly the same step on
    assert drop_repeats([finding, make("iteration_shift", 210, "train.py:7", 30)]) == (finding,)


def test_flushes_of_the_cache_in_the_step_that_fails_are_a_part_of_it() -> None:
    failure = make_finding("out_of_memory", 25)
    flushed = dataclasses.replace(make_finding("allocator_retries", 25), begin_ns=failure.begin_ns - 1)
    assert drop_superseded([flushed, failure]) == (failure,)
    for other in (make_finding("allocator_retries", 20), make_finding("allocator_retries", 25, (1,))):
        assert drop_superseded([other, failure]) == (other, failure)


def test_a_cache_is_not_flushed_for_fragments_where_a_leak_filled_the_device() -> None:
    flushed = make_finding("allocator_retries", 60, reserved_peak_bytes=20.0 * GIB)
    assert drop_superseded([LEAK, flushed]) == (LEAK,)
    early = dataclasses.replace(flushed, step=20)
    assert drop_superseded([LEAK, early]) == (LEAK, early)


def test_a_peak_that_grew_by_what_an_evaluation_leaves_is_explained_by_it() -> None:
    left = make_finding("validation_jump", 20, outlived_bytes=2.0 * GIB)
    step, larger = (make_finding("memory_step", 20, before_bytes=GIB, after_bytes=size * GIB) for size in (3.0, 6.0))
    assert find_names(left, step, larger) == [None, "validation_jump", None]
    assert find_names(make_finding("validation_jump", 20), step) == [None, None]
    assert name_relation(step, left) == "Because of"


def test_a_peak_that_grew_by_what_a_leak_keeps_is_no_finding() -> None:
    step = make_finding("memory_step", 20, before_bytes=1.0 * GIB, after_bytes=2.0 * GIB)
    assert drop_superseded([step, LEAK]) == (LEAK,)
    larger = make_finding("memory_step", 20, before_bytes=1.0 * GIB, after_bytes=5.0 * GIB)
    assert drop_superseded([larger, LEAK]) == (larger, LEAK)
    at_pauses = make_finding("memory_creep", 20, bytes_per_pause=0.6 * GIB, steps_per_pause=30.0)
    assert drop_superseded([step, at_pauses]) == (at_pauses,)
    assert drop_superseded([larger, at_pauses]) == (larger, at_pauses)


@pytest.mark.parametrize(
    ("begin", "change_s", "is_told"),
    [(66, 0.13, False), (55, 0.13, False), (66, 0.05, True), (66, 0.4, True), (20, 0.13, True)],
    ids=["it is that wait", "it is seen first", "another phase", "far more than the wait", "long before"],
)
def test_a_change_that_is_mostly_a_wait_for_data_is_reported_with_the_wait(
    begin: int, change_s: float, is_told: bool
) -> None:
    stall = make_finding("data_stall", 60, data_s=0.14)
    stall = dataclasses.replace(stall, end_ns=stall.begin_ns + 100 * 10**9)
    grown = max(0.14, change_s)
    shift = make_finding("iteration_shift", begin, before_s=0.11, after_s=0.11 + grown, data_change_s=change_s)
    shift = dataclasses.replace(shift, end_ns=shift.begin_ns + 90 * 10**9)
    assert drop_superseded([stall, shift]) == ((stall, shift) if is_told else (stall,))


def test_a_change_that_goes_on_is_reported_once() -> None:
    """Its line is known, and takes longer from step to step."""
    rise = dataclasses.replace(
        make_finding("iteration_drift", 40, before_s=0.03, after_s=0.1, steps=96, other_change_s=0.07), confidence=0.6
    )
    jump = make_finding("iteration_shift", 10, before_s=0.005, after_s=0.04, other_change_s=0.03)
    assert drop_superseded([jump, rise]) == (jump,)
    for kept in (
        dataclasses.replace(jump, confidence=0.5),
        dataclasses.replace(jump, evidence=jump.evidence | {"forward_change_s": 0.05}),
        dataclasses.replace(jump, evidence=jump.evidence | {"until_step": 30.0}),
        dataclasses.replace(jump, step=41),
    ):
        assert drop_superseded([kept, rise]) == (kept, rise)


def test_a_rise_that_came_in_one_step_is_reported_once() -> None:
    rise = make_finding("iteration_drift", 29, before_s=0.16, after_s=0.76, data_change_s=0.41)
    rise = dataclasses.replace(rise, end_ns=rise.begin_ns + 48 * 10**9, known_ns=rise.begin_ns + 48 * 10**9)
    assert drop_superseded([make_finding("data_stall", 36, data_s=0.24), rise]) == (
        make_finding("data_stall", 36, data_s=0.24),
    )
    for kept in (
        make_finding("data_stall", 36, data_s=0.1),  # it grew on from there
        make_finding("data_stall", 20, data_s=0.24),  # it was there before
        make_finding("data_stall", 36, (1,), data_s=0.24),
        make_finding("iteration_shift", 36, before_s=0.2, after_s=0.4),
    ):
        assert drop_superseded([kept, rise]) == (kept, rise)
    jump = make_finding("iteration_shift", 36, before_s=0.2, after_s=0.6)
    assert drop_superseded([jump, rise]) == (jump,)


def test_memory_that_evaluations_leave_supersedes_growth_in_each_step() -> None:
    steady = make_finding("memory_creep", 30, bytes_per_step=0.03 * GIB, grown_bytes=9 * GIB)
    pauses = make_finding("memory_creep", 31, bytes_per_pause=1.5 * GIB, steps_per_pause=30.0)
    lasting = dataclasses.replace(pauses, begin_ns=steady.begin_ns)
    assert drop_superseded([steady, lasting]) == (lasting,)
    more = dataclasses.replace(steady, evidence={"bytes_per_step": 0.2 * GIB})
    assert drop_superseded([more, lasting]) == (more, lasting)
    step = make_finding("memory_step", 61, before_bytes=GIB, after_bytes=2 * GIB)
    assert drop_repeats([lasting, step]) == (lasting, step)  # it has no growth of a step to compare with


@pytest.mark.parametrize("name", ["iteration_shift", "time_lost_in_line", "long_pause", "repeated_pause", "steps_in_turn"])
def test_a_thread_that_ended_explains_a_wait_for_a_queue_that_began_soon_after(name: str) -> None:
    def find(step: int, *callees: str) -> list[str | None]:
        line = StackLine("train.py", 14, "next_batch", callees, 1.0, 1.0)
        slow = dataclasses.replace(make_finding(name, step, (0,), **LONGER), headline=Text("{line}", line_values(line)))
        return find_names(make_finding("thread_died", 40), slow)

    assert find(41, "queue.Queue.get") == [None, "thread_died"]
    assert find(39, "queue.Queue.get", "threading.Condition.wait") == [None, "thread_died"]  # printed late
    get = "queue.Queue.get"
    for step, callees in ((41, ["time.sleep"]), (30, [get]), (140, [get]), (41, [])):
        assert find(step, *callees) == [None, None]
