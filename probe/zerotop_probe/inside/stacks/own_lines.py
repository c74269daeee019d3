"""The line of the job's own code that a hook was called from."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

from zerotop_probe.inside.stacks.frames import MOST_FRAMES
from zerotop_probe.inside.stacks.paths import PathNames


class OwnPlace(NamedTuple):
    """A line of the job's own code."""

    file: str
    line: int
    function: str


class OwnLines:
    """Finds lines of the job's own code. Paths are read when the first one is asked for."""

    def __init__(self) -> None:
        self._names: PathNames | None = None

    def find_place(self, frame: FrameType | None) -> OwnPlace | None:
        """Return the innermost such line of a frame and its callers."""
        return next(self.list_places(frame), None)

    def list_places(self, frame: FrameType | None) -> Iterator[OwnPlace]:
        """Yield such lines of a frame and its callers, the innermost first."""
        if self._names is None:
            self._names = PathNames.for_this_process()
        for _ in range(MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            name = self._names.name_frame(frame)
            if name is not None and name.is_own:
                yield OwnPlace(name.text, frame.f_lineno or 0, getattr(code, "co_qualname", code.co_name))
            frame = frame.f_back
