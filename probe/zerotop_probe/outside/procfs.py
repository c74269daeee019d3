"""Reading /proc cheaply, for the samplers, and identifying processes. Nothing raises when a process has ended.

psutil needs 30 to 80 us for an attribute of a process, the readers here 6 to 14. Where /proc is mounted with ``hidepid=1``
psutil's ``children`` and ``parents`` raise AccessDenied. So it is used for searches only, see :func:`iter_processes`.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

from zerotop_probe.outside.causes import has_proc

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
"""Ticks in a second, of CPU times and starts of processes."""

_LONGEST_PROGRAM = 60
_PAGE_BYTES = 4096


class ProcessStat(NamedTuple):
    """The fields of ``/proc/PID/stat`` (or of a thread's) that are used."""

    name: bytes  # at most 15 bytes, the kernel's name
    state: str  # "Z" and "X" are dead
    parent: int
    group: int
    major_faults: int
    cpu_ticks: int
    start: int
    processor: int

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, even if its parent has not waited for it yet."""
        return self.state in "ZX"


def read_file(path: str, limit: int = 1 << 16) -> bytes:
    """Return the first ``limit`` bytes of a file; empty if it cannot be read or is a pipe without a writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    content = b""
    try:
        content = chunk = os.read(descriptor, limit)
        # The kernel gives many files of /proc a page at a time, such as `maps`; most are shorter.
        while chunk and len(content) < limit > _PAGE_BYTES:
            chunk = os.read(descriptor, limit - len(content))
            content += chunk
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return content


def parse_stat(text: bytes) -> ProcessStat | None:
    """Parse a stat line; return None if it is truncated or empty."""
    # The name may contain spaces and parentheses, so fields are counted from the last parenthesis.
    before, _, after = text.rpartition(b")")
    fields = after.split()
    if len(fields) < 37:
        return None
    return ProcessStat(
        name=before.partition(b"(")[2],
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        major_faults=int(fields[9]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start=int(fields[19]),
        processor=int(fields[36]),
    )


def read_stat(pid: int) -> ProcessStat | None:
    """Return a process's stat; None if it is gone."""
    return parse_stat(read_file(f"/proc/{pid}/stat", 4096))


def read_exit_code(pid: int, start: int) -> int | None:
    """Return the exit code of an ended process whose parent has not waited for it yet, negative for a signal; else None.

    Nor is a code of 0 known: that is also shown of processes of other users. Linux 3.5 and later, see proc_pid_stat(5).
    """
    text = read_file(f"/proc/{pid}/stat", 4096)
    stat, fields = parse_stat(text), text.rpartition(b")")[2].split()
    if stat is None or not stat.is_dead or stat.start != start or len(fields) < 50:
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) or None


def read_command_line(pid: int) -> list[str]:
    """Return a process's arguments; empty if it is gone, a zombie or a kernel thread."""
    text = read_file(f"/proc/{pid}/cmdline")
    return [os.fsdecode(argument) for argument in text.split(b"\0")[:-1]]


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment a process was started with; empty if it is gone or belongs to another user."""
    pairs = (entry.partition(b"=") for entry in read_file(f"/proc/{pid}/environ", 1 << 20).split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in pairs if equals}


def read_owner(pid: int) -> int:
    """Return the user whose process this is (its real user id); -1 if it is gone."""
    for line in read_file(f"/proc/{pid}/status", 4096).split(b"\n"):
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return -1


def read_program(pid: int) -> str:
    """Return the program of a process and its script, without folders and arguments: ``python train.py``; "" if hidden."""
    program, *words = read_command_line(pid) or [""]
    options = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    # After -c comes code, which is private.
    has_code = any(not option.startswith("--") and option.endswith("c") for option in options)
    script = "" if has_code else next(iter(words[len(options) :]), "")
    return " ".join(filter(None, map(os.path.basename, (program, script))))[:_LONGEST_PROGRAM]


def read_user_name(pid: int) -> str:
    """Return the name of a process's owner, or its number if this machine's list lacks it; "" if the process is gone.

    Directories of other machines are not asked: they may not answer for long.
    """
    owner = read_owner(pid)
    users = (line.split(b":") for line in read_file("/etc/passwd", 1 << 20).splitlines())
    names = {fields[2]: fields[0] for fields in users if len(fields) > 2}
    return names.get(b"%d" % owner, b"%d" % owner).decode(errors="replace") if owner >= 0 else ""


def list_ancestors(pid: int) -> list[int]:
    """Return ``pid`` and the pids of its ancestors, nearest first, without pid 1."""
    ancestors: list[int] = []
    while pid > 1 and pid not in ancestors:
        ancestors.append(pid)
        stat = read_stat(pid)
        pid = stat.parent if stat is not None else 0
    return ancestors


def iter_processes(*attributes: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the pid and these psutil attributes of every visible process; None for an attribute that may not be read."""
    import psutil  # here, as starting a job does not need it and it takes 15 ms to import

    for process in psutil.process_iter() if has_proc() else ():
        try:
            # Not process_iter(attributes): its results are stored in objects that all threads share.
            yield process.pid, process.as_dict(attributes)
        except psutil.NoSuchProcess:
            continue


class ProcessHandle(NamedTuple):
    """A process, identified by its pid and start time: a pid alone is reused after its process has ended."""

    pid: int
    start: int  # clock ticks since boot

    @classmethod
    def from_pid(cls, pid: int) -> ProcessHandle | None:
        """Return the living process that has this pid now, or None."""
        stat = read_stat(pid)
        return None if stat is None or stat.is_dead else cls(pid, stat.start)

    def is_alive(self) -> bool:
        """Whether the process still runs. A zombie does not."""
        return ProcessHandle.from_pid(self.pid) == self

    def send_signal(self, number: int) -> bool:
        """Send a signal to exactly this process; return False if it is gone. Raises PermissionError."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except OSError:  # a kernel without pidfds: the check and the signal cannot be one atomic operation
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
    """The parent of every process. Cheap to refresh: only processes that are new since the last refresh are read."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def refresh(self) -> None:
        """List the processes again. A process whose parent has ended keeps that parent."""
        cached, self._parents = self._parents, {}
        try:
            names = os.listdir("/proc")
        except OSError:  # too many open files
            names = []
        for pid in map(int, filter(str.isdigit, names)):
            parent = cached.get(pid)
            if parent is None:
                stat = read_stat(pid)
                parent = stat.parent if stat is not None else -1
            self._parents[pid] = parent

    def iter_parents(self) -> Iterator[tuple[int, int]]:
        """Yield each process and its parent, or the first parent that was seen."""
        return iter(self._parents.items())

    def find_children(self) -> dict[int, list[int]]:
        """Return the children of every process that has some."""
        children: dict[int, list[int]] = {}
        for pid, parent in self._parents.items():
            children.setdefault(parent, []).append(pid)
        return children

    def find_family(self, pid: int) -> list[int]:
        """Return a process and all its descendants, parents before children."""
        children = self.find_children()
        family = [pid]
        for member in family:
            family.extend(children.get(member, ()))
        return family


def find_family(pid: int) -> list[int]:
    """Return the pids of a process and all its descendants, parents before children."""
    tree = ProcessTree()
    tree.refresh()
    return tree.find_family(pid)
