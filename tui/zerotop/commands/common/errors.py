"""Errors that end a command: a sentence for the user and an exit code."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import TypeGuard

from zerotop_probe.outside.causes import describe_cause

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class Problem(Exception):
    """The command cannot be carried out; the text is a sentence for the user."""

    def __init__(self, sentence: str, code: int = FAILED) -> None:
        super().__init__(sentence)
        self.code = code


def describe_error(error: BaseException) -> str:
    """Return an exception's text without Python's ``[Errno 13]``; for a limit that is too low, with its name."""
    if is_missing_package(error):
        return f"This needs the Python package {error.name}, which is not installed here: pip install {error.name}"
    if isinstance(error, MemoryError):
        return "There is too little memory. Raise the limit (ulimit -v), or end other programs"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        cause = describe_cause(error)
        return f"{cause[0].upper()}{cause[1:]}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}{_describe_folder(error)}" if error.filename else str(error.strerror)
    return str(error) or type(error).__name__


def is_missing_package(error: BaseException) -> TypeGuard[ModuleNotFoundError]:
    """Return whether an import failed because a package of others is missing."""
    return isinstance(error, ModuleNotFoundError) and not str(error.name or "zerotop").startswith("zerotop")


def suggest_name(wrong: str, known: Iterable[str]) -> str:
    """Return ``. Did you mean NAME?`` with the known name that is closest; "" if none is close."""
    import difflib

    names = {name.lstrip("-"): name for name in known}  # the dashes alone would make --theme like --help
    likely = difflib.get_close_matches(wrong.lstrip("-"), names, 1)
    return f". Did you mean {names[likely[0]]}?" if likely else ""


def _describe_folder(error: OSError) -> str:
    """Return a sentence about a missing folder, if it is the reason why a file could not be opened or created."""
    folder = os.path.dirname(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else ""
    is_missing = error.errno == errno.ENOENT and folder and not os.path.isdir(folder)
    return f". There is no folder {folder}: create it first, or choose another one" if is_missing else ""
