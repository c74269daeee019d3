"""Rows that stand for blocks of steps: the same blocks on all ranks, although each node makes its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerotop.recording.samples import Rows
from zerotop.recording.steps.missing_steps import erase_measures, find_recorded
from zerotop.recording.steps.span_sums import DURATION_COLUMNS, STAGES_COLUMN
from zerotop.recording.steps.step_dtype import COUNT_COLUMNS, MEMORY_COLUMNS, PHASE_COLUMNS, erase_phases, has_phases

_MEANS = ("iteration_s", *DURATION_COLUMNS, *COUNT_COLUMNS, "skipped")


def align_blocks(ranks: Sequence[Rows]) -> list[Rows]:
    """Return the rows of each rank, merged so that a block of any rank is one on all of them."""
    block_counts = [_count_blocks(rows) for rows in ranks]
    if not any(block_counts):
        return list(ranks)
    size = 1 << (max(int(rows["steps"].max(initial=1)) for rows in ranks) - 1).bit_length()
    last = max(int(rows["step"][count - 1]) for rows, count in zip(ranks, block_counts, strict=True) if count)
    end = (last // size + 1) * size
    return [merge_before(rows, end, size) for rows in ranks]


def _count_blocks(rows: Rows) -> int:
    """Return the number of rows up to the last one that is a block."""
    blocks = np.flatnonzero(rows["steps"] > 1)
    return int(blocks[-1]) + 1 if len(blocks) else 0


def merge_before(rows: Rows, end: int, size: int) -> Rows:
    """Merge the rows of steps before the number ``end`` whose steps have the same number divided by ``size``."""
    count = int(np.searchsorted(rows["step"], end))
    blocks = rows["step"][:count] // size
    firsts = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1])) if count else np.empty(0, np.intp)
    if len(firsts) == count:
        return rows
    lasts = np.append(firsts[1:], count) - 1
    merged = rows[lasts].copy()
    recorded = find_recorded(rows[:count])
    merged["steps"] = np.add.reduceat(rows["steps"][:count], firsts)
    phased = has_phases(rows[:count])
    counts = np.add.reduceat(rows["steps"][:count] * recorded, firsts)
    merged["counted"] = (counts > 0) & (np.add.reduceat(phased.astype(np.int64), firsts) == 0)
    for name in _MEANS:
        known = phased if name in PHASE_COLUMNS or name in COUNT_COLUMNS else recorded
        weights = rows["steps"][:count] * known
        sums = np.add.reduceat(np.where(known, rows[name][:count], 0) * weights, firsts)
        means = sums / np.maximum(np.add.reduceat(weights, firsts), 1)
        merged[name] = means > 0.5 if name == "skipped" else means if rows[name].dtype.kind == "f" else np.rint(means)
    merged["iteration_s"][counts == 0] = merged[STAGES_COLUMN] = np.nan
    for name in MEMORY_COLUMNS:
        merged[name] = np.maximum.reduceat(rows[name][:count], firsts)
    merged["begin_unix_ns"] = rows["begin_unix_ns"][firsts]
    erase_phases(merged)
    erase_measures(merged)
    return np.concatenate([merged, rows[count:]])
