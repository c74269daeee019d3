"""What lanes a folded iteration has, and one of them: a spread, the curve over it, the phases' colours behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.waveform.alignment import Stretch
from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.phase_bounds import name
from zerotop.analysis.waveform.signals import Signal
from zerotop.ui.charts import AXIS_WIDTH, Canvas, Fitted, Kind, Watched, band, framed, grid, line
from zerotop.ui.drawing.formatting import significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, filled

Floats = NDArray[np.float64]

GUTTER = 10  # cells at the left of an axis, for the lane's name
_FINER = 4  # points of a curve for each column of dots: none of its bends is lost
# Between looks at PCIe counters that are further apart, more may flow than they can count.
_COUNTED_S = 0.15
# The lines of a pinned fold, and where the next iteration begins.
PINNED, BORDER = "series-2", "axis"


@dataclass(frozen=True)
class Lane:
    """Some signals on one scale."""

    id: str
    word: str  # at most GUTTER - 1 cells, like the words of its curves
    kind: Kind
    curves: tuple[tuple[str, str, str], ...]  # signal, style, word where there are several


LANES = (
    Lane("utilization", "GPU", Kind.PERCENT, (("utilization", "load", ""),)),
    Lane("cores", "CPU", Kind.CORES, (("cores", "series-1", ""),)),
    Lane("power", "power", Kind.WATTS, (("power", "series-0", ""),)),
    Lane("pcie", "PCIe", Kind.BYTES_PER_S, (("to_host", "phase-transfer", "↑ host"), ("to_gpu", "series-4", "↓ GPU"))),
    Lane("allocated", "alloc", Kind.BYTES, (("allocated", "memory-allocated", ""),)),
    Lane("resident", "RSS", Kind.BYTES, (("resident", "memory-other", ""),)),
)


def lanes(fold: WaveformFold) -> list[Lane]:
    """Those that there is something to show of, the most telling ones first."""
    found = [lane for lane in LANES if any(signal in fold.signals for signal, _, _ in lane.curves)]
    # Beside GPUs, host memory says little: it does not change within an iteration.
    return [lane for lane in found if lane.id != "resident" or "utilization" not in fold.signals]


def draw_lane(
    lane: Lane,
    fold: WaveformFold,
    pinned: WaveformFold | None,
    end_s: float,
    width: int,
    height: int,
    glyphs: Glyphs,
    scales: Watched,
) -> list[Row]:
    """``height`` rows of ``width`` cells: the lane's name, its axis, and its curves from 0 to ``end_s``."""
    gutter = GUTTER if width >= 40 else 0
    canvas = Canvas(width - gutter - AXIS_WIDTH, height, glyphs)
    shown = [(fold.signals[signal], style) for signal, style, _ in lane.curves if signal in fold.signals]
    before = [pinned.signals[signal] for signal, _, _ in lane.curves if pinned is not None and signal in pinned.signals]
    largest = max([float(signal.high.max(initial=0.0)) for signal, _ in shown] + [_largest(before)])
    axis = scales.scale(lane.id, lane.kind, largest, height)
    if lane.kind is Kind.CORES and fold.host_cores and largest > fold.host_cores / 2:
        axis = Fitted(axis.unit, 1.0, fold.host_cores / 2, float(fold.host_cores), height)
    tints(canvas, fold.stretches, fold.iteration_s, end_s)
    if len(shown) == 1:
        _spread(canvas, shown[0][0], fold.iteration_s, end_s, axis.highest)
    grid(canvas, axis)
    canvas.cursor(border(fold.iteration_s, end_s, canvas.width), BORDER)
    for signal in before:
        _curve(canvas, signal, end_s, PINNED, axis.highest, "o", once=True)
    for (signal, style), letter in zip(shown, "*+", strict=False):
        _curve(canvas, signal, end_s, style, axis.highest, letter)
    rows = framed(canvas, axis)
    if not gutter:
        return [filled(row, width, glyphs) for row in rows]
    names = _names(lane, fold, axis.unit, axis.factor, height, glyphs)
    return [filled((*filled(head, gutter, glyphs), *row), width, glyphs) for head, row in zip(names, rows, strict=True)]


