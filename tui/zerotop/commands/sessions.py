"""``zerotop sessions``: what was recorded in the usual place, newest first."""

from __future__ import annotations

import argparse
import json
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

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
    for row in rows:
        command = shlex.join(row["command"])
        print(f"{row['name']:<{width}}  {row['state']:<10}  {row['started'] or '?':<19}  {command}")
    return 0


def _describe(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"name": path.name, "path": str(path), "command": [], "started": None}
    try:
        session = Session.open(path)
    except SessionError as error:
        return row | {"state": "unreadable", "problem": str(error)}
    started = datetime.fromtimestamp(session.begin_ns / 1e9).isoformat(" ", "seconds")
    command = [str(word) for word in session.info.get("command") or []]
    return row | {
        "state": "live" if is_live(session) else "ended",
        "started": started if session.begin_ns else None,
        "command": command,
    }
