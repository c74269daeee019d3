"""Import the probe into a job whose folder may have modules with names of the standard library, such as ``statistics.py``.

The probe gets those of the standard library, and the job goes on to get its own.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_STANDARD = os.path.dirname(os.__file__)
_STANDARD_FOLDERS = [_STANDARD, os.path.join(_STANDARD, "lib-dynload")]


def import_hook_installer() -> Any:
    """Return the module ``hook_installer``, through which the probe enters and leaves a process."""
    known = sys.modules.get("zerotop_probe.inside.hooks.hook_installer")
    if known is not None:
        return known
    with standard_modules():
        # The first tells whose an exception is that is raised while the rest is imported.
        importlib.import_module("zerotop_probe.recording.interruptions")
        from zerotop_probe.inside.hooks import hook_installer
    return hook_installer


@contextmanager
def standard_modules() -> Iterator[None]:
    """Let this thread import the modules of the standard library, whatever else has their names; then undo that."""
    finder = _StandardFinder()
    hidden = {name: module for name, module in list(sys.modules.items()) if _is_replaced(name, module)}
    hidden |= {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in hidden}
    for name in hidden:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        gone = {name for name in finder.found if name in hidden or _differs(_find_origin(name, None), _find_origin(name))}
        for name in [name for name in list(sys.modules) if name.partition(".")[0] in gone]:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


class _StandardFinder:
    """Finds top-level modules of the standard library, for one thread."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if path is not None or threading.get_ident() != self._thread:
            return None
        spec = PathFinder.find_spec(name, _STANDARD_FOLDERS)
        if spec is not None:
            self.found.add(name)
        return spec


def _is_replaced(name: str, module: ModuleType) -> bool:
    """Whether a module of the job has the name of one of the standard library."""
    file = getattr(module, "__file__", None)
    if "." in name or not isinstance(file, str) or os.path.dirname(file) in _STANDARD_FOLDERS:
        return False
    return _differs(file, _find_origin(name))


def _differs(file: str | None, standard: str | None) -> bool:
    """Whether a module's file is another than that of the standard library: folders may be links to each other."""
    try:
        return file is not None and standard is not None and not os.path.samefile(file, standard)
    except OSError:
        return False  # built in, or in an archive


def _find_origin(name: str, folders: list[str] | None = _STANDARD_FOLDERS) -> str | None:
    """Return the file of a top-level module in these folders, or on the job's path."""
    spec = PathFinder.find_spec(name, folders)
    return spec.origin if spec is not None else None
