"""Ranks of jobs that have something in common: a process that starts them, their variables, a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from zerotop_probe.outside import procfs
from zerotop_probe.outside.attaching import jobs
from zerotop_probe.outside.attaching.found_ranks import FoundRank, split_same_ranks
from zerotop_probe.outside.procfs import ProcessHandle

# Starts a rank for each word, such as "0a" for rank 0 of job a: "0a+": in one process group with others of job a. After "/"
# a process of its own starts the ranks that follow, with commas between them.
STARTER = """
import os, subprocess, sys, time
groups, code = {}, "import time; time.sleep(600)"
for word in sys.argv[1:]:
    if word.startswith("/"):
        below = subprocess.Popen([sys.executable, sys.argv[0], *word[1:].split(",")], stdout=subprocess.PIPE)
        below.stdout.readline()
        continue
    own = {"RANK": word[0], "JOB_OF_TEST": word[1], "MASTER_PORT": "12345"}
    join = (lambda: os.setpgid(0, groups.get(word[1], 0))) if word.endswith("+") else None
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | own, preexec_fn=join)
    groups.setdefault(word[1], process.pid)
    time.sleep(0.05)
print("started", flush=True)
time.sleep(600)
"""

Start = Callable[..., tuple[int, list[FoundRank]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a script of this name with these words. Returns its pid and the ranks, once all of them run."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(name: str, *words: str) -> tuple[int, list[FoundRank]]:
        (tmp_path / name).write_text(STARTER)
        process = subprocess.Popen([sys.executable, str(tmp_path / name), *words], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        return process.pid, read_ranks(process.pid)

    yield begin
    for pid in [member for process in started for member in reversed(procfs.find_family(process.pid))]:
        os.kill(pid, 9)
    for process in started:
        process.communicate()


def read_ranks(pid: int) -> list[FoundRank]:
    found: list[FoundRank] = []
    for member in procfs.find_family(pid):
        process, environment = ProcessHandle.from_pid(member), procfs.read_environment(member)
        if process is not None and "JOB_OF_TEST" in environment:
            found.append(FoundRank(process, int(environment["RANK"]), environment))
    return found


def name_ranks(ranks: Sequence[FoundRank]) -> str:
    return " ".join(sorted(f"{rank.rank}{rank.environment['JOB_OF_TEST']}" for rank in ranks))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["0a", "1a", "2a"], ["0a 1a 2a"]),
        (["0a", "0b"], ["0a", "0b"]),
        (["/0a,1a", "/0b,1b,2b"], ["0a 1a", "0b 1b 2b"]),
        (["/0a,1a", "/0b"], ["0a 1a", "0b"]),
        (["0a+", "0b+", "1b+", "1a+"], ["0a 1a", "0b 1b"]),  # one process group each
        (["/4a", "/5a", "/4b", "/5b"], ["4a 5a", "4b 5b"]),  # as they started, where a wrapper is above each rank
        (["0a", "0b", "1a", "1b"], ["0a 1a", "0b 1b"]),
        (["/0a", "/0b,1b", "/4c,5c,4d,5d"], ["0a", "0b 1b", "4c 5c", "4d 5d"]),
    ],
)
def test_two_processes_of_one_rank_are_of_two_jobs(start: Start, words: list[str], names: list[str]) -> None:
    _, ranks = start("starter.py", *words)
    assert sorted(map(name_ranks, split_same_ranks(ranks[::-1]))) == names


def test_a_job_is_found_beside_another_one_that_the_same_process_started(start: Start) -> None:
    """As workers of pytest do; their variables agree."""
    _, ranks = start("starter.py", "/0a", "/0b,1b")
    for rank in ranks:
        job = jobs.find_job(rank.process.pid)
        assert job is not None
        assert name_ranks(job.ranks) == {"a": "0a", "b": "0b 1b"}[rank.environment["JOB_OF_TEST"]]
        assert job.root == job.ranks[0].process


def test_jobs_below_one_launcher_have_the_launchers_of_their_own(start: Start) -> None:
    topmost, ranks = start("torchrun", "/0a,1a", "/0b,1b")
    own = {rank.environment["JOB_OF_TEST"]: procfs.list_ancestors(rank.process.pid)[1] for rank in ranks}
    for name, launcher in own.items():
        for pid in (launcher, *(rank.process.pid for rank in ranks if rank.environment["JOB_OF_TEST"] == name)):
            job = jobs.find_job(pid)
            assert job is not None
            assert (job.root.pid, job.launcher, name_ranks(job.ranks)) == (launcher, "torchrun", f"0{name} 1{name}")
    job = jobs.find_job(topmost)
    assert job is not None
    assert job.root.pid in own.values()


def test_a_launcher_of_one_job_stays_its_root(start: Start) -> None:
    topmost, ranks = start("torchrun", "/0a", "/1a")
    for pid in (topmost, *(rank.process.pid for rank in ranks)):
        job = jobs.find_job(pid)
        assert job is not None
        assert (job.root.pid, name_ranks(job.ranks)) == (topmost, "0a 1a")
