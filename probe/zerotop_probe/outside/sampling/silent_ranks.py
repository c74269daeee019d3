"""When a rank that has not reported is worth a word, and which.

A rank reports when it makes its engine, which may be an hour after its start (downloads, tokenizing, a
queue), or never (it is not a DeepSpeed job at all). So silence alone says nothing, and no time limit is a
rule. What is said, once per rank:

1. At once, if the rank cannot report: it runs Python with ``-E``, ``-I`` or ``-S``, or its launcher has not
   passed on the variables that the probe needs. This is seen on its command line and in its environment.
2. When other ranks have reported ``PEERS_S`` ago and this one has not: engines are made together, since
   making one is a collective operation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

PEERS_S = 30.0

# Options of Python that take the next argument, and those after which the script's own arguments begin.
_VALUE_OPTIONS = ("W", "X")
_LAST_OPTIONS = ("c", "m")
_BLIND_OPTIONS = {"E": "ignores PYTHONPATH", "I": "ignores PYTHONPATH", "S": "does not load site modules"}


def is_python(arguments: Sequence[str]) -> bool:
    """Whether a command line is a Python interpreter's."""
    return bool(arguments) and os.path.basename(arguments[0]).lstrip("-").startswith(("python", "pypy"))


def find_blind_option(arguments: Sequence[str]) -> str | None:
    """The option on a Python command line that keeps the probe out, for example "-I", or None."""
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


def explain_blind(arguments: Sequence[str], *, carries_session: bool) -> str | None:
    """Why this process can never report, as a sentence; None if it can."""
    option = find_blind_option(arguments)
    if option is not None:
        return f"it runs python {option}, which {_BLIND_OPTIONS[option[1]]}: it is seen from outside only"
    if not carries_session:
        return "its launcher did not pass on PYTHONZEROTOP_SESSION: it is seen from outside only"
    return None


def explain_late(peers: int, since_s: float) -> str | None:
    """Why a rank should have reported by now; ``peers`` others have, the first ``since_s`` seconds ago."""
    if peers and since_s > PEERS_S:
        others = "another rank has" if peers == 1 else f"{peers} other ranks have"
        return f"{others} made an engine, the first {since_s:.0f} s ago, and it has not"
    return None
