"""A folded iteration's numbers for the clipboard: tabs between columns, a heading first, SI units."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.text_tables import format_tsv
from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.ui.iteration.table import build_lines

_POSITION_COUNT = 201


def format_waveform(fold: WaveformFold) -> str:
    """Return each signal's median and band at evenly spaced positions."""
    at = np.linspace(0.0, fold.iteration_s, _POSITION_COUNT)
    names, columns = ["position_s"], [at]
    for signal in fold.signals.values():
        for suffix, values in (("", signal.median), ("_p10", signal.low), ("_p90", signal.high)):
            names.append(signal.name + suffix)
            columns.append(np.interp(at, signal.position_s, values))
    return format_tsv([names, *np.column_stack(columns).tolist()])


def format_phases(fold: WaveformFold, pinned: WaveformFold | None) -> str:
    """Return a row for each phase, and one for the whole iteration."""
    names = ("phase", "depth", "mean_s", "p90_s", "share", "device_s", "idle_s", "cores", "pinned_s")
    rows: list[tuple[object, ...]] = [names]
    for line in build_lines(fold, pinned):
        numbers = (line.mean_s, line.p90_s, line.share, line.device_s, line.idle_s, line.cores, line.pinned_s)
        rows.append((line.phase, line.depth, *numbers))
    return format_tsv(rows)
