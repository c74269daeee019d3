"""``zerotop recordings``: the recordings in the state directory, newest first."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from zerotop.analysis.reports.recording_index import ListedRecording, Overviews
from zerotop.analysis.reports.recording_summary import DETACHED, Overview
from zerotop.analysis.text_tables import align_columns
from zerotop.analysis.views.job_exit import Losses
from zerotop.commands.common.escape import escape_unprintable
from zerotop.recording import catalog
from zerotop.recording.reader import Recording
from zerotop_probe.outside.job import job_control


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
        from zerotop.commands.common.pruning import prune_recordings

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
