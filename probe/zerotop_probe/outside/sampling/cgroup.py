"""The control group of the job: memory in use, its limit, processes killed for it, usable cores."""

from __future__ import annotations

import os
import posixpath
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.recording.tables import UNKNOWN

# Version 1 says "no limit" with a number near 2^63.
_NO_LIMIT = 1 << 62


class FileNames(NamedTuple):
    """Where a version of control groups keeps its figures."""

    used: str
    limit: str
    kills: str


_V1 = FileNames("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control")
_V2 = FileNames("memory.current", "memory.max", "memory.events")


class GroupMemory(NamedTuple):
    """In bytes; -1 where there is no group, or no limit."""

    used_bytes: int
    limit_bytes: int


class ControlGroup:
    """The control group that a process was in when this was made."""

    def __init__(self, pid: int) -> None:
        path = _find_folder(pid, "memory")
        self._files = _V1 if path is not None else _V2
        self._group = path or _find_folder(pid, "")
        self._tightest_group = self._group and self._find_tightest(self._group)

    def _find_tightest(self, leaf: str) -> str:
        """The group with the lowest limit, of this one and those above it: that is where memory will end."""
        groups = [leaf]
        while os.path.exists(posixpath.join(posixpath.dirname(groups[-1]), self._files.limit)):
            groups.append(posixpath.dirname(groups[-1]))
        return min(groups, key=self._read_limit)

    def _read_limit(self, group: str) -> int:
        value = procfs.read_file(posixpath.join(group, self._files.limit), 100).strip()
        return min(int(value), _NO_LIMIT) if value.isdigit() else _NO_LIMIT

    def read_memory(self) -> GroupMemory:
        """Memory now in use by, and the limit of, the group whose limit is the lowest."""
        if not self._tightest_group:
            return GroupMemory(UNKNOWN, UNKNOWN)
        used = procfs.read_file(posixpath.join(self._tightest_group, self._files.used), 100).strip()
        limit = self._read_limit(self._tightest_group)
        return GroupMemory(int(used) if used.isdigit() else UNKNOWN, UNKNOWN if limit >= _NO_LIMIT else limit)

    def count_oom_kills(self) -> int:
        """Processes of this group killed so far because memory had run out; -1 where nobody counts."""
        if not self._group:
            return UNKNOWN
        for line in procfs.read_file(posixpath.join(self._group, self._files.kills)).splitlines():
            name, _, value = line.partition(b" ")
            if name == b"oom_kill":
                return int(value)
        return UNKNOWN


def _find_folder(pid: int, controller: str) -> str | None:
    """The folder of the group of ``pid`` for a controller of version 1; for version 2 if it is empty."""
    for line in os.fsdecode(procfs.read_file(f"/proc/{pid}/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return _find_mounted(controller, path)
    return None


def _find_mounted(controller: str, path: str) -> str | None:
    """Where a group's files lie. In a container the mount shows only the tree from ``root`` down."""
    for line in os.fsdecode(procfs.read_file("/proc/self/mountinfo", 1 << 20)).splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        fields = left.split()
        if len(fields) < 5 or not options.split():  # torn: there are more mounts than are read
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
    """Processes that the kernel killed for memory on the whole machine so far; -1 where it does not say."""
    for line in procfs.read_file("/proc/vmstat").splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill":
            return int(value)
    return UNKNOWN


def count_usable_cores() -> int:
    """Cores that this process and its children may use: by affinity, and by a container's processor quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _read_core_quota()
    return max(1, min(cores, quota)) if quota else cores


def _read_core_quota() -> int | None:
    """The quota in whole cores, rounded up; None without one."""
    path = _find_folder(os.getpid(), "cpu")
    if path is not None:
        files = [procfs.read_file(posixpath.join(path, f"cpu.cfs_{name}_us"), 100) for name in ("quota", "period")]
        fields = [field for file in files for field in file.split()]
    else:
        fields = procfs.read_file(posixpath.join(_find_folder(os.getpid(), "") or "", "cpu.max"), 100).split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields):  # "max", -1, or no such file
        return None
    return -(-int(fields[0]) // int(fields[1]))
