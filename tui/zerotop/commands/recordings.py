"""``zerotop recordings``: the recordings in the state directory, newest first; ``--prune`` deletes some or all."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.reports.recording_index import ListedRecording, Overviews
from zerotop.analysis.reports.recording_summary import DETACHED, Overview
from zerotop.analysis.text_tables import align_columns
from zerotop.analysis.views.job_exit import Losses
from zerotop.commands.common.deletion import choose_prunable, delete_recording, describe_obstacle, sum_bytes
from zerotop.commands.common.errors import FAILED, USAGE, Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.recording import catalog
from zerotop.recording.reader import Recording
from zerotop_probe.outside.job import job_control


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
    for line in align_columns(map(_format_deleted, chosen), "<><"):
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


def _format_deleted(recording: ListedRecording) -> list[str]:
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


def is_live(recording: Recording) -> bool:
    """Whether the recording is being written or can be resumed: its job runs and nobody detached from it."""
    if not recording.path.is_dir():
        return False
    facts = job_control.read_facts(str(recording.path))
    return recording.is_live or (facts.is_alive() and not facts.detached)


def list_live_names() -> list[str]:
    """Return the names of the live recordings, newest first."""
    return [recording.name for recording in open_overviews().read_all() if recording.is_live]


def open_overviews(folder: Path | None = None, cache: str = "overviews.json") -> Overviews:
    """Open the index of a folder [the state directory]; ``cache``: the file in the state directory that keeps it."""
    root = catalog.find_default_folder()
    return Overviews(folder or root, root.with_name(cache), lambda path: job_control.is_job_alive(str(path)))


def recordings(options: argparse.Namespace) -> int:
    """Print the list, as a table or as JSON, or delete recordings. Return 0, or 1 if some could not be deleted."""
    if options.prune:
        return prune_recordings(options, open_overviews())
    rows = [describe_recording(recording) for recording in open_overviews().read_all()]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print("No recordings yet. Record a job with: zerotop run -- COMMAND")
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line, row in zip(align_columns(map(_format_row, rows), "<<<<"), rows, strict=True):
        loss = Losses(row["lost_records"], row["lost_output_bytes"]).loss_sentence
        for text in (line, f"  {loss}" if loss else ""):
            if text:
                print(text[:columns])
    return 0


def _format_row(row: dict[str, Any]) -> list[str]:
    description = row.get("problem") or shlex.join(row["command"])
    return [escape_unprintable(cell) for cell in (row["name"], _format_end(row), row["started"] or "?", description)]


def _format_end(row: dict[str, Any]) -> str:
    if row["state"] != "ended":
        return str(row["state"])
    if row["reason"]:
        return str(row["reason"])
    return "exit ?" if row["exit_code"] is None else f"exit {row['exit_code']}"


def describe_recording(recording: ListedRecording) -> dict[str, Any]:
    """Return a recording of the list as plain values."""
    overview = recording.overview or Overview(recording.name)
    row = {
        "name": recording.name,
        "path": str(recording.path),
        "state": "unreadable" if overview.problem else "live" if recording.is_live else "ended",
        "command": list(overview.command),
        "started": _format_date(overview.begin_ns),
        "exit_code": overview.exit_code,
        "reason": overview.why,
        "detached": overview.why == DETACHED,
        "ended": overview.end,
        "lost_records": overview.lost_records,
        "lost_output_bytes": overview.lost_output_bytes,
    }
    if overview.problem:
        return row | {"problem": overview.problem}
    facts = overview.as_json()
    setup = ("model", "kind", "parallelism", "inner_optimizer", "zero_stage", "offload_optimizer", "offload_parameters")
    names = (*setup, "dtype", "ranks", "steps", "total_steps")
    numbers = ("seconds", "iteration_s", "peak_bytes", "peak_on_host")
    return row | {name: facts[name] for name in (*names, *numbers)} | {"bytes": recording.stamp.bytes}


def _format_date(unix_ns: int) -> str | None:
    try:
        return datetime.fromtimestamp(unix_ns / 1e9).isoformat(" ", "seconds") if unix_ns else None
    except (ValueError, OverflowError, OSError):  # a damaged file: outside the calendar's range
        return None
