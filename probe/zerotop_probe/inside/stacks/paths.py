"""Short names of source files: relative to the script's folder, or to where a library is installed."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from types import FrameType
from typing import NamedTuple

_PROBE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
STDIN = "<stdin>"
"""Python's name of a script that it reads from its input."""
# Code that torch.compile has generated.
_GENERATED = "torchinductor_"


class FileName(NamedTuple):
    """A short name. ``is_own``: the file belongs to the job itself, neither to a library nor to Python."""

    text: str
    is_own: bool


class PathNames:
    """Shortens the paths of files: those below the script's folder become relative to it."""

    def __init__(self, folder: str, import_folders: list[str], unnamed: str = "") -> None:
        """``folder`` is that of the script; ``import_folders`` are searched for modules.

        ``unnamed``: what Python calls a script without a file: STDIN or, with ``-c``, ``<string>``; "" otherwise.
        """
        self.unnamed = unnamed
        self._folder = os.path.join(os.path.abspath(folder), "")
        roots = {os.path.join(os.path.abspath(entry), "") for entry in import_folders if isinstance(entry, str)}
        self._roots = sorted(roots - {os.sep}, key=len, reverse=True)

    @classmethod
    def for_this_process(cls) -> PathNames:
        """Return names relative to this process's script, or to the working directory in a notebook."""
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        if script == STDIN:
            return cls(os.getcwd(), list(sys.path), STDIN)
        folder = os.path.dirname(os.path.abspath(script)) if script else os.getcwd()
        return cls(folder, list(sys.path), "" if script else _find_unnamed())

    def name_frame(self, frame: FrameType) -> FileName | None:
        """Return the name of a frame's file; None for a frame of the probe. Libraries have code called ``<string>``, too."""
        name = self.name_file(frame.f_code.co_filename)
        if name is not None and name.text == self.unnamed and frame.f_globals.get("__name__") != "__main__":
            return FileName(name.text, False)
        return name

    def name_file(self, path: str) -> FileName | None:
        """Return the name of a code object's file; None for a file of the probe."""
        if path.startswith(_PROBE):
            return None
        for mark in _INSTALLED:
            if mark in path:
                return FileName(path.rpartition(mark)[2], False)
        if path.startswith(_PYTHON):
            return FileName(path[len(_PYTHON) :], False)
        if path.startswith("<"):
            return FileName(path, path == self.unnamed)
        if path.startswith(self._folder):
            return FileName(path[len(self._folder) :], True)
        for root in self._roots:
            if path.startswith(root):
                return FileName(path[len(root) :], not _holds_installed(root))
        parent, name = os.path.split(path)
        return FileName(os.path.join(os.path.basename(parent), name), _GENERATED not in path)


@cache
def _holds_installed(folder: str) -> bool:
    """Whether libraries were installed into a folder, as by ``pip install --target``."""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False


def _find_unnamed() -> str:
    """Return the name of the code in which the main thread began if that is no file; "" otherwise."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "__main__":
        return ""
    path = frame.f_code.co_filename
    return path if path.startswith("<") else ""


def name_own_file(path: str) -> str | None:
    """Return the name of a file of the job's own code; None for another file."""
    name = PathNames.for_this_process().name_file(path)
    return name.text if name is not None and name.is_own else None
