"""Messages after a job has ended: its result, and the missing parts of its recording."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    from zerotop.recording.reader import Recording, RecordingError

    try:
        recording = Recording.open(Path(path))
    except RecordingError:
        return []
    return [text for text in (count_losses(recording.at()).loss_sentence, describe_missing_steps(recording)) if text]


def describe_missing_probe(path: str) -> list[str]:
    """Return sentences about ranks in which the probe was not loaded."""
    if not _has_event(path, events.ProbeMissing):
        return []
    from zerotop.analysis.processes.missing_probe import describe_missing_probes
    from zerotop.recording.reader import Recording, RecordingError

    try:
        recording = Recording.open(Path(path))
    except RecordingError:
        return []
    return describe_missing_probes(recording.at(recording.last_written_ns))


def has_ranks(path: str) -> bool:
    """Whether ranks are in a recording, trained or not."""
    return any(Path(path).glob("events-rank*")) or _has_event(path, events.RankFound)


def _has_event(path: str, kind: type[events.Event]) -> bool:
    """Whether a sampler wrote an event. NumPy need not be imported for it: its address space may be limited."""
    name = f'"{kind.event_name}"'.encode()
    return any(name in _read_bytes(file) for file in Path(path).glob("events-node*"))


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def describe_place(path: str | Path) -> str:
    """Return a sentence about the recording's place, or the reason why there is none."""
    if directory.has_recording(str(path)):
        why = directory.read_recording_info(str(path)).get(directory.ELSEWHERE)
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


@contextmanager
def keep_exit_code(recording: str | Path) -> Iterator[None]:
    """Turn a fault of zerotop, while it tells what a job's recording says, into a message: the exit code stays the job's."""
    try:
        yield
    except Exception as error:  # whatever reading a recording raises
        write_messages(f"Reading the recording failed: {type(error).__name__}: {error}", describe_place(recording))
