"""Runs over time: how often each command ran, how fast, what was found, and what its GPUs did.

Summaries of runs in a folder that a team shares: a Parquet file for each member, which only that member writes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args, get_type_hints

import polars

from zerotop.analysis.reports.recording_summary import Overview
from zerotop.analysis.reports.same_command import build_command_key
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


@dataclass(frozen=True, slots=True)
class CommandHistory:
    """The runs of one command, newest first; never empty."""

    runs: tuple[Overview, ...]

    @property
    def command(self) -> tuple[str, ...]:
        """The command of the newest run."""
        return self.runs[0].command

    @property
    def failed(self) -> int:
        """How many runs ended with another exit code than 0."""
        return sum(run.exit_code not in (0, None) for run in self.runs)

    @property
    def iteration_s(self) -> float:
        """The median over the runs of their median iteration; NaN: none trained."""
        known = [run.iteration_s for run in self.runs if not math.isnan(run.iteration_s)]
        return median(known) if known else math.nan

    @property
    def peak(self) -> tuple[int, bool] | None:
        """The highest memory of any rank in bytes, and whether it is host memory; None: not recorded."""
        gpu, host = (
            [run.peak_bytes for run in self.runs if run.peak_bytes and run.peak_on_host is side] for side in (False, True)
        )
        return (max(gpu), False) if gpu else (max(host), True) if host else None

    @property
    def findings(self) -> Counter[str]:
        """In how many runs each error or warning was found."""
        return Counter(name for run in self.runs for name in sorted(set(run.findings)))

    @property
    def unsearched(self) -> int:
        """In how many runs findings were not searched."""
        return sum(run.worst is None for run in self.runs)

    @property
    def lost_s(self) -> float:
        """Training time that the costliest finding of each run cost, in all. Findings overlap: others are not added."""
        return _sum_known(run.lost_s for run in self.runs)

    @property
    def gpu_s(self) -> float:
        """Seconds of all GPUs of the runs in which they are known; NaN: in none."""
        return _sum_known(run.gpu_s for run in self.runs)

    @property
    def idle_share(self) -> float:
        """The share of that time in which no kernel ran, of runs whose utilization was recorded; NaN: of none."""
        measured = [run for run in self.runs if run.gpu_s > 0 and not math.isnan(run.idle_gpu_s)]
        return sum(run.idle_gpu_s for run in measured) / sum(run.gpu_s for run in measured) if measured else math.nan

    def as_json(self) -> dict[str, Any]:
        """Return plain values, with each run without its single iterations; None where unknown."""
        peak_bytes, peak_on_host = self.peak or (None, False)
        return {
            "command": list(self.command),
            "runs": len(self.runs),
            "failed": self.failed,
            "iteration_s": _drop_nan(self.iteration_s),
            "peak_bytes": peak_bytes,
            "peak_on_host": peak_on_host,
            "findings": dict(self.findings.most_common()),
            "unsearched": self.unsearched,
            "lost_s": _drop_nan(self.lost_s),
            "gpu_hours": _drop_nan(self.gpu_s / 3600),
            "idle_gpu_hours": _drop_nan(self.gpu_s / 3600 * self.idle_share),
            "recordings": [{key: value for key, value in run.as_json().items() if key != "iterations"} for run in self.runs],
        }


def group_runs(runs: Iterable[Overview]) -> list[CommandHistory]:
    """Group runs by command, the last used first. Copies of a recording, as packed ones, count once."""
    groups: dict[tuple[str, ...], dict[int, Overview]] = {}
    for run in sorted(runs, key=_rank_copy):
        if run.command and not run.problem:
            groups.setdefault(build_command_key(run.command, run.working_directory), {})[run.begin_ns] = run
    histories = [CommandHistory(tuple(_order_runs(list(group.values())))) for group in groups.values()]
    return sorted(histories, key=lambda history: history.runs[0].begin_ns, reverse=True)


def _rank_copy(run: Overview) -> bool:
    return run.worst is not None  # of two copies the one whose findings were searched is kept


def _order_runs(runs: Sequence[Overview]) -> list[Overview]:
    return sorted(runs, key=lambda run: run.begin_ns, reverse=True)


def _sum_known(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) if known else math.nan


def _drop_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
