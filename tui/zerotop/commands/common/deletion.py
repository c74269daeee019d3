"""Deletion of recordings in the state directory: a single one, old ones, or the oldest beyond a total size."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence

from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.recording import catalog
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording.directory import SESSION_FILE


def describe_obstacle(recording: ListedRecording) -> str:
    """Return why a recording cannot be deleted; "" if it can."""
    path, root = recording.path.absolute(), catalog.find_default_folder().absolute()
    if recording.is_live or (path.is_dir() and job_control.is_job_alive(str(path))):
        return f"{recording.name} is live: it can be deleted once its job has ended."
    if path.parent != root:
        return f"{path} is outside {root}: delete it yourself."
    if path.is_symlink():
        return f"{path} is a symbolic link: delete it yourself."
    if path.is_dir() and not (path / SESSION_FILE).is_file():
        return f"{path} no longer holds a recording."
    return ""


def delete_recording(recording: ListedRecording) -> None:
    """Delete a recording permanently. Raise OSError."""
    if recording.path.is_dir():
        shutil.rmtree(recording.path)
    else:
        recording.path.unlink()


def choose_prunable(
    recordings: Iterable[ListedRecording], *, max_age_s: float | None, max_bytes: int | None, ended: bool
) -> list[ListedRecording]:
    """Return the recordings to delete, oldest change first; never one whose job runs.

    Args:
        max_age_s: delete those that did not change for longer.
        max_bytes: delete the oldest, until the others together are no larger.
        ended: delete all.
    """
    by_age = sorted(recordings, key=lambda recording: recording.stamp.changed_ns)
    total = sum(recording.stamp.bytes for recording in by_age)
    oldest_ns = time.time_ns() - int(max_age_s * 1e9) if max_age_s is not None else 0
    chosen = []
    for recording in by_age:
        is_excess = max_bytes is not None and total > max_bytes
        if (ended or is_excess or recording.stamp.changed_ns < oldest_ns) and not describe_obstacle(recording):
            chosen.append(recording)
            total -= recording.stamp.bytes
    return chosen


def sum_bytes(recordings: Sequence[ListedRecording]) -> int:
    """Return the size of recordings on disk."""
    return sum(recording.stamp.bytes for recording in recordings)
