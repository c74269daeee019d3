"""Jobs of two or three ranks that stand still: which rank, at which line, and in which collective the others wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loop_runs import LOOPS
from real_jobs import TIMEOUT_S, free_port
from zerotop.analysis.annotations import Annotation, Annotator
from zerotop.analysis.hangs.reader import find_standstill
from zerotop.session.reader import Session, SessionError

SCRIPT = LOOPS / "hanging.py"
LINES = {
    line.rpartition("# hang: ")[2]: number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if "# hang: " in line
}
ODD, STEP = 1, 30
# Kinds that stand still until they are ended, and those that take long but work.
HANGS, WORK = ("sleep", "lock", "disk", "mismatch", "peer"), ("save", "compute")
ENDLESS_S, WORK_S = 600.0, 14.0


def list_others(kind: str) -> tuple[int, ...]:
    """The ranks that wait: of two ranks that wait for each other, none would be the odd one."""
    return (0, 2) if kind == "mismatch" else (0,)


class Job:
    """One job, whose launcher does nothing when a rank ends."""

    def __init__(self, kind: str, folder: Path, environment: dict[str, str], pause_s: float) -> None:
        self.folder = folder
        folder.mkdir()
        others = list_others(kind)
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(1 + len(others))}
        script = f"{SCRIPT} {kind} {ODD} {STEP} {pause_s}"
        ranks = " & ".join(f"RANK={rank} LOCAL_RANK={rank} {sys.executable} {script}" for rank in (ODD, *others))
        command = [sys.executable, "-m", "zerotop", "run", "--headless", "--session", str(folder / "session"), "--"]
        with open(folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                [*command, "bash", "-c", f"{ranks} & wait"],
                cwd=folder,
                env=environment | world,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_finding(self, name: str) -> Annotation:
        """Return the first finding of that name."""
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            for finding in self.find_all():
                if finding.name == name:
                    return finding
            assert self.process.poll() is None, (self.folder / "output").read_text()
            time.sleep(0.5)
        raise AssertionError((self.folder / "output").read_text())

    def find_all(self) -> tuple[Annotation, ...]:
        try:
            session = Session.open(self.folder / "session")
        except (SessionError, OSError):
            return ()
        annotator = Annotator(session)
        annotator.update(now := time.time_ns())
        return annotator.findings_at(now)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, job_environment: dict[str, str]) -> Iterator[dict[str, Job]]:
    """All of them at once: they mostly sleep."""
    folder = tmp_path_factory.mktemp("hangs")
    started = {kind: Job(kind, folder / kind, job_environment, ENDLESS_S) for kind in HANGS}
    started |= {kind: Job(kind, folder / kind, job_environment, WORK_S) for kind in WORK}
    yield started
    for job in started.values():
        job.stop()


@pytest.mark.parametrize("kind", HANGS)
def test_the_rank_that_the_others_wait_for_is_named_with_its_line(jobs: dict[str, Job], kind: str) -> None:
    finding = jobs[kind].wait_for_finding("hung_ranks")
    assert finding.ranks == (ODD,)
    assert finding.step in (STEP, STEP + 1)
    standstill, since_ns = find_standstill(Session.open(jobs[kind].folder / "session"), time.time_ns()) or (None, 0)
    assert standstill is not None
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


@pytest.mark.parametrize("kind", WORK)
def test_saving_and_computing_for_long_is_no_hang(jobs: dict[str, Job], kind: str) -> None:
    """The other ranks wait for as long as where a hang is found."""
    assert jobs[kind].process.wait(TIMEOUT_S) == 0, (jobs[kind].folder / "output").read_text()
    session = Session.open(jobs[kind].folder / "session")
    written = [event for event in session.events_named("stacks") if event.facts.get("why") == "silent"]
    assert {event.rank for event in written} >= {0}
    assert "hung_ranks" not in {finding.name for finding in jobs[kind].find_all()}
