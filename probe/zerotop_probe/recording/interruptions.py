"""Exceptions of the job that arrive while the probe's code runs. They are the job's, and must reach it as if it ran alone.

Python runs signal handlers and trace functions between any two instructions, and there raises what they raise, as well as
the exceptions of ``PyThreadState_SetAsyncExc()``. So whatever catches an exception in a hook first asks
:func:`is_interruption`.
"""

from __future__ import annotations

import opcode
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import CodeType, FrameType, TracebackType
from typing import Any

OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_RAISE = opcode.opmap["RAISE_VARARGS"]
# The top-level modules of exceptions that C code raises which the probe calls. Modules in Python have frames of their own.
_C_MODULES = ("builtins", "torch", "struct", "ctypes", "pickle", "_pickle")
# C code raises these without arguments.
_BARE = (StopIteration, StopAsyncIteration, MemoryError)


def is_own(code: CodeType) -> bool:
    """Return whether this is code of the probe."""
    return code.co_filename.startswith(OWN_FOLDER)


def hide_frames(error: BaseException) -> None:
    """Remove the probe's frames at the begin of a traceback, before a bare ``raise`` in the first of them.

    Such a ``raise`` adds none, from Python 3.11 on. Before, the frame that raises stays.
    """
    _hide_begin(error)
    context = error.__context__
    if context is not None and _hide_begin(context) and isinstance(context, StopIteration):
        error.__context__ = context.__context__  # the end of an iterator, after which the probe was interrupted


def _hide_begin(error: BaseException) -> bool:
    traceback = first = error.__traceback__
    while traceback is not None and is_own(traceback.tb_frame.f_code):
        traceback = traceback.tb_next
    BaseException.with_traceback(error, traceback)  # the class may override it, or forbid to set attributes
    return traceback is not first


def is_interruption(error: BaseException) -> bool:
    """Return whether an exception that the probe has caught is none of its own."""
    if not isinstance(error, Exception):
        return True  # KeyboardInterrupt, SystemExit: the probe raises none
    entries = list(_iter_entries(error.__traceback__))
    if not entries:
        return False
    return _has_callback([entry.tb_frame for entry in entries]) or _is_asynchronous(error, entries[-1])


class suppress_own(AbstractContextManager[None]):
    """Like :func:`contextlib.suppress`, but lets the job's own exceptions through, such as those of its signal handlers."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return isinstance(error, self._kinds) and not is_interruption(error)


def _iter_entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _has_callback(frames: list[FrameType]) -> bool:
    """Return whether Python called one of these itself: with the frame or the code where it was, or as a signal handler."""
    others = [frame for frame in frames if not is_own(frame.f_code) and not _imports(frame.f_code)]
    if any(_is_place(value) for frame in others for value in _iter_arguments(frame)):
        return True
    handlers = _list_handlers() if others else []  # they may have deleted their arguments
    return any(frame.f_code is handler for frame in others for handler in handlers)


def _imports(code: CodeType) -> bool:
    """Return whether this is code of ``import``, which has the code of the imported module as an argument."""
    return code.co_filename.startswith("<frozen importlib")


def _is_place(value: Any) -> bool:
    return isinstance(value, FrameType) or (isinstance(value, CodeType) and is_own(value))


def _iter_arguments(frame: FrameType) -> Iterator[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    values = frame.f_locals
    for name in code.co_varnames[:count]:
        value = values.get(name)
        if type(value) is tuple:
            yield from value
        else:
            yield value


def _list_handlers() -> list[CodeType]:
    """Return the code of the job's signal handlers."""
    found = []
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # of functools.partial
        for one in (handler, getattr(handler, "__call__", None)):  # noqa: B004 as its code is asked for
            code = getattr(one, "__code__", None)  # methods have it, too
            if isinstance(code, CodeType):
                found.append(code)
    return found


def _is_asynchronous(error: Exception, last: TracebackType) -> bool:
    """Return whether another thread has raised this; Python then makes it from its class alone, at any instruction."""
    code = last.tb_frame.f_code
    if code.co_code[last.tb_lasti] == _RAISE:
        return False
    if type(error).__module__.partition(".")[0] not in _C_MODULES:
        return is_own(code) or not error.args
    return not error.args and not isinstance(error, _BARE)
