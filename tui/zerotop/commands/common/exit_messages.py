"""Messages after a job has ended: its result, and what its recording lacks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from zerotop.commands.common.escape import escape_unprintable

if TYPE_CHECKING:
    from zerotop.analysis.views.job_exit import Ending


def describe_end(end: Ending) -> list[str]:
    """Return sentences about a failure and about lost records; none if all went well."""
    from zerotop.analysis.views.job_exit import UNSEEN_END

    result = "" if end.exit_code == 0 else end.text or UNSEEN_END
    return [text for text in (result, describe_losses(end.lost_records, end.lost_output_bytes)) if text]


def describe_losses(lost_records: int, lost_output_bytes: int) -> str:
    """Return a sentence about what a recording lacks; "" if it is complete."""
    from zerotop.analysis.views.job_exit import Losses  # imports NumPy, which other messages do not need

    return Losses(lost_records, lost_output_bytes).loss_sentence


def write_messages(*sentences: str) -> None:
    """Write lines to standard error; if that fails, the exit code is unaffected."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    text = "".join(f"zerotop: {escape_unprintable(sentence)}\n" for sentence in sentences)
    with suppress(OSError):
        os.write(2, text.encode(encoding, "backslashreplace"))
