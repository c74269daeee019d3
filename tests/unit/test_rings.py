"""Records through shared memory: who may use it, what survives which kill, and what happens when nobody takes them."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents import wait_for
from zerotop.recording.reader import Recording
from zerotop_probe.outside.sampling.ring_collector import Report, RingCollector, adopt_leftovers
from zerotop_probe.recording import directory, segments, tables
from zerotop_probe.recording.rings import shared_memory
from zerotop_probe.recording.rings.ring_drainer import RingDrainer
from zerotop_probe.recording.rings.ring_files import DiskFiles, RingFiles, open_rank_files
from zerotop_probe.recording.rings.shared_memory import Ring
from zerotop_probe.recording.writer import Identity

# Writes numbers as fast as told, and now and then an event of several slots; ends when its standard input does.
RANK = """
import os, sys, time
from zerotop_probe.recording import segments, tables
from zerotop_probe.recording.rings import shared_memory
from zerotop_probe.recording.rings.ring_files import RingFiles, open_rank_files
from zerotop_probe.recording.writer import Identity
shared_memory.MEMORY_ROOT, recording = sys.argv[1:3]
count, pause_s, ring_bytes = int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
shared_memory._RING_BYTES = ring_bytes
segments.SEGMENT_BYTES = 1  # as for the sampler: either of them may write
files = open_rank_files(recording, Identity.for_this_process("rank", 0))
assert isinstance(files, RingFiles), files
table = files.open_table(tables.PROBE)
for number in range(count):
    table.write(time.monotonic_ns(), number, 0, 0, 0, 0)
    if number % 100 == 0:
        files.events.write(time.monotonic_ns(), "made_up", number=number, text="x" * 300)
        time.sleep(pause_s)
print(table.lost, table.last_error, flush=True)
sys.stdin.read()
files.finish()
"""
SAMPLER = """
import sys, time
from zerotop_probe.recording import segments
from zerotop_probe.recording.rings import shared_memory
from zerotop_probe.outside.sampling.ring_collector import Report, RingCollector
shared_memory.MEMORY_ROOT, recording = sys.argv[1:]
segments.SEGMENT_BYTES = 1
report = Report(
    lambda *_, rank, seconds, why: print("late", rank, seconds, why, flush=True),
    lambda *facts: print("error", *facts, flush=True),
)
collector = RingCollector(recording, report)
collector.start()
print("ready", flush=True)
sys.stdin.read()
collector.finish(10)
"""


@pytest.fixture
def shared_recording(tmp_path: Path, memory_root: str) -> Path:
    """A recording whose shared memory lies in the test's own root."""
    return Path(directory.create_recording(["python", "train.py"], path=str(tmp_path / "recording")))


def find_memory(folder: Path) -> str:
    found = shared_memory.find_folder(str(folder))
    assert found is not None
    return found


