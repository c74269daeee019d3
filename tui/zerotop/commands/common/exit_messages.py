"""What is said when a job has ended: how it did, and what its recording lacks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from zerotop.commands.common.escape import escape_unprintable

if TYPE_CHECKING:
    from zerotop.analysis.views.job_exit import Ending


def describe_end(end: Ending) -> list[str]:
    """The sentences worth saying: nothing of what went well."""
    from zerotop.analysis.views.job_exit import (  # which NumPy comes with, and others only have a word to say
        UNSEEN_END,
        Losses,
    )

    how = "" if end.exit_code == 0 else end.text or UNSEEN_END
    return [words for words in (how, Losses(end.lost_records, end.lost_output_bytes).loss_sentence) if words]


def write_messages(*sentences: str) -> None:
    """Writes lines to standard error. Where that is closed or full, the exit code stays what it was."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    text = "".join(f"zerotop: {escape_unprintable(sentence)}\n" for sentence in sentences)
    with suppress(OSError):
        os.write(2, text.encode(encoding, "backslashreplace"))
