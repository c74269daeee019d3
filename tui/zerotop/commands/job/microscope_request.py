"""Asking a running job for a look through the microscope: a request in the session's directory, which its ranks take in."""

from __future__ import annotations

import json
import os

from zerotop_probe.recording.directory import MICROSCOPE_FILE


def request_trace(session: str, *, steps: int, stacks: bool, after: int = 0) -> int:
    """Leaves a request for all ranks and returns its number, which is above those before and above ``after``.

    Raises OSError if it cannot be written.
    """
    target = os.path.join(session, MICROSCOPE_FILE)
    request = max(after, _read_last_request(target)) + 1
    with open(target + ".new", "w", encoding="utf-8") as file:
        json.dump({"request": request, "steps": steps, "stacks": stacks}, file)
    os.replace(target + ".new", target)
    return request


def _read_last_request(path: str) -> int:
    """The number of the request before; 0 where there was none."""
    try:
        with open(path, "rb") as file:
            return max(0, int(json.load(file)["request"]))
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return 0
