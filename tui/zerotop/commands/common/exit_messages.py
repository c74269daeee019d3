"""Messages after a job has ended: its result, and the missing parts of its recording."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from zerotop.commands.common.escape import escape_unprintable
from zerotop_probe.recording import directory, events

if TYPE_CHECKING:
    from zerotop.analysis.views.job_exit import Ending


def describe_end(end: Ending) -> list[str]:
    """Return sentences about a failure and about lost records; none if all went well."""
    from zerotop.analysis.views.job_exit import UNSEEN_END

    result = "" if end.exit_code == 0 else end.text or UNSEEN_END
    return [text for text in (result, describe_losses(end.lost_records, end.lost_output_bytes)) if text]


def describe_losses(lost_records: int, lost_output_bytes: int) -> str:
    """Return a sentence about missing parts of a recording; "" if it is complete."""
    from zerotop.analysis.views.job_exit import Losses  # imports NumPy, which other messages do not need

    return Losses(lost_records, lost_output_bytes).loss_sentence


def describe_rank_losses(path: str) -> list[str]:
    """Return sentences about records of ranks that are missing from a recording; none for a job without ranks."""
    if not any(Path(path).glob("events-rank*")):
        return []
    from zerotop.analysis.views.job_exit import count_losses
    from zerotop.analysis.views.notices import describe_missing_steps
    from zerotop.session.reader import Session, SessionError

    try:
        session = Session.open(Path(path))
    except SessionError:
        return []
    return [text for text in (count_losses(session.at()).loss_sentence, describe_missing_steps(session)) if text]


def describe_missing_probe(path: str) -> list[str]:
    """Return sentences about ranks in which the probe was not loaded."""
    files = Path(path).glob("events-node*")
    if not any(f'"{events.ProbeMissing.event_name}"'.encode() in _read_bytes(file) for file in files):
        return []  # NumPy need not be imported
    from zerotop.analysis.processes.missing_probe import describe_missing_probes
    from zerotop.session.reader import Session, SessionError

    try:
        session = Session.open(Path(path))
    except SessionError:
        return []
    return describe_missing_probes(session.at(session.last_written_ns))


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def describe_place(path: str | Path) -> str:
    """Return a sentence about the recording's place, or the reason why there is none."""
    if directory.has_recording(str(path)):
        why = directory.read_session_info(str(path)).get(directory.ELSEWHERE)
        return f"recorded in {path}" + (f" instead: {why}" if why else "")
    is_there = (Path(path) / directory.SESSION_FILE).is_file()
    reason = "nothing could be written to it" if is_there else "it was moved or removed while the job ran"
    return f"not recorded in {path}: {reason}"


def write_messages(*sentences: str) -> None:
    """Write lines to standard error; if that fails, the exit code is unaffected."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    text = "".join(f"zerotop: {escape_unprintable(sentence)}\n" for sentence in sentences)
    with suppress(OSError):
        os.write(2, text.encode(encoding, "backslashreplace"))
