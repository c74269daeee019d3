"""The programs that start ranks, recognized by their command lines."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zerotop_probe.outside.sampling.ranks import silent_ranks
from zerotop_probe.recording import launchers


def find_launcher(arguments: Sequence[str]) -> str:
    """Return the launcher that a command line runs; "" for any other program."""
    words = _find_script(arguments) if silent_ranks.is_python(arguments) else arguments[:1]
    names = (name for word in words for name in (word, os.path.basename(word)))
    return next(filter(None, map(launchers.find_program, names)), "")


def _find_script(arguments: Sequence[str]) -> Sequence[str]:
    """Return the script or module that a Python command line runs, as a list of at most one word."""
    for position, argument in enumerate(arguments[1:], 1):
        if argument == "-m":
            return arguments[position + 1 : position + 2]
        if argument == "-c":
            return []
        if not argument.startswith("-") and arguments[position - 1] not in ("-W", "-X"):
            return [argument]
    return []
