"""A running Python as seen from outside: its version, where its functions lie, and why it may not be entered.

Everything here is read without stopping the process.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import struct
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.outside.attaching.ptrace import elf
from zerotop_probe.outside.attaching.ptrace.aarch64 import Aarch64
from zerotop_probe.outside.attaching.ptrace.arch import Machine
from zerotop_probe.outside.attaching.ptrace.x86_64 import X8664
from zerotop_probe.outside.procfs import Process

MIN_VERSION = (3, 9)
# From here on an interpreter can be asked to run a script: PEP 768.
REMOTE_EXEC_VERSION = (3, 14)

_FUNCTIONS = ("Py_AddPendingCall", "PyRun_SimpleString")
_VERSION_SYMBOL = "Py_Version"  # a constant, from 3.11 on
_RUNTIME_SYMBOL = "_PyRuntime"  # begins with a table of where things lie, from 3.13 on
# Where in it lies what Py_IsInitialized() tells: an int that is 1 from when __main__ is there until it all is torn down.
# Before and after that a text of ours would find half an interpreter, and the process would crash.
INITIALIZED_OFFSETS = {
    (3, 9): 12, (3, 10): 12, (3, 11): 16, (3, 12): 16, (3, 13): 600, (3, 14): 776, (3, 15): 904,
}  # fmt: skip
_LINE_PATTERN = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S{4} ([0-9a-f]+) \S+ \d+\s*(.*)")
_LIBRARY_PATTERN = re.compile(r"libpython3[\d.]*\w?\.so")
_VERSION_PATTERN = re.compile(r"python(\d)\.(\d+)")
# By what platform.machine() says.
MACHINES: dict[str, Machine] = {machine.name: machine for machine in (X8664(), Aarch64())}


class CannotEnter(Exception):
    """This process cannot be entered; the text is a sentence that says why and what to do."""


class MemoryRegion(NamedTuple):
    """One line of ``/proc/PID/maps``."""

    begin: int
    end: int
    offset: int
    path: str


class EntryPoints(NamedTuple):
    """Where a Python that cannot be asked itself is entered: addresses."""

    machine: Machine
    add_pending_call: int
    run_string: int
    syscall: int  # an instruction that makes a system call
    initialized_flag: int  # an int that is 1 while the interpreter is up


class Target(NamedTuple):
    """What is needed to enter a process."""

    process: Process
    version: tuple[int, int]
    executable: str
    entry_points: EntryPoints | None = None  # None from ASKED_FROM on
    runtime: int = 0  # the address of _PyRuntime, 0 if it is not exported


def read_mappings(pid: int) -> list[MemoryRegion]:
    """The memory map of a process; empty if it is gone or may not be read."""
    try:
        # More than one read: a rank has thousands of lines.
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            matches = [_LINE_PATTERN.match(line) for line in file]
    except OSError:
        return []
    return [
        MemoryRegion(int(found[1], 16), int(found[2], 16), int(found[3], 16), found[4].strip()) for found in matches if found
    ]


def examine_process(process: Process) -> Target:
    """Finds out how ``process`` can be entered. Raises CannotEnter where it cannot be."""
    _check_traceable(process)
    lines = read_mappings(process.pid)
    executable = _read_executable(process.pid)
    files = _find_interpreters(lines, executable)
    version, found, built_for = None, None, ""
    for path in files:
        symbols = _find_symbols(process.pid, path)
        if symbols is None or not all(name in symbols.offsets for name in _FUNCTIONS):
            continue
        base = min(line.begin - line.offset for line in lines if line.path == path) if symbols.movable else 0
        built_for = symbols.machine
        found = {name: base + offset for name, offset in symbols.offsets.items()}
        version = _read_version(process.pid, found) or find_named_version([path, executable, *(m.path for m in lines)])
        break
    if found is None:
        raise CannotEnter(_describe_no_python(process.pid, lines))
    if version is None:
        raise CannotEnter(f"Process {process.pid} does not tell its Python version: it is seen from outside only.")
    if version < MIN_VERSION:
        raise CannotEnter(
            f"Process {process.pid} runs Python {_format_version(version)}; the probe needs 3.9: it is seen from outside only."
        )
    if version >= REMOTE_EXEC_VERSION:
        return Target(process, version, executable, runtime=found.get(_RUNTIME_SYMBOL, 0))
    machine = _choose_machine(process.pid, version, built_for)
    call = _find_syscall(process.pid, machine, lines)
    if _RUNTIME_SYMBOL not in found:
        raise CannotEnter(f"Process {process.pid} does not tell whether its Python is up: it is seen from outside only.")
    add, run = (found[name] for name in _FUNCTIONS)
    entrance = EntryPoints(machine, add, run, call, found[_RUNTIME_SYMBOL] + INITIALIZED_OFFSETS[version])
    return Target(process, version, executable, entrance)


def _check_traceable(process: Process) -> None:
    pid = process.pid
    if not process.is_alive():
        raise CannotEnter(f"Process {pid} has ended.")
    status = read_status(pid)
    tracer = int(status.get("TracerPid", "0") or 0)
    if tracer:
        name = (procfs.read_stat(tracer) or procfs.ProcessStat(b"?", "", 0, 0, 0, 0, 0)).name.decode(errors="replace")
        raise CannotEnter(
            f"Another program traces process {pid} ({name}, process {tracer}), and there can be only one: let it end first."
        )
    if status.get("State", "")[:1] == "T":
        raise CannotEnter(f"Process {pid} is stopped, as by Ctrl-Z: let it go on with kill -CONT {pid}, then enter it.")
    if len(status.get("NSpid", "").split()) > len(read_status(os.getpid()).get("NSpid", "").split()):
        raise CannotEnter(
            f"Process {pid} lives in a container with process numbers and files of its own: run zerotop inside it."
        )
    _check_rights(pid, status)


def _check_rights(pid: int, status: dict[str, str]) -> None:
    owners = set(status.get("Uid", "").split())
    if os.geteuid() and owners != {str(os.geteuid())}:
        raise CannotEnter(f"Process {pid} belongs to another user: run zerotop as that user, or as root.")
    # The kernel asks the same question for this file as for tracing, apart from yama.
    if not os.access(f"/proc/{pid}/mem", os.R_OK | os.W_OK):
        raise CannotEnter(
            f"The kernel does not let us into process {pid} (a sandbox, or a program that may not be traced): "
            "run zerotop as root, or give the container CAP_SYS_PTRACE."
        )


def describe_not_up(pid: int) -> str:
    """Why it is left alone while its interpreter is not up, as a sentence."""
    return f"The Python of process {pid} is starting or ending: enter it when it trains."


def describe_forbidden(pid: int) -> str:
    """Why tracing was refused although it is our own process, as a sentence."""
    scope = procfs.read_file("/proc/sys/kernel/yama/ptrace_scope", 16).strip()
    if scope in (b"1", b"2"):
        return (
            f"The kernel's yama.ptrace_scope is {scope.decode()}, which keeps programs out of each other: run zerotop as "
            "root, or allow it with sudo sysctl kernel.yama.ptrace_scope=0."
        )
    if scope == b"3":
        return "The kernel's yama.ptrace_scope is 3: nothing can be entered on this machine until it is restarted without."
    return (
        f"Tracing process {pid} is forbidden here, as containers do by default: start the container with "
        "--cap-add SYS_PTRACE, or run zerotop as root on the host."
    )


def read_status(pid: int) -> dict[str, str]:
    """The fields of ``/proc/PID/status``."""
    lines = procfs.read_file(f"/proc/{pid}/status", 1 << 13).decode(errors="replace").splitlines()
    return {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}


def _read_executable(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def _find_interpreters(lines: list[MemoryRegion], executable: str) -> list[str]:
    """The files that may hold the interpreter: a shared library of it, else the program itself."""
    paths = dict.fromkeys(line.path for line in lines if line.path)
    libraries = [path for path in paths if _LIBRARY_PATTERN.search(os.path.basename(path))]
    return libraries + ([executable] if executable in paths else [])


def _find_symbols(pid: int, path: str) -> elf.Symbols | None:
    # By way of the process's own root: in another mount namespace another file may have that name.
    for place in (f"/proc/{pid}/root{path}", f"/proc/{pid}/exe" if path == _read_executable(pid) else ""):
        try:
            facts = os.stat(place)
            return _read_symbols(place, facts.st_dev, facts.st_ino, facts.st_mtime_ns)
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
    """The version that the first of these paths names, as ``.../libpython3.10.so`` or ``.../lib/python3.10/...`` do."""
    for path in paths:
        found = _VERSION_PATTERN.search(path)
        if found:
            return int(found[1]), int(found[2])
    return None


def read_memory(pid: int, address: int, size: int) -> bytes:
    """Bytes of a process's memory; fewer or none where they cannot be read."""
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
        return f"The memory map of process {pid} cannot be read: run zerotop as its user, or as root."
    if any("(deleted)" in line.path and "python" in line.path for line in lines):
        return (
            f"The Python of process {pid} was replaced on disk while it runs, so where its functions lie is not known: "
            "it is seen from outside only."
        )
    return (
        f"Process {pid} shows no functions of CPython: it is another program, or a Python that exports nothing, as some "
        "static and embedded ones. It is seen from outside only."
    )


def _choose_machine(pid: int, version: tuple[int, int], built_for: str) -> Machine:
    here = platform.machine()
    machine = MACHINES.get(here)
    if machine is None:
        raise CannotEnter(
            f"Entering Python {_format_version(version)} is known for {' and '.join(MACHINES)} only, and this is {here}: start the "
            "job with zerotop run, or use Python 3.14, which can be entered everywhere."
        )
    if built_for != here:
        raise CannotEnter(
            f"Process {pid} runs a Python for {built_for}, which is emulated on this {here}: start the job with zerotop run."
        )
    return machine


def _format_version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _find_syscall(pid: int, machine: Machine, lines: list[MemoryRegion]) -> int:
    for line in lines:
        if line.path == "[vdso]":
            content = read_memory(pid, line.begin, line.end - line.begin)
            for found in re.finditer(re.escape(machine.syscall_code), content):
                if found.start() % machine.alignment == 0:
                    return line.begin + found.start()
    raise CannotEnter(f"Process {pid} has no vDSO, which entering it needs: it is seen from outside only.")
