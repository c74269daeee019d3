"""Name the frames of a stack: file, line, function, and the C function that the innermost frame calls.

No values, arguments or source text are read. No frame is kept: it would keep the job's tensors alive.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import NamedTuple

from zerotop_probe.inside.stacks.callees import find_callee, find_slow_line
from zerotop_probe.inside.stacks.paths import PathNames

# Of deeper stacks only the job's own frames are kept further out.
MOST_LIBRARY_FRAMES = 30
MOST_FRAMES = 40
# Named instructions that are remembered.
_MOST_NAMES = 10_000


class PythonFrame(NamedTuple):
    """One frame. ``own``: it is the job's own code, neither a library nor Python itself."""

    file: str
    line: int
    function: str
    own: bool


class Stack(NamedTuple):
    """A stack, innermost frame first, and the C function called in it; "" if there is none or it is unknown."""

    frames: tuple[PythonFrame, ...]
    call: str


UNKNOWN_STACK = Stack((), "")
"""That of a sample which does not show what took the time."""


class StackReader:
    """Reads stacks, and remembers the names in them."""

    def __init__(self, paths: PathNames) -> None:
        self._paths = paths
        # By id() of the code and instruction; the code is kept so that its id is not used again.
        self._frames: dict[tuple[int, int], tuple[CodeType, PythonFrame | None]] = {}
        self._calls: dict[tuple[int, int], str] = {}
        self._slow: dict[tuple[int, int], int | None] = {}

    def read_stack(self, innermost: FrameType, *, is_late: bool = False) -> Stack:
        """Return the stack that ends in a frame, without the probe's own frames.

        ``is_late``: what took the time is the instruction before the next one that can be interrupted.
        """
        slow_line = self._find_slow_line(innermost) if is_late else innermost.f_lineno
        if slow_line is None:
            return UNKNOWN_STACK
        if len(self._frames) > _MOST_NAMES:
            self._frames.clear()
            self._calls.clear()
            self._slow.clear()
        frames: list[PythonFrame] = []
        call, count = "", 0
        frame: FrameType | None = innermost
        while frame is not None and len(frames) < MOST_FRAMES:
            found = self._name_frame(frame)
            if found is not None:
                if not count:
                    call = self._name_call(frame)
                count += 1
                if count <= MOST_LIBRARY_FRAMES or found.own:
                    frames.append(found)
            frame = frame.f_back
        if slow_line != innermost.f_lineno and frames:
            frames[0], call = frames[0]._replace(line=slow_line), ""
        return Stack(tuple(frames), call)

    def _find_slow_line(self, frame: FrameType) -> int | None:
        """Return the line of a frame that took long if the lock was passed on late; None if that is unknown."""
        found = self._name_frame(frame)
        if found is not None and not found.own:  # which line of a library that is does not matter
            caller = self._name_frame(frame.f_back) if frame.f_back is not None else None
            has_begun = frame.f_lineno != frame.f_code.co_firstlineno
            return frame.f_lineno if has_begun or caller is None or not caller.own else None
        key = id(frame.f_code), frame.f_lasti
        if key not in self._slow:
            try:
                self._slow[key] = find_slow_line(frame.f_code, frame.f_lasti, frame.f_globals)
            except (IndexError, ValueError):  # the code of a newer Python
                self._slow[key] = None
        return self._slow[key]

    def _name_frame(self, frame: FrameType) -> PythonFrame | None:
        code = frame.f_code
        key = id(code), frame.f_lasti
        known = self._frames.get(key)
        if known is None:
            name = self._paths.name_frame(frame)
            function = getattr(code, "co_qualname", code.co_name)
            found = PythonFrame(name.text, frame.f_lineno or 0, function, name.is_own) if name is not None else None
            known = self._frames[key] = code, found
        return known[1]

    def _name_call(self, frame: FrameType) -> str:
        key = id(frame.f_code), frame.f_lasti
        if key not in self._calls:
            try:
                self._calls[key] = find_callee(frame.f_code, frame.f_lasti, frame.f_globals)
            except (IndexError, ValueError):  # the code of a newer Python
                self._calls[key] = ""
        return self._calls[key]