@pytest.fixture
def start_process(memory_root: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process of one of the scripts above."""
    running = []

    def start_script(code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, memory_root, *map(str, arguments)]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield start_script
    for process in running:
        process.kill()
        process.communicate()


def read_numbers(folder: Path) -> list[int]:
    sources = Recording.open(folder).sources["probe"]  # none before the header is written
    return [number for source in sources for number in source.array["cost_ns"].tolist()]


def read_events(folder: Path) -> list[int]:
    (path,) = folder.glob("events-rank*.jsonl")
    return [fact["number"] for fact in map(json.loads, path.read_text().splitlines()[1:])]


def read_answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def start_sampler(start: Any, folder: Path) -> Any:
    sampler = start(SAMPLER, folder)
    assert read_answer(sampler) == "ready"
    return sampler


def finish_process(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize("kill", [False, True])
def test_all_that_a_rank_made_is_in_its_recording(shared_recording: Path, start_process: Any, kill: bool) -> None:
    sampler = start_sampler(start_process, shared_recording)
    rank = start_process(RANK, shared_recording, 10_000, 0.0001, 1 << 22)
    assert read_answer(rank) == "0"
    wait_for(lambda: list(shared_recording.glob("probe-*.rec")) and len(read_numbers(shared_recording)) == 10_000)
    if kill:
        rank.kill()
        rank.wait()
        wait_for(lambda: not shared_memory.list_rings(find_memory(shared_recording)))
    else:
        finish_process(rank)
    finish_process(sampler)
    assert read_numbers(shared_recording) == list(range(10_000))
    assert read_events(shared_recording) == list(range(0, 10_000, 100))
    assert not os.path.exists(find_memory(shared_recording))


def test_samplers_killed_at_any_moment_lose_and_double_nothing(shared_recording: Path, start_process: Any) -> None:
    sampler = start_sampler(start_process, shared_recording)
    rank = start_process(RANK, shared_recording, 20_000, 0.008, 1 << 23)
    chance = random.Random(15)
    for _ in range(6):
        time.sleep(0.1 + chance.random() / 10)
        sampler.kill()
        sampler = start_sampler(start_process, shared_recording)
    assert read_answer(rank) == "0"
    finish_process(rank)
    finish_process(sampler)
    assert read_numbers(shared_recording) == list(range(20_000))
    assert read_events(shared_recording) == list(range(0, 20_000, 100))


@pytest.mark.parametrize("kept", [0, 1, 50, 2000])
def test_records_written_but_not_noted_are_not_written_again(
    shared_recording: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    os.mkdir(find_memory(shared_recording), 0o700)
    files = open_rank_files(str(shared_recording), Identity.for_this_process("rank", 0))
    assert isinstance(files, RingFiles)
    table = files.open_table(tables.PROBE)
    drainer = RingDrainer(files.ring, str(shared_recording))
    for number in range(3000):
        table.write(time.monotonic_ns(), number, 0, 0, 0, 0)
        if number == kept:
            drainer.drain(time.monotonic_ns())
            noted = files.ring.read_drained(), files.ring.read_progress()
    drainer.drain(time.monotonic_ns())
    path = max(shared_recording.glob("probe-*.rec"))
    os.truncate(path, path.stat().st_size - 13)  # a write was cut short, too
    files.ring.write_progress(*noted[0], noted[1])
    drainer.close()
    again = RingDrainer(files.ring, str(shared_recording))
    again.drain(time.monotonic_ns())
    table.write(time.monotonic_ns(), 3000, 0, 0, 0, 0)
    again.drain(time.monotonic_ns())
    assert read_numbers(shared_recording) == list(range(3001))
    again.close()
    files.close()


def test_a_rank_without_a_sampler_writes_by_itself(shared_recording: Path, start_process: Any) -> None:
    sampler = start_sampler(start_process, shared_recording)
    sampler.kill()
    sampler.wait()
    rank = start_process(RANK, shared_recording, 1000, 0.0, 1 << 22)
    assert read_answer(rank) == "0"
    finish_process(rank)
    assert read_numbers(shared_recording) == list(range(1000))
    assert not shared_memory.list_rings(find_memory(shared_recording))


def test_rings_that_killed_ranks_leave_without_a_sampler_are_adopted(shared_recording: Path, start_process: Any) -> None:
    sampler = start_sampler(start_process, shared_recording)
    sampler.send_signal(signal.SIGSTOP)
    rank = start_process(RANK, shared_recording, 1000, 0.0, 1 << 22)
    assert read_answer(rank) == "0"
    rank.kill()
    rank.wait()
    adopt_leftovers()
    assert shared_memory.list_rings(find_memory(shared_recording))  # the sampler lives
    sampler.kill()
    sampler.wait()
    adopt_leftovers()
    assert read_numbers(shared_recording) == list(range(1000))
    assert not os.path.exists(find_memory(shared_recording))


def test_a_full_ring_loses_counts_and_says_why(shared_recording: Path, start_process: Any) -> None:
    sampler = start_sampler(start_process, shared_recording)
    sampler.send_signal(signal.SIGSTOP)
    rank = start_process(RANK, shared_recording, 10_000, 0.0, 1 << 18)
    lost, _, why = read_answer(rank).partition(" ")
    time.sleep(2.1)
    sampler.send_signal(signal.SIGCONT)
    wait_for(lambda: list(shared_recording.glob("probe-*.rec")) and read_numbers(shared_recording))
    finish_process(rank)
    numbers = read_numbers(shared_recording)
    assert numbers == list(range(len(numbers)))  # the first ones stay
    assert len(numbers) == 10_000 - int(lost) > 1000
    assert why == "the sampler of this node does not keep up"
    word, number, seconds = read_answer(sampler).split()[:3]
    assert (word, number) == ("late", "0")
    assert float(seconds) > 2


def test_slots_that_stay_empty_delay_no_others(shared_recording: Path) -> None:
    os.mkdir(find_memory(shared_recording), 0o700)
    files = open_rank_files(str(shared_recording), Identity.for_this_process("rank", 0))
    assert isinstance(files, RingFiles)
    table = files.open_table(tables.PROBE)
    drainer = RingDrainer(files.ring, str(shared_recording))
    begin_ns = time.monotonic_ns()
    for number in range(6):
        if number == 3:
            files.take_slot()
        table.write(begin_ns + number, number, 0, 0, 0, 0)
    table.write("wrong", 6, 0, 0, 0, 0)
    assert table.lost == 1
    assert drainer.drain(begin_ns) == 3
    assert drainer.drain(begin_ns + 900_000_000) == 0  # another thread may be about to fill it
    assert drainer.drain(begin_ns + 1_100_000_000) == 5
    assert read_numbers(shared_recording) == list(range(6))
    drainer.close()
    files.close()


def test_a_ring_is_drained_over_many_laps(shared_recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_RING_BYTES", 1 << 18)
    os.mkdir(find_memory(shared_recording), 0o700)
    files = open_rank_files(str(shared_recording), Identity.for_this_process("rank", 0))
    assert isinstance(files, RingFiles)
    table = files.open_table(tables.PROBE)
    drainer = RingDrainer(files.ring, str(shared_recording))
    expected = []
    for lap in range(10):
        for number in range(files.ring.slots // 3):
            table.write(time.monotonic_ns(), lap * 10_000 + number, 0, 0, 0, 0)
            expected.append(lap * 10_000 + number)
        files.events.write(time.monotonic_ns(), "made_up", number=lap, text="x" * 2000)
        drainer.drain(time.monotonic_ns())
    assert table.lost == 0
    assert read_numbers(shared_recording) == expected
    assert read_events(shared_recording) == list(range(10))
    drainer.close()
    files.close()


def test_who_may_use_the_memory(shared_recording: Path) -> None:
    me, memory = Identity.for_this_process("rank", 0), Path(find_memory(shared_recording))
    assert isinstance(open_rank_files(str(shared_recording), me), DiskFiles)  # no sampler
    memory.mkdir(0o755)
    memory.chmod(0o755)
    assert isinstance(open_rank_files(str(shared_recording), me), DiskFiles)  # others could look
    memory.chmod(0o700)
    files = open_rank_files(str(shared_recording), me)
    assert isinstance(files, RingFiles)
    status = os.stat(files.ring.path)
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, os.geteuid())
    assert status.st_blocks * 512 >= status.st_size  # reserved: no later page can be missing
    files.close()
    assert str(os.geteuid()) in memory.name


def test_no_ring_where_memory_is_scarce(shared_recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkdir(find_memory(shared_recording), 0o700)
    free = os.statvfs(find_memory(shared_recording))
    monkeypatch.setattr(shared_memory, "_SHARE", free.f_bavail * free.f_frsize // (100 << 10))
    assert isinstance(open_rank_files(str(shared_recording), Identity.for_this_process("rank", 0)), DiskFiles)


def test_records_are_written_where_only_one_thread_can_be_started(shared_recording: Path, start_process: Any) -> None:
    limited = """
import threading
start = threading.Thread.start
def refuse(self):
    if self.name != "rings":
        raise RuntimeError("can't start new thread")
    start(self)
threading.Thread.start = refuse
"""
    sampler = start_process(limited + SAMPLER, shared_recording)
    assert read_answer(sampler) == "ready"
    rank = start_process(RANK, shared_recording, 100, 0.0, 1 << 20)
    assert read_answer(rank) == "0"
    finish_process(rank)
    finish_process(sampler)
    assert read_numbers(shared_recording) == list(range(100))


def test_damaged_rings_are_left_alone(shared_recording: Path) -> None:
    collector = RingCollector(str(shared_recording), Report(print, print))
    memory = Path(find_memory(shared_recording))
    for name, content in (("a", b""), ("b", b"x" * 100_000), ("c", np.random.default_rng(1).bytes(1 << 20))):
        (memory / f"{name}.ring").write_bytes(content)
    collector.start()
    time.sleep(0.3)
    assert collector.is_alive()
    collector.finish(5)
    with pytest.raises((OSError, ValueError)):
        Ring.open(str(memory / "a.ring"))


def test_memory_of_a_deleted_recording_is_released(shared_recording: Path, start_process: Any) -> None:
    sampler = start_sampler(start_process, shared_recording)
    rank = start_process(RANK, shared_recording, 100, 0.0, 1 << 20)
    read_answer(rank)
    memory = find_memory(shared_recording)
    wait_for(lambda: list(shared_recording.glob("probe-*.rec")))
    for path in shared_recording.iterdir():
        path.unlink()
    shared_recording.rmdir()
    finish_process(rank)
    finish_process(sampler)
    assert not os.path.exists(memory)


def test_a_full_disk_makes_records_late(shared_recording: Path, start_process: Any) -> None:
    sampler = start_sampler(start_process, shared_recording)
    unlimited = resource.prlimit(sampler.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(sampler.pid, resource.RLIMIT_FSIZE, (10_001, unlimited[1]))
    rank = start_process(RANK, shared_recording, 3000, 0.0, 1 << 20)
    assert read_answer(rank) == "0"
    assert read_answer(sampler) == "error records those of rank 0 wait in memory: File too large"
    assert len(read_numbers(shared_recording)) < 1000
    resource.prlimit(sampler.pid, resource.RLIMIT_FSIZE, unlimited)
    finish_process(rank)
    finish_process(sampler)
    assert read_numbers(shared_recording) == list(range(3000))
    assert read_events(shared_recording) == list(range(0, 3000, 100))
