"""``zerotop sessions``: what was recorded in the usual place, newest first."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from datetime import datetime
from typing import Any

from zerotop.analysis.reports.recording_index import Overviews, Recording
from zerotop.analysis.reports.recording_summary import DETACHED, Overview
from zerotop.analysis.views.job_exit import Losses
from zerotop.commands.common.escape import escape_unprintable
from zerotop.session import catalog
from zerotop.session.reader import Session
from zerotop_probe.outside.job import job_control


def is_live(session: Session) -> bool:
    """Whether somebody writes it, or could go on to: its job runs, and nobody has detached from that."""
    if not session.path.is_dir():
        return False
    facts = job_control.read_facts(str(session.path))
    return session.is_live or (facts.is_alive() and not facts.detached)


def list_live_names() -> list[str]:
    """The names of the live sessions, newest first."""
    return [recording.name for recording in open_overviews().read_all() if recording.is_live]


def open_overviews() -> Overviews:
    """The sessions in the usual place."""
    root = catalog.find_default_folder()
    return Overviews(root, root.with_name("overviews.json"), lambda path: job_control.is_job_alive(str(path)))


def sessions(options: argparse.Namespace) -> int:
    """Prints the list, as a table or as JSON. Returns 0."""
    rows = [_describe_recording(recording) for recording in open_overviews().read_all()]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print("Nothing was recorded yet: zerotop run -- COMMAND")
        return 0
    width = max(len(row["name"]) for row in rows)
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        for line in _format_row(row, width):
            print(line[:most])
    return 0


def _format_row(row: dict[str, Any], width: int) -> list[str]:
    """A session's line, and one about what it lacks."""
    what = row.get("problem") or shlex.join(row["command"])
    line = f"{row['name']:<{width}}  {_format_end(row):<10}  {row['started'] or '?':<19}  {what}"
    lacking = Losses(row["lost_records"], row["lost_output_bytes"]).loss_sentence
    return [escape_unprintable(text) for text in (line, f"  {lacking}" if lacking else "") if text]


def _format_end(row: dict[str, Any]) -> str:
    if row["state"] != "ended":
        return str(row["state"])
    if row["detached"]:
        return DETACHED
    return "exit ?" if row["exit_code"] is None else f"exit {row['exit_code']}"


def _describe_recording(recording: Recording) -> dict[str, Any]:
    about = recording.overview or Overview(recording.name)
    row = {
        "name": recording.name,
        "path": str(recording.path),
        "state": "unreadable" if about.problem else "live" if recording.is_live else "ended",
        "command": list(about.command),
        "started": _format_date(about.begin_ns),
        "exit_code": about.exit_code,
        "detached": about.why == DETACHED,
        "ended": about.end,
        "lost_records": about.lost_records,
        "lost_output_bytes": about.lost_output_bytes,
    }
    if about.problem:
        return row | {"problem": about.problem}
    facts = about.as_json()
    names = ("model", "zero_stage", "offload_optimizer", "offload_parameters", "dtype", "ranks", "steps", "total_steps")
    figures = ("seconds", "iteration_s", "peak_bytes", "peak_on_host")
    return row | {name: facts[name] for name in (*names, *figures)} | {"bytes": recording.stamp.bytes}


def _format_date(unix_ns: int) -> str | None:
    try:
        return datetime.fromtimestamp(unix_ns / 1e9).isoformat(" ", "seconds") if unix_ns else None
    except (ValueError, OverflowError, OSError):  # no time that a calendar has: the file is damaged
        return None
