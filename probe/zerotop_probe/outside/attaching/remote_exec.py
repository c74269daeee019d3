"""Asking a running Python 3.14 or newer to execute a script: PEP 768, by CPython's protocol for debuggers.

The process is not stopped. The script's path and two flags are written into its memory, and its main thread executes the
script when it next checks for signals. ``sys.remote_exec`` does the same, but only from a Python of the same version.
https://docs.python.org/3/howto/remote_debugging.html
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from zerotop_probe.outside.attaching.python_process import (
    INITIALIZED_OFFSETS,
    CannotEnter,
    Target,
    describe_forbidden,
    describe_not_up,
)
from zerotop_probe.outside.causes import describe_cause

# ``_Py_DebugOffsets``, at the beginning of _PyRuntime. The offset of its last part differs by version.
_HEAD = struct.Struct("<8sQ")
_COOKIE = b"xdebugpy"
_FIRST_INTERPRETER, _INTERPRETER_ID, _NEXT_INTERPRETER, _MAIN_THREAD = 40, 56, 64, 80
_SUPPORT_AT = {(3, 14): 712, (3, 15): 840}
_SUPPORT = struct.Struct("<6Q")
_RELEASED = 0xF0
# A longer list means that it changed while it was read.
_MAX_INTERPRETERS = 1000

_PLEASE_STOP = 1 << 5
_PENDING = struct.pack("<i", 1)


class _Support(NamedTuple):
    """Offsets: the first two in the thread state, ``enabled`` in the interpreter state, the others in ``request``."""

    eval_breaker: int
    request: int
    enabled: int
    pending: int
    path: int
    path_size: int


def request_script(target: Target, path: str) -> None:
    """Request execution of the script at ``path``. Raises CannotEnter; the script is not executed then."""
    pid = target.process.pid
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise CannotEnter(describe_forbidden(pid)) from error
    except OSError as error:
        is_gone = not target.process.is_alive()
        raise CannotEnter(
            f"Process {pid} has ended." if is_gone else f"Process {pid} cannot be read: {describe_cause(error)}."
        ) from error
    try:
        _write_request(target, memory, os.fsencode(path) + b"\0")
    except (OSError, OverflowError, struct.error) as error:
        raise CannotEnter(f"The memory of process {pid} cannot be accessed. Has it ended?") from error
    finally:
        os.close(memory)


def _write_request(target: Target, memory: int, path: bytes) -> None:
    if not target.process.is_alive():  # its pid was reused
        raise ProcessLookupError(target.process.pid)
    support = _read_support(target, memory)
    if _read_number(memory, target.runtime + INITIALIZED_OFFSETS[target.version], "<i") != 1:
        raise CannotEnter(describe_not_up(target.process.pid))
    interpreter = _find_interpreter(target, memory)
    if not _read_number(memory, interpreter + support.enabled, "<i"):
        raise CannotEnter(
            f"Process {target.process.pid} was started with PYTHON_DISABLE_REMOTE_DEBUG or -X disable-remote-debug, which "
            "forbids entering it. Start the job without that, or with zerotop run."
        )
    thread = _read_number(memory, interpreter + _read_number(memory, target.runtime + _MAIN_THREAD, "<Q"), "<Q")
    if not thread:
        raise CannotEnter(describe_not_up(target.process.pid))
    if len(path) > support.path_size:
        raise CannotEnter(
            f"The path of the recording's folder is too long to enter process {target.process.pid}. Choose another "
            "folder with --recording."
        )
    request = thread + support.request
    os.pwrite(memory, path, request + support.path)
    os.pwrite(memory, _PENDING, request + support.pending)
    # One byte only: the others are a counter. Python may set bits within these microseconds, so this may clear the flag of a
    # signal, as sys.remote_exec may; the script therefore handles pending signals.
    breaker = thread + support.eval_breaker
    os.pwrite(memory, bytes([_read_number(memory, breaker, "<B") | _PLEASE_STOP]), breaker)


def _read_support(target: Target, memory: int) -> _Support:
    cookie, number = _HEAD.unpack(os.pread(memory, _HEAD.size, target.runtime)) if target.runtime else (b"", 0)
    version = (number >> 24 & 0xFF, number >> 16 & 0xFF)
    if cookie != _COOKIE or version != target.version or version not in _SUPPORT_AT or number & _RELEASED != _RELEASED:
        written = ".".join(map(str, target.version))
        raise CannotEnter(
            f"This version of zerotop cannot enter the Python {written} of process {target.process.pid}. "
            "Update zerotop, or start the job with zerotop run."
        )
    return _Support(*_SUPPORT.unpack(os.pread(memory, _SUPPORT.size, target.runtime + _SUPPORT_AT[version])))


def _find_interpreter(target: Target, memory: int) -> int:
    first, number, following = (
        _read_number(memory, target.runtime + field, "<Q")
        for field in (_FIRST_INTERPRETER, _INTERPRETER_ID, _NEXT_INTERPRETER)
    )
    interpreter = _read_number(memory, target.runtime + first, "<Q")
    for _ in range(_MAX_INTERPRETERS):
        if interpreter and _read_number(memory, interpreter + number, "<q") == 0:
            return interpreter
        if not interpreter:
            break
        interpreter = _read_number(memory, interpreter + following, "<Q")
    raise CannotEnter(describe_not_up(target.process.pid))


def _read_number(memory: int, address: int, form: str) -> int:
    (value,) = struct.unpack(form, os.pread(memory, struct.calcsize(form), address))
    return int(value)
