"""Explaining why a rank has not reported.

A rank reports when it creates its engine, which may be an hour after its start (downloads, tokenizing, a queue), or never if
the job does not use DeepSpeed. So silence alone means nothing, and no time limit would be right. It is explained once per
rank, if other ranks reported at least ``PEERS_S`` ago: creating an engine is a collective operation, so ranks report
together. A rank without the probe never reports, see ``missing_probe``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

PEERS_S = 30.0

# Python options that take the next argument, and those after which the program's own arguments begin.
_VALUE_OPTIONS = ("W", "X")
_LAST_OPTIONS = ("c", "m")
_BLIND_OPTIONS = "EIS"


def is_python(arguments: Sequence[str]) -> bool:
    """Whether a command line runs a Python interpreter."""
    return bool(arguments) and os.path.basename(arguments[0]).lstrip("-").startswith(("python", "pypy"))


def find_blind_option(arguments: Sequence[str]) -> str | None:
    """Return the option of a Python command line that disables the probe, for example "-I", or None."""
    position = 1
    while position < len(arguments):
        argument = arguments[position]
        if not argument.startswith("-") or argument.startswith("--") or argument == "-":
            return None
        for index, letter in enumerate(argument[1:]):
            if letter in _BLIND_OPTIONS:
                return f"-{letter}"
            if letter in _LAST_OPTIONS:
                return None
            if letter in _VALUE_OPTIONS:
                position += not argument[index + 2 :]
                break
        position += 1
    return None


def explain_late(peers: int, since_s: float) -> str | None:
    """Return why a rank should have reported, or None; ``peers`` others have, the first ``since_s`` seconds ago."""
    if peers and since_s > PEERS_S:
        others = "another rank" if peers == 1 else f"{peers} other ranks"
        return f"{others} created an engine, the first {since_s:.0f} s ago, but it has not"
    return None
