"""Requesting an allocation trace: a file in the session's directory that the ranks poll."""

from __future__ import annotations

import json
import os

from zerotop_probe.recording.directory import MICROSCOPE_FILE


def request_trace(session: str, *, steps: int, stacks: bool, after: int = 0) -> int:
    """Write a request for all ranks; return its number, higher than any earlier one and than ``after``. Raises OSError."""
    target = os.path.join(session, MICROSCOPE_FILE)
    request = max(after, _read_last_request(target)) + 1
    with open(target + ".new", "w", encoding="utf-8") as file:
        json.dump({"request": request, "steps": steps, "stacks": stacks}, file)
    os.replace(target + ".new", target)
    return request


def _read_last_request(path: str) -> int:
    """Return the number of the previous request; 0 without one."""
    try:
        with open(path, "rb") as file:
            return max(0, int(json.load(file)["request"]))
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return 0
