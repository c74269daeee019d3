"""``zerotop recordings --prune``: delete recordings by age, total size, or all that have ended."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime

from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.reports.recording_index import ListedRecording, Overviews
from zerotop.analysis.text_tables import align_columns
from zerotop.commands.common.deletion import choose_prunable, delete_recording, describe_obstacle, sum_bytes
from zerotop.commands.common.errors import FAILED, USAGE, Problem
from zerotop.commands.common.escape import escape_unprintable


def prune_recordings(options: argparse.Namespace, overviews: Overviews) -> int:
    """List the recordings to delete, ask, and delete them. Return 0, or 1 if some could not be deleted."""
    if options.older_than is None and options.total_size is None and not options.ended:
        raise Problem("Say what to delete: --older-than AGE, --total-size SIZE, or --ended for all of ended jobs", USAGE)
    chosen = choose_prunable(
        overviews.read_all(), max_age_s=options.older_than, max_bytes=options.total_size, ended=options.ended
    )
    if not chosen:
        print("There is nothing to delete.")
        return 0
    for line in align_columns(map(_format_row, chosen), "<><"):
        print(line)
    total = f"{_count_recordings(chosen)}, {format_bytes(sum_bytes(chosen))}"
    if options.dry_run:
        print(f"Would delete {total}.")
        return 0
    if not options.yes and not _ask_user(f"Delete {total}, permanently? [y/N] "):
        print("Nothing was deleted.")
        return 0
    failed = [recording for recording in chosen if not _delete(recording)]
    deleted = [recording for recording in chosen if recording not in failed]
    print(f"Deleted {_count_recordings(deleted)}, {format_bytes(sum_bytes(deleted))}.")
    return FAILED if failed else 0


def _format_row(recording: ListedRecording) -> list[str]:
    changed = datetime.fromtimestamp(recording.stamp.changed_ns / 1e9).isoformat(" ", "minutes")
    return [escape_unprintable(recording.name), format_bytes(recording.stamp.bytes), f"last written {changed}"]


def _count_recordings(recordings: list[ListedRecording]) -> str:
    return f"{len(recordings)} recording" + ("" if len(recordings) == 1 else "s")


def _ask_user(question: str) -> bool:
    if not sys.stdin.isatty():
        raise Problem("--prune asks before it deletes: add --yes where nobody can answer, or --dry-run", USAGE)
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _delete(recording: ListedRecording) -> bool:
    """Delete a recording, unless its job has begun to run again; return whether it is gone."""
    obstacle = describe_obstacle(recording)
    try:
        if not obstacle:
            delete_recording(recording)
            return True
    except OSError as error:
        obstacle = f"{recording.path} could not be deleted: {error.strerror}."
    print(f"zerotop: {escape_unprintable(obstacle)}", file=sys.stderr)
    return False
