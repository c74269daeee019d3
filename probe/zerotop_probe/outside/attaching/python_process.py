"""Examining a running Python from outside: its version, the addresses of its functions, and why it cannot be entered.

The process is not stopped for this.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import struct
import time
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.outside.attaching.entry_limits import METRICS_ONLY, describe_danger, read_status
from zerotop_probe.outside.attaching.ptrace import elf
from zerotop_probe.outside.attaching.ptrace.aarch64 import Aarch64
from zerotop_probe.outside.attaching.ptrace.arch import Machine
from zerotop_probe.outside.attaching.ptrace.x86_64 import X8664
from zerotop_probe.outside.causes import describe_cause
from zerotop_probe.outside.procfs import ProcessHandle

MIN_VERSION = (3, 9)
SAMPLER_SECONDS = 3.0
# From this version an interpreter can be asked to run a script: PEP 768.
REMOTE_EXEC_VERSION = (3, 14)

_FUNCTIONS = ("Py_AddPendingCall", "PyRun_SimpleString")
_VERSION_SYMBOL = "Py_Version"  # a constant, from 3.11 on
_RUNTIME_SYMBOL = "_PyRuntime"  # begins with a table of offsets, from 3.13 on
# The offset in _PyRuntime of the int behind Py_IsInitialized(): 1 from the creation of __main__ until finalization. Code
# executed before or after that would crash the process.
INITIALIZED_OFFSETS = {
    (3, 9): 12, (3, 10): 12, (3, 11): 16, (3, 12): 16, (3, 13): 600, (3, 14): 776, (3, 15): 904,
}  # fmt: skip
_LINE_PATTERN = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ..(.). ([0-9a-f]+) \S+ \d+\s*(.*)")
_LIBRARY_PATTERN = re.compile(r"libpython3[\d.]*\w?\.so")
# The vDSO, the C library, its loader (all of it in musl), or a program that contains it.
_SYSTEM_PATTERN = re.compile(r"\[vdso\]|libc[.-]|ld[-.]|libpthread|python")
_VERSION_PATTERN = re.compile(r"python(\d)\.(\d+)")
# By platform.machine().
MACHINES: dict[str, Machine] = {machine.name: machine for machine in (X8664(), Aarch64())}

_USE_RUN = "Start the job with zerotop run."


class CannotEnter(Exception):
    """This process cannot be entered; the text is a sentence with the reason and what to do."""


class MemoryRegion(NamedTuple):
    """One line of ``/proc/PID/maps``."""

    begin: int
    end: int
    offset: int
    path: str
    is_executable: bool


class EntryPoints(NamedTuple):
    """Addresses for entering a Python that cannot be asked to run a script."""

    machine: Machine
    add_pending_call: int
    run_string: int
    gate: int  # a system call instruction and a return
    restorer: int  # a call of rt_sigreturn
    stack: range  # the addresses of the main thread's stack
    initialized_flag: int  # an int that is 1 while the interpreter is initialized


class Target(NamedTuple):
    """A process to enter, and how."""

    process: ProcessHandle
    version: tuple[int, int]
    executable: str
    entry_points: EntryPoints | None = None  # None from REMOTE_EXEC_VERSION on
    runtime: int = 0  # the address of _PyRuntime, 0 if it is not exported


def read_mappings(pid: int) -> list[MemoryRegion]:
    """Return the memory map of a process; empty if it is gone or may not be read."""
    try:
        # More than one read: a rank has thousands of lines.
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            matches = [_LINE_PATTERN.match(line) for line in file]
    except OSError:
        return []
    return [
        MemoryRegion(int(match[1], 16), int(match[2], 16), int(match[4], 16), match[5].strip(), match[3] == "x")
        for match in matches
        if match
    ]


def examine_process(process: ProcessHandle) -> Target:
    """Find out how ``process`` can be entered. Raises CannotEnter."""
    _check_traceable(process)
    lines = read_mappings(process.pid)
    executable = _read_executable(process.pid)
    files = _find_interpreters(lines, executable)
    version, addresses, built_for = None, None, ""
    for path in files:
        symbols = _find_symbols(process.pid, path)
        if symbols is None or not all(name in symbols.offsets for name in _FUNCTIONS):
            continue
        base = min(line.begin - line.offset for line in lines if line.path == path) if symbols.movable else 0
        built_for = symbols.machine
        addresses = {name: base + offset for name, offset in symbols.offsets.items()}
        paths = [path, executable, *(line.path for line in lines)]
        version = _read_version(process.pid, addresses) or find_named_version(paths)
        break
    if addresses is None:
        raise CannotEnter(_describe_no_python(process.pid, lines))
    if version is None:
        raise CannotEnter(f"The Python version of process {process.pid} is unknown, so it cannot be entered. {_USE_RUN}")
    if version < MIN_VERSION:
        raise CannotEnter(
            f"Process {process.pid} runs Python {_format_version(version)}, but the probe needs 3.9. {METRICS_ONLY}"
        )
    if version >= REMOTE_EXEC_VERSION:
        return Target(process, version, executable, runtime=addresses.get(_RUNTIME_SYMBOL, 0))
    machine = _choose_machine(process.pid, version, built_for)
    gate, restorer = (
        _find_code(process.pid, machine, codes, lines) for codes in (machine.gate_codes, machine.restorer_codes)
    )
    stack = next((range(line.begin, line.end) for line in lines if line.path == "[stack]"), range(0))
    if _RUNTIME_SYMBOL not in addresses:
        raise CannotEnter(f"The Python of process {process.pid} does not show whether it is initialized. {_USE_RUN}")
    add, run = (addresses[name] for name in _FUNCTIONS)
    entrance = EntryPoints(
        machine, add, run, gate, restorer, stack, addresses[_RUNTIME_SYMBOL] + INITIALIZED_OFFSETS[version]
    )
    return Target(process, version, executable, entrance)


def _check_traceable(process: ProcessHandle) -> None:
    pid = process.pid
    if not process.is_alive():
        raise CannotEnter(f"Process {pid} has ended.")
    status = _await_untraced(pid)
    tracer = _find_tracer(status)
    if tracer:
        stat = procfs.read_stat(tracer)
        name = stat.name.decode(errors="replace") if stat is not None else "?"
        raise CannotEnter(f"Process {pid} is already traced by {name} (process {tracer}). End that program first.")
    if status.get("State", "")[:1] == "T":
        raise CannotEnter(f"Process {pid} is stopped, as by Ctrl-Z. Resume it with kill -CONT {pid}, then try again.")
    if len(status.get("NSpid", "").split()) > len(read_status(os.getpid()).get("NSpid", "").split()):
        raise CannotEnter(f"Process {pid} runs in a container with its own pids and files. Run zerotop inside it.")
    _check_rights(pid, status)


def _await_untraced(pid: int) -> dict[str, str]:
    """Return the status of a process when nothing traces it, at the latest after SAMPLER_SECONDS.

    A sampler of stacks such as py-spy, zerotop's own among them, traces a process for a moment only, but often.
    """
    deadline = time.monotonic() + SAMPLER_SECONDS
    status = read_status(pid)
    while _find_tracer(status) and time.monotonic() < deadline:
        time.sleep(0.002)
        status = read_status(pid)
    return status


def _find_tracer(status: dict[str, str]) -> int:
    return int(status.get("TracerPid", "0") or 0)


def _check_rights(pid: int, status: dict[str, str]) -> None:
    owners = set(status.get("Uid", "").split())
    if os.geteuid() and owners != {str(os.geteuid())}:
        raise CannotEnter(f"Process {pid} belongs to another user. Run zerotop as that user or as root.")
    # The kernel checks the same permission for this file as for tracing, except for Yama's restriction.
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC))
    except PermissionError as error:
        raise CannotEnter(
            f"The kernel denies access to process {pid}, which {_describe_protection(pid, owners)}. "
            "Run zerotop as root, or give the container CAP_SYS_PTRACE."
        ) from error
    except OSError as error:
        raise CannotEnter(f"Process {pid} cannot be read: {describe_cause(error)}.") from error
    if danger := describe_danger(pid, status):
        raise CannotEnter(danger)


def _describe_protection(pid: int, owners: set[str]) -> str:
    """Return why the kernel may deny access to a process of this user: one that is not dumpable has files of root's."""
    with contextlib.suppress(OSError):
        if str(os.stat(f"/proc/{pid}/mem").st_uid) not in owners:
            return "is not dumpable (prctl, or a program that changed its user)"
    return "runs in a sandbox, is not dumpable or may not be traced"