def border(iteration_s: float, end_s: float, width: int) -> int:
    """The column in which the next iteration begins."""
    return round(iteration_s / end_s * width) if end_s > iteration_s else width


def codes(stretches: Sequence[Stretch], depth: int, length_s: float, end_s: float, columns: int) -> NDArray[np.int64]:
    """Which stretch each column lies in, the innermost of those up to a depth; -1 for none.

    The columns go from 0 to ``end_s``; what lies beyond the iteration is the next one. One that is shorter than a column is
    seen where it has most of it.
    """
    found = np.full(columns, -1, np.int64)
    if not columns or not end_s > 0:
        return found
    middles = (np.arange(columns) + 0.5) / columns * end_s
    within = middles - np.floor(middles / length_s) * length_s if length_s > 0 else middles
    for place, stretch in enumerate(stretches):
        if stretch.depth <= depth:
            found[(within >= stretch.begin_s) & (within < stretch.end_s)] = place
    return found


def tints(canvas: Canvas, stretches: Sequence[Stretch], length_s: float, end_s: float) -> None:
    """Puts the phases' faint colours behind."""
    which = codes(stretches, 1, length_s, end_s, canvas.width)
    styles = [tint(phase_style(name(stretch.phase))) for stretch in stretches]
    canvas.grounds(which, styles)


def tint(style: str) -> str:
    """The faint colour of a phase's style."""
    word = style.removeprefix("phase-")
    return f"tint-{word}" if word in ("data", "forward", "backward", "step", "transfer", "communication") else "tint-other"


def _largest(signals: Sequence[Signal]) -> float:
    return max((float(signal.median.max(initial=0.0)) for signal in signals), default=0.0)


def _sampled(signal: Signal, values: Floats, end_s: float, columns: int, *, once: bool = False) -> Floats:
    """Values at fine places of each column, shape (columns, fine); with ``once`` NaN beyond the iteration."""
    length = float(signal.position_s[-1])
    at = (np.arange(columns * _FINER) + 0.5) / (columns * _FINER) * end_s
    found = (
        np.interp(at - np.floor(at / length) * length, signal.position_s, values) if length > 0 else np.full(len(at), np.nan)
    )
    if once:
        found = np.where(at <= length, found, np.nan)
    return np.asarray(found.reshape(columns, _FINER), np.float64)


def _curve(canvas: Canvas, signal: Signal, end_s: float, style: str, top: float, letter: str, *, once: bool = False) -> None:
    values = _sampled(signal, signal.median, end_s, canvas.dots, once=once)
    line(canvas, values.min(axis=1), values.max(axis=1), style, top=top, letter=letter)


def _spread(canvas: Canvas, signal: Signal, length_s: float, end_s: float, top: float) -> None:
    low = _sampled(signal, signal.low, end_s, canvas.width).min(axis=1)
    high = _sampled(signal, signal.high, end_s, canvas.width).max(axis=1)
    # Thinner than an eighth of a cell it hides the phases and tells nothing.
    thin = high - low < top / max(1, 8 * canvas.height)
    band(canvas, np.where(thin, np.nan, low), np.where(thin, np.nan, high), "spread", top=top)


def _names(lane: Lane, fold: WaveformFold, unit: str, factor: float, height: int, glyphs: Glyphs) -> list[Row]:
    """The lane's name, unit and mean, a row each as far as there are rows."""
    word = f"{lane.word} {unit}"
    if lane.id == "cores" and fold.host_cores:
        word = f"CPU/{fold.host_cores}"
    found: list[Row] = [((word[: GUTTER - 1], "label"),)]
    for signal, style, curve in lane.curves:
        if signal in fold.signals:
            mean = fold.signals[signal].mean(0.0, fold.iteration_s) * factor
            text = glyphs.plain(curve) if curve else f"mean {significant(mean)}"
            found.append(((text, style if curve else "muted"),))
    here = [fold.signals[signal] for signal, _, _ in lane.curves if signal in fold.signals]
    if not all(signal.resolved for signal in here):
        found.append((("blurred", "warn"),))
    elif lane.id == "pcie" and max(signal.window_s for signal in here) > _COUNTED_S:
        found.append((("at least", "muted"),))
    return (found + [()] * height)[:height]
