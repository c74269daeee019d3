"""Reading /proc: one process, all processes, who is whose child. Nothing raises when a process is gone."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """What is used of ``/proc/PID/stat`` (or of a thread's)."""

    name: bytes  # at most 15 bytes, the kernel's name
    state: str  # "Z" and "X" are dead
    parent: int
    group: int
    cpu_ticks: int
    start: int
    processor: int

    @property
    def is_dead(self) -> bool:
        """Ended, perhaps not yet waited for by its parent."""
        return self.state in "ZX"


def read_file(path: str, limit: int = 1 << 16) -> bytes:
    """The first bytes of a file; empty if it cannot be read, or is a pipe that nobody writes to."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(descriptor, limit)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def parse_stat(text: bytes) -> ProcessStat | None:
    """Takes a stat line apart; None if it is torn or empty."""
    # The name may hold spaces and parentheses, so fields are counted from the last parenthesis.
    before, _, after = text.rpartition(b")")
    fields = after.split()
    if len(fields) < 37:
        return None
    return ProcessStat(
        name=before.partition(b"(")[2],
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start=int(fields[19]),
        processor=int(fields[36]),
    )


def read_stat(pid: int) -> ProcessStat | None:
    """A process's stat; None if it is gone."""
    return parse_stat(read_file(f"/proc/{pid}/stat", 4096))


def read_command_line(pid: int) -> list[str]:
    """A process's arguments; empty if it is gone, a zombie or a kernel thread."""
    text = read_file(f"/proc/{pid}/cmdline")
    return [os.fsdecode(argument) for argument in text.split(b"\0")[:-1]]


def read_environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty if it is gone or somebody else's."""
    pairs = (entry.partition(b"=") for entry in read_file(f"/proc/{pid}/environ", 1 << 20).split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in pairs if equals}


def list_pids() -> list[int]:
    """All processes that this pid namespace shows."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


class Process(NamedTuple):
    """A process, named for good: a pid alone is reused after its process has ended."""

    pid: int
    start: int  # clock ticks since boot

    @classmethod
    def from_pid(cls, pid: int) -> Process | None:
        """The process that has this pid now; None if there is none or it has ended."""
        facts = read_stat(pid)
        return None if facts is None or facts.is_dead else cls(pid, facts.start)

    def is_alive(self) -> bool:
        """Whether it still runs. A zombie does not."""
        return Process.from_pid(self.pid) == self

    def send_signal(self, number: int) -> bool:
        """Sends a signal to exactly this process; False if it is gone. Raises PermissionError."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except OSError:  # a kernel without pidfds: the check and the signal cannot be made one
            return self._send_by_pid(number)
        try:
            # Checked while the descriptor holds the process: the pid cannot be reused in between.
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(descriptor, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)

    def _send_by_pid(self, number: int) -> bool:
        if not self.is_alive():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


class ProcessTree:
    """Who is whose child, for all processes. Cheap to refresh: only processes not seen before are read."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def refresh(self, *, fully: bool = False) -> None:
        """Looks at /proc again. A parent that ended is noticed only when ``fully``."""
        known = {} if fully else self._parents
        fresh: dict[int, int] = {}
        for pid in list_pids():
            parent = known.get(pid)
            if parent is None:
                facts = read_stat(pid)
                parent = facts.parent if facts is not None else -1
            fresh[pid] = parent
        self._parents = fresh

    def find_children(self) -> dict[int, list[int]]:
        """The children of every process that has some."""
        result: dict[int, list[int]] = {}
        for pid, parent in self._parents.items():
            result.setdefault(parent, []).append(pid)
        return result


def find_family(pid: int) -> list[int]:
    """A process and all its descendants, parents before children."""
    table = ProcessTree()
    table.refresh()
    children = table.find_children()
    found = [pid]
    for member in found:
        found.extend(children.get(member, ()))
    return found
