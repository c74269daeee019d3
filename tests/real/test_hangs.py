"""Jobs of two or three ranks that stand still: which rank, at which line, and in which collective the others wait."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from py_spy_access import can_read_others
from real_jobs import TIMEOUT_S
from standing_jobs import LINES, StandingJob
from zerotop.analysis.findings import Finding
from zerotop.analysis.hangs.reader import find_stillness
from zerotop.recording.reader import Recording
from zerotop_probe.recording.events import RankStacks, Stacks

ODD, STEP = 1, 30
# Kinds that stand still until they are ended, and those that take long but work.
HANGS, WORK = ("lock", "disk", "native", "mismatch", "peer", "shapes"), ("save", "compute")
ENDLESS_S, WORK_S = 600.0, 14.0
# Before the first step: the stacks of idle ranks are read after 15 and 30 s.
START_S = 40.0


def list_others(kind: str) -> tuple[int, ...]:
    """The ranks that wait: of two ranks that wait for each other, none would be the odd one."""
    return (0, 2) if kind == "mismatch" else (0,)


@pytest.fixture(scope="module")
def standing_jobs(
    tmp_path_factory: pytest.TempPathFactory, job_environment: dict[str, str]
) -> Iterator[dict[str, StandingJob]]:
    """All of them at once: they mostly sleep."""
    folder, started = tmp_path_factory.mktemp("hangs"), {}
    for kind in (*HANGS, *WORK):
        pause_s, ranks = ENDLESS_S if kind in HANGS else WORK_S, 1 + len(list_others(kind))
        started[kind] = StandingJob(folder / kind, job_environment, kind, ranks=ranks, odd=ODD, step=STEP, pause_s=pause_s)
    for kind, pause_s in (("start", ENDLESS_S), ("prepare", START_S)):
        started[kind] = StandingJob(folder / kind, job_environment, kind, ranks=2, odd=ODD, step=0, pause_s=pause_s)
    yield started
    for job in started.values():
        job.stop()


def wait_for_finding(job: StandingJob, name: str = "hung_ranks") -> Finding:
    """Return a finding once it names a line, as it does later on a busy machine."""
    end = time.monotonic() + TIMEOUT_S
    while (finding := job.find_named(name)) is None or str(finding.fix).startswith("py-spy"):
        assert time.monotonic() < end, job.output
        assert job.process.poll() is None, job.output
        time.sleep(0.5)
    return finding


@pytest.mark.parametrize("kind", [kind for kind in HANGS if kind != "shapes"])
def test_the_rank_that_the_others_wait_for_is_named_with_its_line(standing_jobs: dict[str, StandingJob], kind: str) -> None:
    if kind == "native" and not can_read_others():
        pytest.skip("py-spy may not read other processes here")
    finding = wait_for_finding(standing_jobs[kind])
    assert finding.ranks == (ODD,)
    assert finding.step in (STEP, STEP + 1)
    found = find_stillness(Recording.open(standing_jobs[kind].recording).at(time.time_ns()))
    assert found is not None
    standstill, since_ns = found
    assert since_ns == finding.begin_ns
    odd, others = standstill.groups
    assert (odd, odd.ranks, others.ranks) == (standstill.odd, (ODD,), list_others(kind))
    if kind == "peer":
        assert "rank 1 has ended" in finding.headline
        assert "Rank 0 is in get at hanging.py:" in finding.details
    else:
        assert finding.fix == f"hanging.py:{LINES[kind]}"
        waiting = "Ranks 0 and 2 wait" if kind == "mismatch" else "Rank 0 waits"
        assert f"{waiting} in all_reduce at hanging.py:" in finding.details
    assert standstill.is_mismatch == (kind == "mismatch")


def test_different_shapes_in_one_collective_are_named(standing_jobs: dict[str, StandingJob]) -> None:
    """With gloo the rank that passes half as much goes on to the next collective, and the other one waits for the rest."""
    finding = wait_for_finding(standing_jobs["shapes"])
    assert finding.headline.endswith(": rank 1 passed 2,048 x 1,024, rank 0 4,096 x 1,024")
    assert "same shape" in finding.advice
    assert "network" not in finding.advice
    assert finding.fix == f"hanging.py:{LINES['shapes']}"


@pytest.mark.parametrize("kind", WORK)
def test_saving_and_computing_for_long_is_no_hang(standing_jobs: dict[str, StandingJob], kind: str) -> None:
    """The other ranks wait as long as in a hang."""
    job = standing_jobs[kind]
    assert job.process.wait(TIMEOUT_S) == 0, job.output
    written = [event for event in Recording.open(job.recording).events_of(Stacks) if event.facts.get("why") == "silent"]
    assert {event.writer.rank for event in written} >= {0}
    assert job.find_named("hung_ranks") is None


def test_a_rank_that_stops_before_the_first_step_is_named_with_its_line(standing_jobs: dict[str, StandingJob]) -> None:
    if not can_read_others():
        pytest.skip("py-spy may not read other processes here")
    job = standing_jobs["start"]
    finding = wait_for_finding(job, "stuck_at_start")
    assert (finding.ranks, finding.fix) == ((ODD,), f"hanging.py:{LINES['start']}")
    assert "Rank 0 waits in init_process_group at hanging.py:" in finding.details
    assert job.stopped_ns is not None
    assert abs(finding.begin_ns - job.stopped_ns) < 40e9  # on a busy machine it takes as long to be seen as idle
    found = find_stillness(Recording.open(job.recording).at(time.time_ns()))
    assert found is not None
    assert [group.ranks for group in found.standstill.groups] == [(ODD,), (0,)]


def test_a_rank_that_computes_before_the_first_step_holds_nobody_up(standing_jobs: dict[str, StandingJob]) -> None:
    job = standing_jobs["prepare"]
    assert job.process.wait(TIMEOUT_S) == 0, job.output
    if can_read_others():
        read = Recording.open(job.recording).events_of(RankStacks)
        # One waits and does nothing, if it gets a core for that; the other one computes.
        assert {event.rank for event in read if (event.idle_s or 0) > 10} <= {0}
    assert job.find_named("stuck_at_start") is None
