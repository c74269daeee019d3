"""Stale lock files of operator builds. DeepSpeed compiles under a lock and waits forever for one left by a killed build."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import ProcessHandle

# Filesystems on which another machine may be building, and the age after which a lock there is considered stale.
_SHARED_FILESYSTEMS = ("nfs", "lustre", "ceph", "cifs", "smb", "gpfs", "beegfs", "afs", "9p", "fuse")
_LONGEST_BUILD_S = 1800.0

# In TORCH_EXTENSIONS_DIR, and in the user's cache, where torch has a folder for each version of Python and device.
_LOCKS = ("*/lock", "py*/*/lock")

CHECK_PERIOD_S = 10.0
# Of a core: a process that waits for a lock uses less, one that loads a model or creates an engine uses more.
_IDLE_SHARE = 0.05


def find_extensions_folder(environment: Mapping[str, str]) -> Path:
    """Return where torch builds extensions: ``TORCH_EXTENSIONS_DIR``, or a folder in the user's cache."""
    chosen = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    return Path(chosen or Path(cache) / "torch_extensions")


def find_stale_locks(folder: Path) -> list[Path]:
    """Return the locks in ``folder`` whose builds were killed.

    A build keeps its lock file open (torch.utils.file_baton). A build on another machine cannot be seen from here, and
    counts as dead after half an hour.
    """
    paths = (lock for pattern in _LOCKS for lock in folder.glob(pattern))
    locks = {lock: status for lock in paths if (status := _stat_path(lock))}
    held = _find_open_files() if locks else set()
    return [
        lock
        for lock, status in locks.items()
        if (status.st_dev, status.st_ino) not in held
        and (not _is_shared(status.st_dev) or time.time() - status.st_mtime > _LONGEST_BUILD_S)
    ]


def remove_stale_locks(folder: Path) -> list[Path]:
    """Remove stale locks so that the next build starts over; return those that were removed."""
    removed = []
    for lock in find_stale_locks(folder):
        with suppress(OSError):
            lock.unlink()
            removed.append(lock)
    return removed


class LockWatcher:
    """Notices a job that sleeps while there is a stale lock. Whether it waits for this lock cannot be seen."""

    def __init__(self) -> None:
        self._checked_s = 0.0
        self._cpu_ticks: dict[ProcessHandle, int] = {}
        self._stale_locks: list[Path] = []
        self._reported_locks: set[Path] = set()

    def is_due(self, now_s: float) -> bool:
        """Whether the next check is due; ``now_s`` is ``time.monotonic()``."""
        return now_s >= self._checked_s + CHECK_PERIOD_S

    def find_blocking_locks(self, ranks: Sequence[ProcessHandle], now_s: float) -> list[Path]:
        """Return locks that were stale at the previous check too, while one of these ranks slept; each lock once.

        ``ranks``: those of this node; pass none while one of them compiles.
        """
        begin_s, before = self._checked_s, self._cpu_ticks
        self._checked_s = now_s
        self._cpu_ticks = {rank: stat.cpu_ticks for rank in ranks if (stat := procfs.read_stat(rank.pid)) is not None}
        idle_ticks = _IDLE_SHARE * procfs.TICKS_PER_S * (now_s - begin_s)
        asleep = [rank for rank, ticks in self._cpu_ticks.items() if rank in before and ticks - before[rank] < idle_ticks]
        previous, self._stale_locks = self._stale_locks, []
        if asleep:  # not otherwise: the folder may be on a slow network filesystem
            with suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
                self._stale_locks = find_stale_locks(find_extensions_folder(procfs.read_environment(asleep[0].pid)))
        blocking = [lock for lock in self._stale_locks if lock in previous and lock not in self._reported_locks]
        self._reported_locks.update(blocking)
        return blocking


def _stat_path(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _find_open_files() -> set[tuple[int, int]]:
    """Return the device and inode of every open file whose process this user may inspect.

    psutil's ``open_files`` compares paths and omits those that do not exist here, such as those of a build in a container.
    """
    return {(status.st_dev, status.st_ino) for path in glob.iglob("/proc/[0-9]*/fd/*") if (status := _stat_path(path))}


def _is_shared(device: int) -> bool:
    """Whether other machines may have mounted this device too."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            if number in left.split()[2:3]:
                return right.startswith(_SHARED_FILESYSTEMS)
    return False
