"""Run py-spy on a process and read its stacks: those of Python, and above them the functions of C."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import takewhile
from typing import Any, NamedTuple

_TIMEOUT_S = 10.0
_MOST_THREADS, _MOST_FRAMES, _LONGEST_NAME = 24, 40, 80
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_PYTHON = f"{os.sep}lib{os.sep}python"
# The probe's own functions on a rank's stack do not count.
_PROBE = os.path.join(os.path.abspath(__file__).rpartition(f"{os.sep}outside{os.sep}")[0], "")

# The program or library of Python's interpreter, and its functions by their names in Python.
_INTERPRETER = re.compile(r"(?:lib)?python\d")
_INTERPRETER_CALLS = (
    (re.compile(r"acquire_lock|lock_acquire|_PyMutex_Lock|_PySemaphore_"), "acquire"),
    (re.compile(r"^(?:time_sleep|pysleep)"), "time.sleep"),
    (re.compile(r"^builtin_input"), "input"),
)
_SYSTEM = ("libc.", "libc-", "libpthread")
# What distinguishes names of the C library from those in Python: ``open64``, ``__read``.
_SYSTEM_CALL_MARKS = re.compile(r"^(?:__libc_|_+)|64$")


class _Frame(NamedTuple):
    """One frame, with the fields of the event; the line of a function in C is 0."""

    file: str
    line: int
    function: str
    own: bool


def find_program() -> str | None:
    """Return the path of py-spy, of this environment or on PATH; None if it is not installed."""
    own = os.path.dirname(sys.executable)
    return shutil.which("py-spy", path=os.pathsep.join([own, os.environ.get("PATH", os.defpath)]))


def dump_stacks(program: str, pid: int) -> dict[str, Any] | None:
    """Return the fields ``frames`` and ``stacks`` of an event; None if py-spy may not read the process, or is too slow.

    This pauses the process, usually for about 50 ms.
    """
    command = [program, "dump", "--native", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
        return read_dump(json.loads(done.stdout), pid)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def read_dump(threads: list[dict[str, Any]], pid: int) -> dict[str, Any] | None:
    """Parse the output of ``py-spy dump --json`` into these fields; None without the main thread's Python frames."""
    main = [thread for thread in threads if thread["os_thread_id"] == pid]
    others = [thread for thread in threads if thread["os_thread_id"] != pid]
    if not main or not any(_is_python(frame) for frame in main[0]["frames"]):
        return None
    folder, unnamed = _find_script_folder(main[0]["frames"]), _find_unnamed(main[0]["frames"])
    numbers: dict[_Frame, int] = {}
    stacks = []
    for thread in [*main, *others[: _MOST_THREADS - 1]]:
        chosen = _choose_frames(thread["frames"])
        call, natives = _name_call(list(takewhile(lambda frame: not _is_python(frame), chosen)))
        frames = [_name_frame(frame, folder, unnamed) for frame in chosen[natives:]]
        indexes = [numbers.setdefault(frame, len(numbers)) for frame in frames]
        stack: dict[str, Any] = {"count": 1, "call": call, "frames": indexes}
        if thread is not main[0]:
            stack["thread"] = str(thread["thread_name"] or f"thread {thread['os_thread_id']}")
        stacks.append(stack)
    return {"frames": [frame._asdict() for frame in numbers], "stacks": stacks}


def _is_python(frame: dict[str, Any]) -> bool:
    return frame["module"] is None


def _choose_frames(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the frames without those of the interpreter's start-up and those of unknown functions."""
    last = max((number for number, frame in enumerate(frames) if _is_python(frame)), default=-1)
    return [frame for frame in frames[: last + 1] if _says_what_it_does(frame)][:_MOST_FRAMES]


def _says_what_it_does(frame: dict[str, Any]) -> bool:
    return not (frame["filename"].startswith(_PROBE) if _is_python(frame) else frame["name"].startswith("0x"))


def _name_call(natives: list[dict[str, Any]]) -> tuple[str, int]:
    """Return the function that the innermost line of Python calls, and how many of the functions in C say no more.

    Those of the interpreter are named as in Python, or left out: a line that waits for a lock calls ``acquire``.
    """
    libraries = [os.path.basename(str(frame["module"])) for frame in natives]
    names = [_shorten_name(str(frame["name"])) for frame in natives]
    for name, library in zip(names, libraries, strict=True):
        if _INTERPRETER.match(library):
            known = next((python for pattern, python in _INTERPRETER_CALLS if pattern.search(name)), None)
            if known is not None:
                return known, len(natives)
        elif not library.startswith(_SYSTEM):  # what it calls in the interpreter is no call of the line in Python
            break
    for number, (name, library) in enumerate(zip(names, libraries, strict=True)):
        if not _INTERPRETER.match(library):
            return (_SYSTEM_CALL_MARKS.sub("", name) if library.startswith(_SYSTEM) else name), number + 1
    return "", len(natives)


def _find_script_folder(frames: list[dict[str, Any]]) -> str:
    """Return the folder of the outermost Python file, which is the script."""
    scripts = [frame["filename"] for frame in frames if _is_python(frame) and _is_own(frame["filename"])]
    return os.path.join(os.path.dirname(scripts[-1]), "") if scripts else ""


def _find_unnamed(frames: list[dict[str, Any]]) -> str:
    """Return the name of the code in which the stack begins if that is no file: ``<stdin>``, or ``<string>`` with ``-c``."""
    begin = next((str(frame["filename"]) for frame in reversed(frames) if _is_python(frame)), "")
    return begin if begin in ("<stdin>", "<string>") else ""


def _shorten_name(function: str) -> str:
    """Leave out the parts in brackets of a long C++ name."""
    return function if len(function) <= _LONGEST_NAME else function.partition("<")[0].partition("(")[0][:_LONGEST_NAME]


def _is_own(path: str) -> bool:
    return not any(mark in path for mark in _INSTALLED) and _PYTHON not in path and not path.startswith("<")


def _name_frame(frame: dict[str, Any], folder: str, unnamed: str) -> _Frame:
    path, function = str(frame["filename"]), str(frame["name"])
    if not _is_python(frame):
        return _Frame(os.path.basename(str(frame["module"])), 0, _shorten_name(function), False)
    line = int(frame["line"])
    if _is_own(path) or path == unnamed:
        short = path[len(folder) :] if folder and path.startswith(folder) else os.path.basename(path)
        return _Frame(short, line, function, True)
    for mark in _INSTALLED:
        path = path.rpartition(mark)[2]
    if _PYTHON in path:
        path = path.rpartition(_PYTHON)[2].partition(os.sep)[2]
    return _Frame(path, line, function, False)
