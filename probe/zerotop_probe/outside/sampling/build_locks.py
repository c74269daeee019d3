"""Locks of operator builds: DeepSpeed compiles under one, and waits without end for one that nobody holds any more."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import Process

# File systems that another machine may be building on, and after how long no build can still be going on there.
_SHARED_FILESYSTEMS = ("nfs", "lustre", "ceph", "cifs", "smb", "gpfs", "beegfs", "afs", "9p", "fuse")
_LONGEST_BUILD_S = 1800.0

CHECK_PERIOD_S = 10.0  # between two looks at what a job may be waiting for
# Of a core: whoever waits for a lock sleeps, and who loads a model or makes an engine does not.
_IDLE_SHARE = 0.05
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def find_extensions_folder(environment: Mapping[str, str]) -> Path:
    """Where torch builds extensions: ``TORCH_EXTENSIONS_DIR``, or a folder in the user's cache."""
    chosen = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    return Path(chosen or Path(cache) / "torch_extensions")


def find_stale_locks(folder: Path) -> list[Path]:
    """The locks in ``folder`` whose builds were killed.

    Whoever builds keeps the lock's file open (torch.utils.file_baton). A build on another machine, which is not seen from
    here, is taken for dead after half an hour.
    """
    locks = {lock: facts for lock in folder.glob("**/lock") if (facts := _stat_path(lock))}
    held = _find_open_files() if locks else set()
    return [
        lock
        for lock, facts in locks.items()
        if (facts.st_dev, facts.st_ino) not in held
        and (not _is_shared(facts.st_dev) or time.time() - facts.st_mtime > _LONGEST_BUILD_S)
    ]


def remove_stale_locks(folder: Path) -> list[Path]:
    """Removes them, so that the next build begins anew; returns those that are gone."""
    removed = []
    for lock in find_stale_locks(folder):
        with suppress(OSError):
            lock.unlink()
            removed.append(lock)
    return removed


class LockWatcher:
    """Notices a job that sleeps while a lock lies there that nobody holds. That it waits for this one cannot be seen."""

    def __init__(self) -> None:
        self._checked_s = 0.0
        self._cpu_ticks: dict[Process, int] = {}
        self._stale_locks: list[Path] = []
        self._reported_locks: set[Path] = set()

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to look; ``now_s`` is of ``time.monotonic``."""
        return now_s >= self._checked_s + CHECK_PERIOD_S

    def find_blocking_locks(self, ranks: Sequence[Process], now_s: float) -> list[Path]:
        """The locks that lay there at the look before too, while one of these processes slept; each once.

        ``ranks``: of this node; none while one of them compiles.
        """
        begun_s, before = self._checked_s, self._cpu_ticks
        self._checked_s = now_s
        self._cpu_ticks = {rank: facts.cpu_ticks for rank in ranks if (facts := procfs.read_stat(rank.pid)) is not None}
        few = _IDLE_SHARE * _TICKS_PER_S * (now_s - begun_s)
        slept = [rank for rank, ticks in self._cpu_ticks.items() if rank in before and ticks - before[rank] < few]
        known, self._stale_locks = self._stale_locks, []
        if slept:  # only then: the folder may lie on another machine, which answers late
            with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
                self._stale_locks = find_stale_locks(find_extensions_folder(procfs.read_environment(slept[0].pid)))
        found = [lock for lock in self._stale_locks if lock in known and lock not in self._reported_locks]
        self._reported_locks.update(found)
        return found


def _stat_path(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _find_open_files() -> set[tuple[int, int]]:
    """What this user's processes on this machine have open, by device and inode."""
    return {(facts.st_dev, facts.st_ino) for path in _iter_descriptors() if (facts := _stat_path(path))}


def _iter_descriptors() -> Iterator[str]:
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # gone, or somebody else's
            for number in os.listdir(f"/proc/{process}/fd"):
                yield f"/proc/{process}/fd/{number}"


def _is_shared(device: int) -> bool:
    """Whether other machines may have mounted this device too."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            if number in left.split()[2:3]:
                return right.startswith(_SHARED_FILESYSTEMS)
    return False
