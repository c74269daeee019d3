"""The values that a training logged last, and the trend of its loss."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerotop.analysis.live_view import LastLoss
from zerotop.analysis.steps.logged_values import NO_VALUES, LoggedSeries, find_steps, read_logged
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Rows

_TREND_PARTS = 12


class LastLogged(NamedTuple):
    """The last logged value of a name."""

    value: float  # may be NaN or infinite
    step: int | None  # None where it is not known


def read_last_loss(recording: Recording, rows: Rows, cursor_ns: int) -> LastLoss | None:
    """Return the last loss at a moment, of these finished steps (STEP_DTYPE); None before the first one."""
    series = read_logged(recording).get("loss", NO_VALUES).until(cursor_ns)
    if not len(series.times):
        return None
    step = _find_last_step(rows, series)
    parts = np.arange(min(_TREND_PARTS, len(series.values)))
    size, longer = divmod(len(series.values), len(parts))
    begins = parts * size + np.minimum(parts, longer)
    finite = np.isfinite(series.values)
    sums = np.add.reduceat(np.where(finite, series.values, 0.0), begins)
    counts = np.add.reduceat(finite, begins, dtype=np.float64)
    trend = np.divide(sums, counts, where=counts > 0, out=np.full(len(parts), np.nan))
    return LastLoss(float(series.values[-1]), step, tuple(trend.tolist()))


def read_last_logged(recording: Recording, rows: Rows, cursor_ns: int) -> dict[str, LastLogged]:
    """Return the last logged values at a moment, by name; see ``read_last_loss``."""
    series = {name: values.until(cursor_ns) for name, values in read_logged(recording).items()}
    return {
        name: LastLogged(float(values.values[-1]), _find_last_step(rows, values))
        for name, values in series.items()
        if len(values.times)
    }


def _find_last_step(rows: Rows, series: LoggedSeries) -> int | None:
    step = int(find_steps(rows, series, are_last=True)[-1])
    return step if step >= 0 else None
