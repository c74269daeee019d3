"""Requesting an allocation trace: a file in the recording's directory that the ranks poll."""

from __future__ import annotations

import json
import os
from pathlib import Path

from zerotop.recording.atomic_write import write_text_file
from zerotop_probe.recording.directory import MICROSCOPE_FILE
from zerotop_probe.recording.plain_files import open_plain_file

_MAX_REQUEST_BYTES = 1 << 12


def request_trace(recording: str, *, steps: int, stacks: bool, after: int = 0) -> int:
    """Write a request for all ranks; return its number, higher than any earlier one and than ``after``. Raises OSError."""
    target = os.path.join(recording, MICROSCOPE_FILE)
    request = max(after, _read_last_request(target)) + 1
    # The ranks may belong to another user, who owns the folder.
    write_text_file(Path(target), json.dumps({"request": request, "steps": steps, "stacks": stacks}), mode=0o644)
    return request


def _read_last_request(path: str) -> int:
    """Return the number of the previous request; 0 without one."""
    try:
        with open(open_plain_file(path), "rb") as file:
            return max(0, int(json.loads(file.read(_MAX_REQUEST_BYTES))["request"]))
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return 0
