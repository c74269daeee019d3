"""Run the whole program as a user does, on little jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terminals import Terminal

ZEROTOP = [sys.executable, "-m", "zerotop"]


def make_environment(state: Path, **more: str) -> dict[str, str]:
    """Return an environment whose recordings lie in ``state``, without variables of a job that runs these tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONZEROTOP")}
    return inherited | {"XDG_STATE_HOME": str(state), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | more


def run_zerotop(state: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run zerotop to its end; its output is captured unless ``options`` say otherwise."""
    chosen: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": make_environment(state),
        "timeout": 60,
    }
    done: subprocess.CompletedProcess[bytes] = subprocess.run([*ZEROTOP, *arguments], check=False, **chosen | options)
    assert b"Traceback" not in (done.stderr or b"") or b"\nzerotop: " in done.stderr, done.stderr.decode()
    return done


def run_headless(recording: Path, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run ``command`` headless, recorded in ``recording``."""
    return run_zerotop(recording.parent, "run", "--headless", "--recording", str(recording), "--", *command, **options)


def start_on_terminal(
    state: Path,
    *arguments: str,
    rows: int = 30,
    columns: int = 100,
    folder: Path | None = None,
    ignoring: str = "",
    **more: str,
) -> Terminal:
    """Start the program on a terminal of this size.

    ``ignoring`` names a signal ("HUP") that the program ignores from its start. ``more`` are variables of its environment.
    """
    command = [*ZEROTOP, *arguments]
    if ignoring:
        command = ["/bin/sh", "-c", f'trap "" {ignoring}; exec "$@"', "sh", *command]
    return Terminal(command, environment=make_environment(state, **more), folder=folder or state, rows=rows, columns=columns)
