"""Short names of source files: relative to the script's folder, or to where a library is installed."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

_PROBE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Code that torch.compile has generated.
_GENERATED = "torchinductor_"


class FileName(NamedTuple):
    """A short name. ``is_own``: the file belongs to the job itself, neither to a library nor to Python."""

    text: str
    is_own: bool


class PathNames:
    """Shortens the paths of files: those below the script's folder become relative to it."""

    def __init__(self, folder: str, import_folders: list[str]) -> None:
        """``folder`` is that of the script; ``import_folders`` are searched for modules."""
        self._folder = os.path.join(os.path.abspath(folder), "")
        roots = {os.path.join(os.path.abspath(entry), "") for entry in import_folders if isinstance(entry, str)}
        self._roots = sorted(roots - {os.sep}, key=len, reverse=True)

    @classmethod
    def for_this_process(cls) -> PathNames:
        """Return names relative to this process's script, or to the working directory in a notebook."""
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        return cls(os.path.dirname(os.path.abspath(script)) if script else os.getcwd(), list(sys.path))

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
            return FileName(path, False)
        if path.startswith(self._folder):
            return FileName(path[len(self._folder) :], True)
        for root in self._roots:
            if path.startswith(root):
                return FileName(path[len(root) :], True)
        parent, name = os.path.split(path)
        return FileName(os.path.join(os.path.basename(parent), name), _GENERATED not in path)
