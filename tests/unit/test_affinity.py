"""Which cores threads may run on, told once and again when it changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerotop_probe.outside.sampling.affinity import AffinityWatcher, read_allowed_cores, read_numa_nodes
from zerotop_probe.recording.event_values import format_numbers


def test_sets_of_cores_are_written_as_the_kernel_does() -> None:
    assert format_numbers([]) == ""
    assert format_numbers([5]) == "5"
    assert format_numbers({3, 1, 2, 8, 10, 11}) == "1-3,8,10-11"


def test_nodes_without_cores_are_left_out(tmp_path: Path) -> None:
    for node, cpus in (("node10", "4-7"), ("node2", "0-3"), ("node3", "")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus + "\n")
    assert read_numa_nodes(str(tmp_path)) == [{"node": 2, "cpus": "0-3"}, {"node": 10, "cpus": "4-7"}]
    assert read_numa_nodes(str(tmp_path / "none")) == []


@pytest.fixture
def bound_thread() -> Iterator[tuple[int, str]]:
    """A thread of ours on one core, and that core."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one core no thread can differ")
    ready, done = threading.Event(), threading.Event()
    core = max(os.sched_getaffinity(0))
    found: list[int] = []

    def wait_on_one_core() -> None:
        found.append(threading.get_native_id())
        os.sched_setaffinity(0, {core})
        ready.set()
        done.wait()

    thread = threading.Thread(target=wait_on_one_core)
    thread.start()
    ready.wait()
    yield found[0], str(core)
    done.set()
    thread.join()


def test_only_new_affinities_are_reported(bound_thread: tuple[int, str]) -> None:
    tid, core = bound_thread
    pid, told = os.getpid(), []
    affinity = AffinityWatcher(pid, lambda *_, **facts: told.append(facts))
    affinity.check_threads([pid, tid])
    assert told == [{"pid": pid, "cpus": read_allowed_cores(pid), "threads": {str(tid): core}}]
    affinity.check_threads([pid, tid])
    assert len(told) == 1
    os.sched_setaffinity(tid, os.sched_getaffinity(pid))
    affinity.check_threads([tid])
    assert told[1]["threads"] == {str(tid): read_allowed_cores(pid)}


def test_a_process_that_is_gone_says_nothing() -> None:
    told: list[object] = []
    AffinityWatcher(2**22 + 1, lambda *_, **facts: told.append(facts)).check_threads([2**22 + 1])
    assert told == []
