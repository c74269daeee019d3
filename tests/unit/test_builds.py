"""Ranks that may wait for a build of operators that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agents import build_python_command, wait_for
from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling.ranks import build_locks
from zerotop_probe.outside.sampling.ranks.build_locks import CHECK_PERIOD_S, LockWatcher
from zerotop_probe.outside.sampling.ranks.rank_discovery import RankFinder
from zerotop_probe.recording import events
from zerotop_probe.recording.writer import EventWriter, Identity

SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
# Takes the lock as torch.utils.file_baton does.
HOLD = "import os; os.open(os.environ['TORCH_EXTENSIONS_DIR'] + '/cpu_adam/lock', os.O_CREAT); " + SLEEP
# A compiler with the arguments that PyTorch's builder gives it.
COMPILE = (
    "import os, subprocess; subprocess.Popen([os.environ['TORCH_EXTENSIONS_DIR'] + '/cc1plus', '-S', '-c',"
    " 'import time; time.sleep(600)', '-D', 'TORCH_EXTENSION_NAME=cpu_adam']); "
) + SLEEP

Start = Callable[[str], ProcessHandle]


@pytest.fixture
def lock_file(tmp_path: Path) -> Path:
    """That of a build in the folder where the ranks' torch builds."""
    path = tmp_path / "builds" / "cpu_adam" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    (tmp_path / "builds" / "cc1plus").symlink_to(Path(sys.executable).resolve())
    return path


@pytest.fixture
def start_rank(tmp_path: Path) -> Iterator[Start]:
    """Starts rank 0, with a program; it and what it starts are killed afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def launch_program(code: str) -> ProcessHandle:
        environment = {**os.environ, "RANK": "0", "TORCH_EXTENSIONS_DIR": str(tmp_path / "builds")}
        started.append(
            subprocess.Popen(build_python_command(code), env=environment, stdout=subprocess.PIPE, start_new_session=True)
        )
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == b"ready\n"
        process = ProcessHandle.from_pid(started[-1].pid)
        assert process is not None
        return process

    yield launch_program
    for process in started:
        os.killpg(process.pid, 9)
        process.communicate()


class Looks:
    """Looks as a sampler does, without its pauses."""

    def __init__(self, folder: Path, root: ProcessHandle) -> None:
        self.events: list[dict[str, Any]] = []
        self._writer = EventWriter(str(folder), Identity.for_this_process("node"))
        self._ranks = RankFinder(str(folder), root, self._writer)
        self._writer.write = self._note  # type: ignore[method-assign]

    def _note(self, time_ns: int, event: type[events.Event] | str, **facts: Any) -> None:
        self.events.append({"event": event, **facts})

    def look_again(self, kind: type[events.Event]) -> list[dict[str, Any]]:
        self._ranks.update_ranks(now=True)
        return [event for event in self.events if event["event"] is kind]

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
def make_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ProcessHandle], Looks]]:
    made: list[Looks] = []

    def make_look(root: ProcessHandle) -> Looks:
        made.append(Looks(tmp_path, root))
        return made[-1]

    monkeypatch.setattr(build_locks, "CHECK_PERIOD_S", 0.0)
    yield make_look
    for each in made:
        each.close()


def test_a_rank_that_sleeps_beside_a_lock_that_nobody_holds(
    lock_file: Path, start_rank: Start, make_looks: Callable[[ProcessHandle], Looks]
) -> None:
    seen = make_looks(start_rank(SLEEP))
    (found,) = wait_for(lambda: seen.look_again(events.BuildLocked))
    assert found["path"] == str(lock_file)
    assert [len(seen.look_again(events.BuildLocked)) for _ in range(3)] == [1, 1, 1]


def test_no_lock_is_reported_while_something_is_compiled(
    lock_file: Path, start_rank: Start, make_looks: Callable[[ProcessHandle], Looks]
) -> None:
    seen = make_looks(start_rank(COMPILE))

    def list_extensions() -> list[str]:
        return [event["extension"] for event in seen.look_again(events.Compiling)]

    # A compiler that is only starting may have no arguments yet, and so no name: it is named at a later look.
    wait_for(lambda: "cpu_adam" in list_extensions())
    assert [len(seen.look_again(events.BuildLocked)) for _ in range(4)] == [0, 0, 0, 0]
    assert list_extensions().count("cpu_adam") == 1
    assert set(list_extensions()) <= {"", "cpu_adam"}


def test_a_lock_that_is_held_keeps_others_waiting_for_a_reason(lock_file: Path, start_rank: Start) -> None:
    rank, locks = start_rank(HOLD), LockWatcher()
    assert [locks.find_blocking_locks([rank], look * CHECK_PERIOD_S) for look in range(1, 4)] == [[], [], []]


def test_who_works_does_not_wait(lock_file: Path, start_rank: Start) -> None:
    rank, locks = start_rank("print('ready', flush=True)\nwhile True: pass"), LockWatcher()

    def read_ticks() -> int:
        facts = procfs.read_stat(rank.pid)
        assert facts is not None
        return facts.cpu_ticks

    for look in range(1, 4):
        before = read_ticks()
        assert locks.find_blocking_locks([rank], look * 1.0) == []
        wait_for(partial(lambda before: read_ticks() > before + 10, before))


def test_it_is_reported_when_it_was_there_before_too(lock_file: Path, start_rank: Start) -> None:
    rank, locks = start_rank(SLEEP), LockWatcher()
    assert not locks.is_due(CHECK_PERIOD_S - 1)
    assert locks.find_blocking_locks([rank], CHECK_PERIOD_S) == []
    assert locks.find_blocking_locks([rank], 2 * CHECK_PERIOD_S) == []
    lock_file.unlink()
    assert locks.find_blocking_locks([rank], 3 * CHECK_PERIOD_S) == []
    lock_file.touch()
    assert locks.find_blocking_locks([rank], 4 * CHECK_PERIOD_S) == []
    assert locks.find_blocking_locks([], 5 * CHECK_PERIOD_S) == []
    assert locks.find_blocking_locks([rank], 6 * CHECK_PERIOD_S) == []
    assert locks.find_blocking_locks([rank], 7 * CHECK_PERIOD_S) == []
    assert locks.find_blocking_locks([rank], 8 * CHECK_PERIOD_S) == [lock_file]
    assert locks.find_blocking_locks([rank], 9 * CHECK_PERIOD_S) == []
    assert not locks.is_due(10 * CHECK_PERIOD_S - 1)
    assert locks.is_due(10 * CHECK_PERIOD_S)


def test_the_folder_is_not_touched_while_all_work(start_rank: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        build_locks, "find_stale_locks", lambda folder: pytest.fail("it may lie on a machine that does not answer")
    )
    monkeypatch.setattr(build_locks, "_IDLE_SHARE", 0.0)
    rank, locks = start_rank(SLEEP), LockWatcher()
    assert [locks.find_blocking_locks([rank], look * CHECK_PERIOD_S) for look in range(1, 4)] == [[], [], []]


def test_a_folder_that_cannot_be_read_holds_none(start_rank: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_stale(folder: Path) -> list[Path]:
        raise OSError("stale handle")

    monkeypatch.setattr(build_locks, "find_stale_locks", raise_stale)
    rank, locks = start_rank(SLEEP), LockWatcher()
    assert [locks.find_blocking_locks([rank], look * CHECK_PERIOD_S) for look in range(1, 4)] == [[], [], []]