def describe_not_up(pid: int) -> str:
    """Return a sentence about a process whose interpreter is not initialized."""
    return f"The Python of process {pid} is starting or exiting. Try again when it trains."


def describe_forbidden(pid: int) -> str:
    """Return a sentence that says why tracing a process of this user was denied."""
    scope = procfs.read_file("/proc/sys/kernel/yama/ptrace_scope", 16).strip()
    if scope in (b"1", b"2"):
        return (
            f"The kernel's yama.ptrace_scope is {scope.decode()}, which forbids attaching to other processes. Run zerotop "
            "as root, or allow it with sudo sysctl kernel.yama.ptrace_scope=0."
        )
    if scope == b"3":
        return "The kernel's yama.ptrace_scope is 3, which forbids entering processes until a restart with another value."
    return (
        f"Tracing process {pid} is forbidden, as in containers by default. Start the container with "
        "--cap-add SYS_PTRACE, or run zerotop as root on the host."
    )


def _read_executable(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def _find_interpreters(lines: list[MemoryRegion], executable: str) -> list[str]:
    """Return the files that may contain the interpreter: its shared libraries, then the program itself."""
    paths = dict.fromkeys(line.path for line in lines if line.path)
    libraries = [path for path in paths if _LIBRARY_PATTERN.search(os.path.basename(path))]
    return libraries + ([executable] if executable in paths else [])


def _find_symbols(pid: int, path: str) -> elf.Symbols | None:
    # Through the process's own root: in another mount namespace the path may name another file.
    for place in (f"/proc/{pid}/root{path}", f"/proc/{pid}/exe" if path == _read_executable(pid) else ""):
        try:
            status = os.stat(place)
            return _read_symbols(place, status.st_dev, status.st_ino, status.st_mtime_ns)
        except (OSError, elf.NotElf):
            continue
    return None


@functools.lru_cache(maxsize=16)
def _read_symbols(path: str, _device: int, _number: int, _changed_ns: int) -> elf.Symbols:
    return elf.read_symbols(path, (*_FUNCTIONS, _VERSION_SYMBOL, _RUNTIME_SYMBOL))


def _read_version(pid: int, addresses: dict[str, int]) -> tuple[int, int] | None:
    if _VERSION_SYMBOL not in addresses:
        return None
    value = read_memory(pid, addresses[_VERSION_SYMBOL], 8)
    (number,) = struct.unpack("<Q", value) if len(value) == 8 else (0,)
    return (number >> 24 & 0xFF, number >> 16 & 0xFF) if number >> 24 & 0xFF == 3 else None


def find_named_version(paths: list[str]) -> tuple[int, int] | None:
    """Return the first version in these paths, such as ``.../libpython3.10.so`` or ``.../lib/python3.10/...``."""
    for path in paths:
        match = _VERSION_PATTERN.search(path)
        if match:
            return int(match[1]), int(match[2])
    return None


def read_memory(pid: int, address: int, size: int) -> bytes:
    """Return bytes of a process's memory; fewer or none where they cannot be read."""
    try:
        descriptor = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, size, address)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _describe_no_python(pid: int, lines: list[MemoryRegion]) -> str:
    if not lines:
        return f"The memory map of process {pid} cannot be read. Run zerotop as its user or as root."
    if any("(deleted)" in line.path and "python" in line.path for line in lines):
        return f"The Python of process {pid} was replaced on disk, so it cannot be entered. {_USE_RUN}"
    return (
        f"Process {pid} exports no functions of CPython: it is another program, or a static or embedded Python. "
        f"{METRICS_ONLY}"
    )


def _choose_machine(pid: int, version: tuple[int, int], built_for: str) -> Machine:
    native = platform.machine()
    machine = MACHINES.get(native)
    if machine is None:
        raise CannotEnter(
            f"Python {_format_version(version)} can be entered on {' and '.join(MACHINES)} only, and this machine is "
            f"{native}. Start the job with zerotop run, or use Python 3.14, which can be entered everywhere."
        )
    if built_for != native:
        raise CannotEnter(f"Process {pid} runs a Python for {built_for}, emulated on this {native}. {_USE_RUN}")
    return machine


def _format_version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _find_code(pid: int, machine: Machine, codes: tuple[bytes, ...], lines: list[MemoryRegion]) -> int:
    """Return the address of one of these sequences of instructions, in the C library or the vDSO."""
    for line in lines:
        if line.is_executable and _SYSTEM_PATTERN.match(os.path.basename(line.path)):
            content = read_memory(pid, line.begin, line.end - line.begin)
            for match in re.finditer(b"|".join(map(re.escape, codes)), content):
                if match.start() % machine.alignment == 0:
                    return line.begin + match.start()
    raise CannotEnter(f"The C library of process {pid} is of an unknown kind, so it cannot be entered. {_USE_RUN}")
