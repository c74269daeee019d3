"""The job's cgroup: memory usage and limit, OOM kills, usable cores."""

from __future__ import annotations

import os
import posixpath
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.recording.tables import UNKNOWN

# Version 1 says "no limit" with a number near 2^63.
_NO_LIMIT = 1 << 62


class FileNames(NamedTuple):
    """File names of a cgroup version."""

    used: str
    limit: str
    kills: str


_V1 = FileNames("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control")
_V2 = FileNames("memory.current", "memory.max", "memory.events")


class GroupMemory(NamedTuple):
    """Memory of a cgroup in bytes; -1 if there is no cgroup or no limit."""

    used_bytes: int
    limit_bytes: int


class ControlGroup:
    """The cgroup that a process was in when this object was created."""

    def __init__(self, pid: int) -> None:
        path = _find_folder(pid, "memory")
        self._files = _V1 if path is not None else _V2
        self._group = path or _find_folder(pid, "")
        self._tightest_group = self._group and self._find_tightest(self._group)

    def _find_tightest(self, leaf: str) -> str:
        """Return the group with the lowest limit among ``leaf`` and its ancestors: the limit that takes effect."""
        groups = [leaf]
        while os.path.exists(posixpath.join(posixpath.dirname(groups[-1]), self._files.limit)):
            groups.append(posixpath.dirname(groups[-1]))
        return min(groups, key=self._read_limit)

    def _read_limit(self, group: str) -> int:
        value = procfs.read_file(posixpath.join(group, self._files.limit), 100).strip()
        return min(int(value), _NO_LIMIT) if value.isdigit() else _NO_LIMIT

    def read_memory(self) -> GroupMemory:
        """Return the current usage and limit of the group with the lowest limit."""
        if not self._tightest_group:
            return GroupMemory(UNKNOWN, UNKNOWN)
        used = procfs.read_file(posixpath.join(self._tightest_group, self._files.used), 100).strip()
        limit = self._read_limit(self._tightest_group)
        return GroupMemory(int(used) if used.isdigit() else UNKNOWN, UNKNOWN if limit >= _NO_LIMIT else limit)

    def count_oom_kills(self) -> int:
        """Return how many processes of this group the OOM killer has ended; -1 if unknown."""
        if not self._group:
            return UNKNOWN
        for line in procfs.read_file(posixpath.join(self._group, self._files.kills)).splitlines():
            name, _, value = line.partition(b" ")
            if name == b"oom_kill":
                return int(value)
        return UNKNOWN


def _find_folder(pid: int, controller: str) -> str | None:
    """Return the cgroup folder of ``pid`` for a controller of version 1, or for version 2 if ``controller`` is empty."""
    for line in os.fsdecode(procfs.read_file(f"/proc/{pid}/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return _find_mounted(controller, path)
    return None


def _find_mounted(controller: str, path: str) -> str | None:
    """Return the folder of a group's files. In a container the mount shows only the tree below ``root``."""
    for line in os.fsdecode(procfs.read_file("/proc/self/mountinfo", 1 << 20)).splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        fields = left.split()
        if len(fields) < 5 or not options.split():  # truncated: only a part of the table was read
            continue
        root, mount = fields[3:5]
        if kind != ("cgroup" if controller else "cgroup2"):
            continue
        if controller and controller not in options.split()[-1].split(","):
            continue
        inside = posixpath.relpath(path, root) if path.startswith(root) else "."
        folder = posixpath.normpath(posixpath.join(mount, inside))
        return folder if os.path.isdir(folder) else mount
    return None


def count_system_oom_kills() -> int:
    """Return how many processes the OOM killer has ended on this machine; -1 if the kernel does not count them."""
    for line in procfs.read_file("/proc/vmstat").splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill":
            return int(value)
    return UNKNOWN


def count_usable_cores() -> int:
    """Return how many cores this process and its children may use, by affinity and by the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _read_core_quota()
    return max(1, min(cores, quota)) if quota else cores


def _read_core_quota() -> int | None:
    """Return the CPU quota in whole cores, rounded up; None without one."""
    path = _find_folder(os.getpid(), "cpu")
    if path is not None:
        files = [procfs.read_file(posixpath.join(path, f"cpu.cfs_{name}_us"), 100) for name in ("quota", "period")]
        fields = [field for file in files for field in file.split()]
    else:
        fields = procfs.read_file(posixpath.join(_find_folder(os.getpid(), "") or "", "cpu.max"), 100).split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields):  # "max", -1, or no such file
        return None
    return -(-int(fields[0]) // int(fields[1]))
