"""Real recordings as they would be if most of their steps had only been counted."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zerotop_probe.inside.budget import DetailBudget
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, END, PHASE_CODE, SKIPPED, TICK, UNKNOWN

Rows = np.ndarray[Any, Any]
_KEPT = [PHASE_CODE[name] for name in ("init", "eval", "checkpoint_save", "checkpoint_load", "generate")]


def count_steps(folder: Path, *, interval: int = 4, first: int = 20) -> int:
    """Drop the records that counted steps do not write; return the number of counted steps of all ranks.

    ``interval``: of so many steps one keeps its phases; the ``first`` ones do, and two after evaluations and checkpoints.
    """
    counted = 0
    for path in sorted(folder.glob("spans-rank*.rec")):
        windows, pauses = _change_table(path, lambda rows: _count_spans(rows, interval, first))
        counted += len(windows)
        for table, drop in _DROPS.items():
            for other in folder.glob(path.name.replace("spans", table, 1)):
                _change_table(other, partial(drop, windows=windows, pauses=pauses))
    return counted


def _change_table(path: Path, change: Any) -> Any:
    header, _, records = path.read_bytes().partition(b"\n")
    rows = np.frombuffer(records, [tuple(field) for field in json.loads(header)["dtype"]]).copy()
    changed = change(rows)
    rows, *found = changed if isinstance(changed, tuple) else (changed,)
    path.write_bytes(header + b"\n" + rows.tobytes())
    return found


def _count_spans(rows: Rows, interval: int, first: int) -> tuple[Rows, list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the spans that are left, the (begin, end) of each counted step, and those of the pauses in it."""
    budget = DetailBudget(0.0)
    budget._interval = interval
    kept, windows, pauses, begin, previous_ns, wished = [], [], [], 0, 0, 0
    for end in np.flatnonzero((rows["flags"] & BOUNDARY != 0) & (rows["engine"] == 0)).tolist():
        step, spans = int(rows["step"][end]), rows[begin : end + 1]
        begin = end + 1
        paused = spans[np.isin(spans["phase"], _KEPT) & (spans["depth"] == 0)]
        if step < first or wished or budget.find_uncounted(step) == step:
            kept.append(spans)
            wished = max(0, wished - 1)
        else:
            own = [(one["begin_ns"], one["end_ns"]) for one in paused]
            inside = [any(low <= one["begin_ns"] and one["end_ns"] <= high for low, high in own) for one in spans[:-1]]
            last = spans[-1:].copy()
            last["flags"] = last["flags"] & SKIPPED | BOUNDARY | COUNTED
            for name in ("micro_step", "rows", "tokens", "sequence"):
                last[name] = UNKNOWN
            kept += [spans[:-1][inside], last]
            windows.append((previous_ns, int(last["end_ns"][0])))
            pauses += own
        wished = 2 if len(paused) else wished
        previous_ns = int(rows["end_ns"][end])
    return np.concatenate([*kept, rows[begin:]]), windows, pauses


def _find_dropped(times: Rows, windows: list[tuple[int, int]], pauses: list[tuple[int, int]]) -> Rows:
    dropped = np.zeros(len(times), np.bool_)
    for begin_ns, end_ns in windows:
        dropped |= (times > begin_ns) & (times <= end_ns)
    for begin_ns, end_ns in pauses:
        dropped &= ~((times >= begin_ns) & (times <= end_ns))
    return dropped


def _drop_begins(rows: Rows, windows: list[tuple[int, int]], pauses: list[tuple[int, int]]) -> Rows:
    return rows[~_find_dropped(rows["time_ns"], windows, pauses)]


def _drop_times(rows: Rows, windows: list[tuple[int, int]], pauses: list[tuple[int, int]]) -> Rows:
    return rows[~_find_dropped(rows["begin_ns"], windows, pauses)]


def _drop_readings(rows: Rows, windows: list[tuple[int, int]], pauses: list[tuple[int, int]]) -> Rows:
    """At the end of several counted steps the allocator is read once, with the peak since the last reading."""
    dropped = _find_dropped(rows["time_ns"], windows, pauses) & (rows["edge"] != TICK)
    ends_ns = {end_ns for _, end_ns in windows} - {begin_ns for begin_ns, _ in windows}
    rows, since = rows.copy(), 0
    for index in np.flatnonzero(rows["edge"] != TICK).tolist():
        if dropped[index] and int(rows["time_ns"][index]) in ends_ns:
            dropped[index], rows["edge"][index] = False, END
        if not dropped[index]:
            for name in ("allocated_peak_bytes", "reserved_peak_bytes"):
                rows[name][index] = rows[name][since : index + 1].max() if dropped[since:index].any() else rows[name][index]
            since = index + 1
    left: Rows = rows[~dropped]
    return left


_DROPS = {"begins": _drop_begins, "device_times": _drop_times, "allocator": _drop_readings}
