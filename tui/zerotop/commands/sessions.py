"""``zerotop sessions``: what was recorded in the usual place, newest first."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from zerotop.commands.closing import ending, loss
from zerotop.session import catalog
from zerotop.session.reader import Session, SessionError
from zerotop_probe.outside import control


def is_live(session: Session) -> bool:
    """Whether the job runs or somebody still writes."""
    return control.job_alive(str(session.path)) or session.live


def live_names() -> list[str]:
    """The names of the live sessions, newest first."""
    return [row["name"] for row in map(_describe, catalog.listing()) if row["state"] == "live"]


def sessions(options: argparse.Namespace) -> int:
    """Prints the list, as a table or as JSON. Returns 0."""
    rows = [_describe(path) for path in catalog.listing()]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print("Nothing was recorded yet: zerotop run -- COMMAND")
        return 0
    width = max(len(row["name"]) for row in rows)
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        for line in _lines(row, width):
            print(line[:most])
    return 0


def _lines(row: dict[str, Any], width: int) -> list[str]:
    """A session's line, and one about what it lacks."""
    what = row.get("problem") or shlex.join(row["command"])
    line = f"{row['name']:<{width}}  {_end(row):<10}  {row['started'] or '?':<19}  {what}"
    lacking = loss(row["lost_records"], row["lost_output_bytes"])
    return [_printable(text) for text in (line, f"  {lacking}" if lacking else "") if text]


def _end(row: dict[str, Any]) -> str:
    if row["state"] != "ended":
        return str(row["state"])
    return "exit ?" if row["exit_code"] is None else f"exit {row['exit_code']}"


def _printable(text: str) -> str:
    """A program's text or a terminal's escapes in a command line stay on their line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _describe(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"name": path.name, "path": str(path), "command": [], "started": None}
    row |= {"exit_code": None, "ended": "", "lost_records": 0, "lost_output_bytes": 0}
    try:
        session = Session.open(path)
    except SessionError as error:
        return row | {"state": "unreadable", "problem": str(error)}
    end = ending(session)
    command = session.info.get("command")
    return row | {
        "state": "live" if is_live(session) else "ended",
        "started": _date(session.begin_ns),
        "command": [str(word) for word in command] if isinstance(command, list) else [],
        "exit_code": end.exit_code,
        "ended": end.text,
        "lost_records": end.lost_records,
        "lost_output_bytes": end.lost_output_bytes,
    }


def _date(unix_ns: int) -> str | None:
    try:
        return datetime.fromtimestamp(unix_ns / 1e9).isoformat(" ", "seconds") if unix_ns else None
    except (ValueError, OverflowError, OSError):  # no time that a calendar has: the file is damaged
        return None
