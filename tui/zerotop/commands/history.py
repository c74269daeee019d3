"""``zerotop history``: the runs of each command over time."""

from __future__ import annotations

import argparse
import getpass
import hashlib
import json
import math
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from zerotop.analysis.formatting import format_bytes, format_count, format_long_time, format_percent, format_seconds
from zerotop.analysis.reports.recording_index import ListedRecording, Overviews
from zerotop.analysis.reports.recording_summary import Overview
from zerotop.analysis.reports.run_history import CommandHistory, group_runs, read_shared_runs, write_shared_runs
from zerotop.analysis.text_tables import align_columns
from zerotop.commands.common.errors import USAGE, Problem, describe_error
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.exit_messages import write_messages
from zerotop.commands.recordings import open_overviews

_HEADINGS = ("runs", "failed", "iteration", "peak", "lost", "GPU hours", "idle", "found in", "command")
_PROGRESS_S = 2.0
_MOST_FINDINGS = 2


def history(options: argparse.Namespace) -> int:
    """Print a line for each command, or JSON. Return 0."""
    if options.history is not None and not Path(options.history).is_dir():
        raise Problem(f"There is no folder {options.history}: create it first, or choose another one", USAGE)
    runs = _read_runs(open_overviews())
    if options.history is not None:
        runs = list(_share_runs(Path(options.history), runs))
    histories = group_runs(runs)
    if options.json:
        print(json.dumps([one.as_json() for one in histories], indent=1))
        return 0
    if not histories:
        print("No recordings yet. Record a job with: zerotop run -- COMMAND")
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in align_columns([_HEADINGS, *map(_format_row, histories)], ">>>>>>><<"):
        print(line[:columns])
    if unsearched := sum(one.unsearched for one in histories):
        write_messages(f"Findings were not searched in {format_count(unsearched, 'run')}: running, damaged or very large")
    return 0


def _read_runs(overviews: Overviews) -> list[Overview]:
    """Read all recordings of a folder and search their findings, which is kept for the next time."""
    overviews.read_all()
    told_s = time.monotonic()
    try:
        while overviews.judge_next(most=None) is not None:
            if sys.stderr.isatty() and time.monotonic() - told_s > _PROGRESS_S:
                told_s = time.monotonic()
                left = sum(_is_due(one) for one in overviews.recordings)
                write_messages(f"Searching the findings of {format_count(left, 'more recording')}, once")
    finally:
        overviews.save_cache()
    return [one.overview for one in overviews.recordings if one.overview is not None]


def _is_due(recording: ListedRecording) -> bool:
    return recording.overview is not None and recording.overview.worst is None


def _share_runs(folder: Path, runs: list[Overview]) -> Iterator[Overview]:
    """Add the recordings in a shared folder and the summaries of the team; leave the own ones there."""
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    own = [*runs, *_read_runs(open_overviews(folder, f"overviews-{name}.json"))]
    yield from own
    member = _name_member()
    for run in read_shared_runs(folder, but=member):
        if isinstance(run, str):
            write_messages(run)
        else:
            yield run
    try:
        write_shared_runs(folder, member, [run for run in own if run.command and not run.problem])
    except OSError as error:
        write_messages(f"The summaries of these runs were not left in {folder}: {describe_error(error)}")


def _name_member() -> str:
    user = "unknown"
    with suppress(OSError, KeyError):  # a user without an entry in the list of users
        user = getpass.getuser()
    return re.sub(r"[^\w.-]", "_", f"{user}-{socket.gethostname()}")


def _format_row(one: CommandHistory) -> list[str]:
    peak = "" if one.peak is None else f"{format_bytes(one.peak[0])}{' host' if one.peak[1] else ''}"
    found = [f"{name} in {count}" for name, count in one.findings.most_common(_MOST_FINDINGS)]
    found += [f"{len(one.findings) - len(found)} more"] * (len(one.findings) > len(found))
    cells = [
        str(len(one.runs)),
        str(one.failed or ""),
        _format_known(one.iteration_s, format_seconds),
        peak,
        _format_known(one.lost_s, format_long_time),
        _format_known(one.gpu_s / 3600, lambda hours: f"{hours:,.2f}"),
        _format_known(one.idle_share, format_percent),
        ", ".join(found),
        shlex.join(word.rpartition("/")[2] or word for word in one.command),
    ]
    return [escape_unprintable(cell) for cell in cells]


def _format_known(value: float, write: Callable[[float], str]) -> str:
    return "" if math.isnan(value) else write(value)
