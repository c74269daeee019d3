"""Summaries of runs in a folder that a team shares: a Parquet file for each member, which only that member writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import polars

from zerotop.analysis.reports.recording_summary import Overview
from zerotop.recording.atomic_write import write_atomically
from zerotop.recording.headers import DAMAGE_ERRORS

_HINTS = get_type_hints(Overview)
_PREFIX, _SUFFIX = "zerotop-runs-", ".parquet"
_MODE = 0o644  # for the team
# One member's summaries of 10,000 runs take 10 MB; a file that is much larger is no such file.
_MOST_BYTES = 256 << 20


def write_shared_runs(folder: Path, member: str, runs: Sequence[Overview]) -> None:
    """Write the summaries of one member's runs, or nothing if there are none. Raise OSError."""
    if not runs:
        return
    rows = [_to_row(run) for run in runs]
    with write_atomically(folder / f"{_PREFIX}{member}{_SUFFIX}") as partial:
        partial.touch(_MODE, exist_ok=False)
        polars.DataFrame(rows, infer_schema_length=None).write_parquet(partial)


def read_shared_runs(folder: Path, *, but: str) -> Iterator[Overview | str]:
    """Read the summaries of all members but one; instead of a file that cannot be read comes a sentence."""
    for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
        if path.name == f"{_PREFIX}{but}{_SUFFIX}":
            continue
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError("too large")
            yield from [_from_row(row) for row in polars.read_parquet(path).to_dicts()]
        except (OSError, polars.exceptions.PolarsError, *DAMAGE_ERRORS):
            yield f"{path} is not a file of summaries that this version can read, so its runs are missing here."


def _to_row(run: Overview) -> dict[str, object]:
    # Lists of one type whatever the first runs have, and values that any reader of Parquet knows.
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in run.as_json().items()}


def _from_row(row: dict[str, object]) -> Overview:
    lists = {name: json.loads(str(row[name])) for name in ("command", "iterations", "findings")}
    run = Overview.from_json({**row, **lists})
    for name, hint in _HINTS.items():
        value = getattr(run, name)
        items = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(item, _list_types(hint)) for item in items):
            raise TypeError(f"{name} has another type")
    return run


def _list_types(hint: Any) -> tuple[type, ...]:
    """Return the types of a field's values, or of those in its tuple; an int may stand for a float."""
    parts = [part for part in (get_args(hint) or (hint,)) if part is not ...]
    return tuple(parts) + ((int,) if float in parts else ())
