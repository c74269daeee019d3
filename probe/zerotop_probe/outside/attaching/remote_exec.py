"""Asks a running Python, 3.14 or newer, to execute a script: PEP 768, by the protocol that CPython documents for tools.

Nothing is stopped: the script's path and two marks are written into the memory of the process, and its main thread
executes the script when it next comes to where it also handles signals. ``sys.remote_exec`` does the same from a Python of
the very same version; this works from any. https://docs.python.org/3/howto/remote_debugging.html
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

# ``_Py_DebugOffsets``, with which _PyRuntime begins. Where its last part begins differs by version.
_HEAD = struct.Struct("<8sQ")
_COOKIE = b"xdebugpy"
_FIRST_INTERPRETER, _INTERPRETER_ID, _NEXT_INTERPRETER, _MAIN_THREAD = 40, 56, 64, 80
_SUPPORT_AT = {(3, 14): 712, (3, 15): 840}
_SUPPORT = struct.Struct("<6Q")
_RELEASED = 0xF0
# More interpreters are a list that is read while it changes.
_MAX_INTERPRETERS = 1000

_PLEASE_STOP = 1 << 5
_PENDING = struct.pack("<i", 1)


class _Support(NamedTuple):
    """Offsets: the first two in a thread's state, ``enabled`` in an interpreter's, the others in ``request``."""

    eval_breaker: int
    request: int
    enabled: int
    pending: int
    path: int
    path_size: int


def request_script(target: Target, path: str) -> None:
    """Has the script at ``path`` executed. Raises CannotEnter; it will not be executed then."""
    pid = target.process.pid
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise CannotEnter(describe_forbidden(pid)) from error
    except OSError as error:
        raise CannotEnter(f"Process {pid} has ended.") from error
    try:
        _write_request(target, memory, os.fsencode(path) + b"\0")
    except (OSError, OverflowError, struct.error) as error:
        raise CannotEnter(f"The memory of process {pid} cannot be reached: has it ended?") from error
    finally:
        os.close(memory)


def _write_request(target: Target, memory: int, path: bytes) -> None:
    if not target.process.is_alive():  # the number was given to another one meanwhile
        raise ProcessLookupError(target.process.pid)
    support = _read_support(target, memory)
    if _read_number(memory, target.runtime + INITIALIZED_OFFSETS[target.version], "<i") != 1:
        raise CannotEnter(describe_not_up(target.process.pid))
    interpreter = _find_interpreter(target, memory)
    if not _read_number(memory, interpreter + support.enabled, "<i"):
        raise CannotEnter(
            f"Process {target.process.pid} was started with PYTHON_DISABLE_REMOTE_DEBUG or -X disable-remote-debug, which "
            "forbids entering it: it is seen from outside only; start the job without that, or with zerotop run."
        )
    thread = _read_number(memory, interpreter + _read_number(memory, target.runtime + _MAIN_THREAD, "<Q"), "<Q")
    if not thread:
        raise CannotEnter(describe_not_up(target.process.pid))
    if len(path) > support.path_size:
        raise CannotEnter(
            f"The recording's folder has too long a path to be told to process {target.process.pid}: choose another one "
            "with --session."
        )
    asked = thread + support.request
    os.pwrite(memory, path, asked + support.path)
    os.pwrite(memory, _PENDING, asked + support.pending)
    # One byte of it: the others count something else. Python sets bits there meanwhile, so this may lose the mark of a
    # signal that comes within these few microseconds, as sys.remote_exec may; what is executed looks after signals then.
    breaker = thread + support.eval_breaker
    os.pwrite(memory, bytes([_read_number(memory, breaker, "<B") | _PLEASE_STOP]), breaker)


def _read_support(target: Target, memory: int) -> _Support:
    cookie, number = _HEAD.unpack(os.pread(memory, _HEAD.size, target.runtime)) if target.runtime else (b"", 0)
    version = (number >> 24 & 0xFF, number >> 16 & 0xFF)
    if cookie != _COOKIE or version != target.version or version not in _SUPPORT_AT or number & _RELEASED != _RELEASED:
        written = ".".join(map(str, target.version))
        raise CannotEnter(
            f"How to enter the Python {written} of process {target.process.pid} is not known to this version of zerotop: "
            "update zerotop, or start the job with zerotop run."
        )
    found = os.pread(memory, _SUPPORT.size, target.runtime + _SUPPORT_AT[version])
    return _Support(*_SUPPORT.unpack(found))


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
