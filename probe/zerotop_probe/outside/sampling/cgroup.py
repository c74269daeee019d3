"""The job's cgroup: memory usage and limit, OOM kills, usable cores."""

from __future__ import annotations

import os
import posixpath
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.recording.tables import UNKNOWN

# Version 1 says "no limit" with a number near 2^63.
_NO_LIMIT = 1 << 62


# Reads between two of the statistics, which the kernel has to sum up.
_READS_PER_STATISTICS = 2


class FileNames(NamedTuple):
    """File names of a cgroup version."""

    used: str
    limit: str
    kills: str
    swap_used: str  # in version 1 memory and swap together
    swap_limit: str
    cache: frozenset[bytes]  # lines of memory.stat: the pages that the kernel drops when memory is short


_V1 = FileNames(
    *("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control"),
    *("memory.memsw.usage_in_bytes", "memory.memsw.limit_in_bytes"),
    frozenset((b"total_active_file", b"total_inactive_file")),
)
_V2 = FileNames(
    *("memory.current", "memory.max", "memory.events", "memory.swap.current", "memory.swap.max"),
    frozenset((b"active_file", b"inactive_file", b"slab_reclaimable")),
)


class GroupMemory(NamedTuple):
    """Memory of a cgroup in bytes; -1 if there is no cgroup or no limit."""

    used_bytes: int
    limit_bytes: int
    cache_bytes: int = UNKNOWN
    """The part of ``used_bytes`` that the kernel drops when memory is short: pages of files."""
    swap_left_bytes: int = UNKNOWN
    """Swap that the limits of this group and of those above still allow; -1 for any."""


class ControlGroup:
    """The cgroup of a process, and after :meth:`follow` that of another one, or the one that it has moved to."""

    def __init__(self, pid: int) -> None:
        self._kills, self._kills_before = UNKNOWN, 0  # as last read, and of the groups before
        self._locate(pid)

    def _locate(self, pid: int) -> None:
        self._membership = procfs.read_file(f"/proc/{pid}/cgroup")
        path = find_folder(pid, "memory")
        self._files = _V1 if path is not None else _V2
        self._group = path or find_folder(pid, "")
        self._groups = self._list_groups(self._group) if self._group else []
        self._cache: dict[str, int] = {}
        self._swap_left_bytes = UNKNOWN
        self._reads = 0

    def follow(self, pid: int) -> None:
        """Look at the group that this process is in now: a launcher may have moved the job to one of its own."""
        membership = procfs.read_file(f"/proc/{pid}/cgroup")
        if not membership or membership == self._membership:
            return
        kills = self.count_oom_kills()
        self._locate(pid)
        self._kills, self._kills_before = UNKNOWN, 0
        self._kills_before = max(0, kills) - max(0, self.count_oom_kills())

    def _list_groups(self, leaf: str) -> list[str]:
        """Return ``leaf`` and its ancestors."""
        groups = [leaf]
        while os.path.exists(posixpath.join(posixpath.dirname(groups[-1]), self._files.limit)):
            groups.append(posixpath.dirname(groups[-1]))
        return groups

    def _read_number(self, group: str, name: str) -> int | None:
        value = procfs.read_file(posixpath.join(group, name), 100).strip()
        return int(value) if value.isdigit() and int(value) < _NO_LIMIT else None

    def _read_cache(self, group: str) -> int:
        lines = (line.split() for line in procfs.read_file(posixpath.join(group, "memory.stat")).splitlines())
        sizes = [int(line[1]) for line in lines if len(line) == 2 and line[0] in self._files.cache]
        return sum(sizes) if sizes else UNKNOWN

    def read_memory(self) -> GroupMemory:
        """Return the memory of the group, of this one and those above, whose limit is reached first."""
        if not self._group:
            return GroupMemory(UNKNOWN, UNKNOWN)
        limits = [(one, limit) for one in self._groups if (limit := self._read_number(one, self._files.limit)) is not None]
        if not limits:
            used = self._read_number(self._group, self._files.used)
            return GroupMemory(UNKNOWN if used is None else used, UNKNOWN)
        if self._reads % _READS_PER_STATISTICS == 0:
            self._cache = {group: self._read_cache(group) for group, _ in limits}
            self._swap_left_bytes = self._measure_swap_left()
        self._reads += 1
        groups = [
            GroupMemory(UNKNOWN if used is None else used, limit, self._cache.get(group, UNKNOWN), self._swap_left_bytes)
            for group, limit in limits
            for used in (self._read_number(group, self._files.used),)
        ]
        return min(groups, key=lambda one: one.limit_bytes - one.used_bytes + max(0, one.cache_bytes))

    def _measure_swap_left(self) -> int:
        """Return the least swap that a group still allows."""
        left = []
        for group in self._groups:
            used = self._read_number(group, self._files.swap_used)
            limit = self._read_number(group, self._files.swap_limit)
            if used is None or limit is None:
                continue
            if self._files is _V1:
                memory = self._read_number(group, self._files.used), self._read_number(group, self._files.limit)
                used, limit = used - (memory[0] or 0), limit - (memory[1] or limit)
            left.append(max(0, limit - used))
        return min(left, default=UNKNOWN)

    def count_oom_kills(self) -> int:
        """Return how many processes of this group the OOM killer has ended; -1 if unknown.

        A group is removed with its last process: the last count stays.
        """
        for line in procfs.read_file(posixpath.join(self._group, self._files.kills)).splitlines() if self._group else ():
            name, _, value = line.partition(b" ")
            if name == b"oom_kill":
                self._kills = int(value) + self._kills_before
        return self._kills


def find_folder(pid: int, controller: str) -> str | None:
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
    path = find_folder(os.getpid(), "cpu")
    if path is not None:
        files = [procfs.read_file(posixpath.join(path, f"cpu.cfs_{name}_us"), 100) for name in ("quota", "period")]
        fields = [field for file in files for field in file.split()]
    else:
        fields = procfs.read_file(posixpath.join(find_folder(os.getpid(), "") or "", "cpu.max"), 100).split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields):  # "max", -1, or no such file
        return None
    return -(-int(fields[0]) // int(fields[1]))
