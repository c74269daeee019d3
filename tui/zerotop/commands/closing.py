"""What is said when a job has ended: how it did, and what its recording lacks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from zerotop.analysis.endings import NOBODY_SAW, Ending


def loss(records: int, output_bytes: int) -> str:
    """A sentence about what could not be written; "" if everything was."""
    parts = [f"{records} records"] if records else []
    parts += [f"{output_bytes} bytes of the job's output"] if output_bytes else []
    return f"The recording is incomplete: {' and '.join(parts)} could not be written." if parts else ""


def last_words(end: Ending) -> list[str]:
    """The sentences worth saying: nothing of what went well."""
    how = "" if end.exit_code == 0 else end.text or NOBODY_SAW
    return [words for words in (how, loss(end.lost_records, end.lost_output_bytes)) if words]


def say(*sentences: str) -> None:
    """Writes lines to standard error. Where that is closed or full, the exit code stays what it was."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    text = "".join(f"zerotop: {sentence}\n" for sentence in sentences)
    with suppress(OSError):
        os.write(2, text.encode(encoding, "backslashreplace"))
