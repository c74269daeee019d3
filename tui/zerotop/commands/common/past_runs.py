"""The last runs of a recording's command, in the folder of the user's recordings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from zerotop.commands.common.exit_messages import has_ranks
from zerotop_probe.outside.job import job_control

# Of so many recordings the command is read, newest first. A large one would take seconds to read.
_MOST_LOOKED_AT, _MOST_BYTES = 300, 128 << 20


def describe_past(recording: str) -> list[str]:
    """Return a sentence that compares a run with the last ones of its command; none without a difference to tell."""
    if not has_ranks(recording):
        return []
    from zerotop.analysis.checks.past_runs import MOST_RUNS, compare_with_past
    from zerotop.analysis.reports.recorded_run import RecordedRun
    from zerotop.recording.reader import Recording, RecordingError

    earlier: list[RecordedRun] = []
    try:
        paths = find_past(Path(recording))
        first = next(paths, None)
        if first is None:
            return []
        run = RecordedRun(Recording.open(Path(recording)), memory=False)
        # Some of them may be too short or of another machine: it looks at twice as many.
        for path in [first, *paths][: 2 * MOST_RUNS]:
            with suppress(RecordingError, OSError):
                earlier.append(RecordedRun(Recording.open(path), memory=False))
        text = compare_with_past(run, earlier)
    except (RecordingError, OSError):
        return []
    return [f"{text[0].upper()}{text[1:]}."] if text else []


def find_past(recording: Path) -> Iterator[Path]:
    """Yield the earlier recordings of the same command, newest first."""
    from zerotop.recording import catalog
    from zerotop.recording.quick_read import read_stamp

    ours = _read_identity(recording)
    if ours is None:
        return
    for path in catalog.list_recordings()[:_MOST_LOOKED_AT]:
        if not path.is_dir() or path.resolve() == recording.resolve():
            continue
        theirs = _read_identity(path)
        if theirs is None or theirs[0] != ours[0] or theirs[1] >= ours[1]:
            continue
        with suppress(OSError):
            if read_stamp(path).bytes <= _MOST_BYTES and not job_control.is_job_alive(str(path)):
                yield path


def _read_identity(path: Path) -> tuple[tuple[str, ...], int] | None:
    """Return what is the same for all runs of the command, and when this one began; None: not recorded."""
    from zerotop.analysis.reports.same_command import build_command_key
    from zerotop.recording.headers import RecordingError
    from zerotop.recording.recording_info import load_info
    from zerotop.recording.storage import Directory

    try:
        info = load_info(Directory(path))
    except RecordingError:
        return None
    command = info.get("command")
    return (build_command_key(command, info.get("working_directory") or ""), info["clock"]["unix_ns"]) if command else None
