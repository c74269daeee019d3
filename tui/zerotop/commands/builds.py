"""Locks of operator builds: DeepSpeed compiles under one, and waits without end for one that nobody holds any more."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

# File systems that another machine may be building on, and after how long no build can still be going on there.
_SHARED = ("nfs", "lustre", "ceph", "cifs", "smb", "gpfs", "beegfs", "afs", "9p", "fuse")
_LONGEST_BUILD_S = 1800.0


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """Where torch builds extensions: ``TORCH_EXTENSIONS_DIR``, or a folder in the user's cache."""
    chosen = environment.get("TORCH_EXTENSIONS_DIR")
    return Path(chosen or Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions")


def stale_locks(folder: Path) -> list[Path]:
    """The locks in ``folder`` whose builds were killed.

    Whoever builds keeps the lock's file open (torch.utils.file_baton). A build on another machine, which is not seen from
    here, is taken for dead after half an hour.
    """
    locks = {lock: facts for lock in folder.glob("**/lock") if (facts := _stat(lock))}
    held = _open_files() if locks else set()
    return [
        lock
        for lock, facts in locks.items()
        if (facts.st_dev, facts.st_ino) not in held
        and (not _is_shared(facts.st_dev) or time.time() - facts.st_mtime > _LONGEST_BUILD_S)
    ]


def remove_stale_locks(folder: Path) -> list[Path]:
    """Removes them, so that the next build begins anew; returns those that are gone."""
    removed = []
    for lock in stale_locks(folder):
        with suppress(OSError):
            lock.unlink()
            removed.append(lock)
    return removed


def _stat(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _open_files() -> set[tuple[int, int]]:
    """What this user's processes on this machine have open, by device and inode."""
    return {(facts.st_dev, facts.st_ino) for path in _descriptors() if (facts := _stat(path))}


def _descriptors() -> Iterator[str]:
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
                return right.startswith(_SHARED)
    return False
