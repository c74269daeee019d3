"""Jobs that hang already when zerotop attaches to them: the rank that the others wait for, and its line."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from free_ports import find_free_port
from loop_runs import LOOPS
from py_spy_access import can_read_others
from real_jobs import TIMEOUT_S
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.recording.headers import RecordingError
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events

SCRIPT = LOOPS / "already_hanging.py"
LINES = {
    line.rpartition("# hang: ")[2]: number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if "# hang: " in line
}
KINDS = ("queue", "barrier", "loop", "well")
WATCHED_S = 40.0


@dataclass
class Attached:
    """A job of two ranks, and the recording of a zerotop that attached to it."""

    ranks: list[subprocess.Popen[bytes]]
    folder: Path
    watcher: subprocess.Popen[bytes] | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether both ranks have come to the step of the hang."""
        return (self.folder / "output").read_bytes().count(b"STOPS") == len(self.ranks)

    def find_hangs(self) -> list[Finding]:
        """Return the findings about a hang so far."""
        try:
            recording = Recording.open(self.folder / "recording")
        except (RecordingError, OSError):
            return []
        return [one for one in detect_findings(recording, time.time_ns()) if one.name in ("stuck_at_start", "hung_ranks")]

    def attach(self) -> None:
        command = [sys.executable, "-m", "zerotop", "attach", str(self.ranks[0].pid), "--headless"]
        with open(self.folder / "watcher", "wb") as output:
            self.watcher = subprocess.Popen(
                [*command, "--recording", str(self.folder / "recording")], stdout=output, stderr=subprocess.STDOUT
            )

    def end(self) -> None:
        """Kill both ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def start_job(folder: Path, environment: dict[str, str], kind: str) -> Attached:
    folder.mkdir()
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": "2"}
    with open(folder / "output", "wb") as output:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-u", str(SCRIPT), kind],
                cwd=folder,
                env={**environment, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            for rank in (0, 1)
        ]
    return Attached(ranks, folder)


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory, job_environment: dict[str, str]) -> Iterator[dict[str, Attached]]:
    """All of them at once: most of them sleep."""
    if not can_read_others():
        pytest.skip("py-spy may not read other processes here")
    folder = tmp_path_factory.mktemp("attached")
    jobs = {kind: start_job(folder / kind, job_environment, kind) for kind in KINDS}
    try:
        end = time.monotonic() + TIMEOUT_S
        while not all(job.has_stopped for job in jobs.values()):
            assert time.monotonic() < end
            assert all(rank.poll() is None for job in jobs.values() for rank in job.ranks)
            time.sleep(0.2)
        for job in jobs.values():
            job.attach()
        yield jobs
    finally:
        for job in jobs.values():
            job.end()
        for job in jobs.values():
            if job.watcher is not None:
                job.watcher.wait(TIMEOUT_S)


def wait_for_hang(job: Attached) -> Finding:
    end = time.monotonic() + TIMEOUT_S
    while not (found := job.find_hangs()):
        assert time.monotonic() < end, (job.folder / "watcher").read_text()
        time.sleep(0.5)
    return found[0]


def test_the_rank_that_waits_for_a_queue_is_named_with_its_line(attached: dict[str, Attached]) -> None:
    finding = wait_for_hang(attached["queue"])
    assert (finding.ranks, finding.fix) == ((1,), f"{SCRIPT.name}:{LINES['queue']}")
    assert f"rank 1 waits for a queue at {SCRIPT.name}:" in finding.headline
    assert f"Rank 0 waits in all_reduce at {SCRIPT.name}:" in finding.details
    assert "Cores used: rank 0 0.0, rank 1 0.0" in finding.details
    assert "acquire_lock" not in finding.headline + finding.details


def test_different_collectives_are_named_with_their_lines(attached: dict[str, Attached]) -> None:
    finding = wait_for_hang(attached["barrier"])
    assert finding.headline.endswith("rank 0 waits in all_reduce, rank 1 waits in barrier") or finding.headline.endswith(
        "rank 0 waits in all_reduce, rank 1 in barrier"
    )
    assert f"Rank 1 waits in barrier at {SCRIPT.name}:{LINES['barrier']} in stop." in finding.details
    assert "network" not in finding.advice


def test_a_rank_that_computes_without_end_is_named_with_its_line(attached: dict[str, Attached]) -> None:
    finding = wait_for_hang(attached["loop"])
    assert finding.ranks == (1,)
    assert "for rank 1 at already_hanging.py:" in finding.headline
    assert "Cores used: rank 0 0.0, rank 1 " in finding.details


def test_a_job_that_is_well_has_no_hang(attached: dict[str, Attached]) -> None:
    """Watched for longer than it takes to say so of the others."""
    job = attached["well"]
    wait_for_hang(attached["loop"])
    attached["loop"].end()  # it takes a whole core
    begin_ns = Recording.open(job.folder / "recording").events_of(events.Attached)[0].unix_ns
    time.sleep(max(0.0, WATCHED_S - (time.time_ns() - begin_ns) / 1e9))
    assert job.find_hangs() == []
    assert all(rank.poll() is None for rank in job.ranks)
