"""Ray: its raylet is found above a rank, the limit of its memory monitor in its environment, and its workers as ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from agents import read_node_events, wait_for
from small_recording import make_identity
from zerotop_probe.outside.attaching import jobs
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling.ranks.rank_discovery import RankFinder
from zerotop_probe.outside.sampling.ranks.ray_monitor import find_raylet, parse_limit
from zerotop_probe.recording.writer import EventWriter

SHARE, PERIOD, FREE = "RAY_memory_usage_threshold", "RAY_memory_monitor_refresh_ms", "RAY_min_memory_free_bytes"


@pytest.mark.parametrize(
    ("variables", "limit"),
    [
        ({}, (0.95, None)),
        ({SHARE: "0.8", PERIOD: "100"}, (0.8, None)),
        ({FREE: "1000"}, (0.95, 1000)),
        ({FREE: "-1"}, (0.95, None)),
        ({PERIOD: "0"}, None),
        ({SHARE: "nan"}, None),
        ({SHARE: "7"}, None),
        ({SHARE: "much"}, None),
    ],
)
def test_the_limit_of_a_raylet(variables: Mapping[str, str], limit: tuple[float, int | None] | None) -> None:
    assert parse_limit({"HOME": "/root", **variables}) == limit


def test_an_environment_that_may_not_be_read_says_nothing() -> None:
    assert parse_limit({}) is None


@pytest.mark.parametrize(("name", "events"), [("raylet", 1), ("other", 0)])
def test_the_raylet_above_processes_of_the_job_is_reported_once(tmp_path: Path, name: str, events: int) -> None:
    shell = shutil.copy("/bin/sh", tmp_path / name)
    command = [shell, "-c", "sleep 60 & first=$!; sleep 60 & echo $first $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={SHARE: "0.7", "PATH": "/bin:/usr/bin"}) as job:
        try:
            assert job.stdout is not None
            first, last = map(int, job.stdout.readline().split())
            wait_for(lambda: {Path(f"/proc/{pid}/comm").read_text() for pid in (first, last)} == {"sleep\n"})
            root = ProcessHandle.from_pid(job.pid)
            assert root is not None
            writer = EventWriter(str(tmp_path), make_identity(-1))
            finder = RankFinder(str(tmp_path), root, writer, inherited={})
            assert [finder.add_actor(pid) for pid in (first, last)] == [True, True]
            writer.close()
            assert (find_raylet(last) == job.pid) is bool(events)
        finally:
            subprocess.run(["kill", str(first), str(last)], check=False)
            job.kill()
    found = read_node_events(tmp_path, "ray_monitor")
    assert [(event["pid"], event["share"]) for event in found] == [(job.pid, 0.7)] * events


# As Ray 2.60 does: the raylet's child has a title for its command line, and sets RANK inside.
RAYLET = """
import subprocess, sys
worker = "import mmap, os; f = open(os.environ['LIBRARY'], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); print(flush=True)"
worker += "; input()"
for title, library in ("ray::WorkerDict", "libtorch.so"), ("ray::WorkerDict", "libtorch.so"), ("ray::Agent", "libc.so"):
    open(library, "w").write("x")
    environment = {"LIBRARY": library}
    child = subprocess.Popen([title, "-c", worker], executable=sys.argv[1], env=environment, stdin=0, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
input()
"""


@pytest.mark.parametrize("name", ["raylet", "other"])
def test_workers_of_ray_with_pytorch_are_a_job_and_sampled(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(sys.executable)
    command = [str(tmp_path / name), "-c", RAYLET, sys.executable]
    pipe, environment = subprocess.PIPE, {SHARE: "0.7"}
    with subprocess.Popen(command, cwd=tmp_path, text=True, env=environment, stdin=pipe, stdout=pipe) as raylet:
        assert raylet.stdin is not None
        assert raylet.stdout is not None
        pids = [int(raylet.stdout.readline()) for _ in range(3)]
        job = next((job for job in jobs.find_jobs() if job.root.pid == raylet.pid), None)
        writer = EventWriter(str(tmp_path), make_identity(-1))
        ranks = [rank.process for rank in job.ranks] if job is not None else []
        members = []
        if job is not None:
            members = RankFinder(str(tmp_path), job.root, writer, attached_ranks=ranks).list_members()
        writer.close()
        raylet.stdin.close()
    if name == "other":
        assert job is None
        return
    assert job is not None
    assert (job.launcher, job.command) == ("ray", (str(tmp_path / name),))
    assert [(rank.process.pid, rank.rank) for rank in job.ranks] == [(pid, None) for pid in sorted(pids[:2])]
    assert {(one.process.pid, one.rank) for one in members} >= {(pid, -1) for pid in pids[:2]}
    assert [event["share"] for event in read_node_events(tmp_path, "ray_monitor")] == [0.7]
