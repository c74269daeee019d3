"""The lanes of a folded iteration: a curve over its spread, with the phases' colours behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.phases import find_phase_name
from zerotop.analysis.waveform.alignment import PhaseStretch
from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.signals import Signal
from zerotop.ui.charts import (
    AXIS_WIDTH,
    Canvas,
    GrowingScales,
    Scale,
    add_axes,
    choose_scale,
    plot_band,
    plot_grid,
    plot_line,
)
from zerotop.ui.drawing.formatting import format_significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, fit_row
from zerotop.ui.iteration.labels import describe_processes
from zerotop_probe.recording.metrics import BYTES, BYTES_PER_S, CORES, PERCENT, WATTS

Floats = NDArray[np.float64]

GUTTER = 10  # cells left of an axis, for the lane's name
_FINE_POINTS = 4  # points of a curve per column of dots, so that no bend is lost
# PCIe counters may wrap between samples that are further apart.
_MAX_COUNTED_S = 0.15
# The lines of a pinned fold, and where the next iteration begins.
PINNED_STYLE, BORDER_STYLE = "series-2", "axis"


@dataclass(frozen=True)
class SignalLane:
    """One or more signals on one scale."""

    id: str
    label: str  # at most GUTTER - 1 cells, like its curves' labels
    kind: str
    curves: tuple[tuple[str, str, str], ...]  # signal, style, label if there are several


LANES = (
    SignalLane("utilization", "GPU", PERCENT, (("utilization", "load", ""),)),
    SignalLane("cores", "CPU", CORES, (("cores", "series-1", ""),)),
    SignalLane("power", "power", WATTS, (("power", "series-0", ""),)),
    SignalLane("pcie", "PCIe", BYTES_PER_S, (("to_host", "phase-transfer", "D2H"), ("to_gpu", "series-4", "H2D"))),
    SignalLane("allocated", "alloc", BYTES, (("allocated", "memory-allocated", ""),)),
    SignalLane("resident", "RSS", BYTES, (("resident", "memory-other", ""),)),
)

_PROCESS_LANES = ("cores", "resident")  # sums of processes


def choose_lanes(fold: WaveformFold) -> list[SignalLane]:
    """Return the lanes that have data, the most important first."""
    lanes = [lane for lane in LANES if any(signal in fold.signals for signal, _, _ in lane.curves)]
    # Beside GPUs, host memory says little: it does not change within an iteration.
    return [lane for lane in lanes if lane.id != "resident" or "utilization" not in fold.signals]


def choose_curves(fold: WaveformFold) -> list[SignalLane]:
    """Return the lanes that have a curve. The sensors of others are slower than an iteration: see ``list_means``."""
    return [lane for lane in choose_lanes(fold) if _is_resolved(lane, fold)]


def _is_resolved(lane: SignalLane, fold: WaveformFold) -> bool:
    return any(fold.signals[name].resolved for name, _, _ in lane.curves if name in fold.signals)


def list_means(fold: WaveformFold) -> list[str]:
    """Return the means of the signals without a curve: ``GPU 32.3 %``, ``CPU 1.00 of 64``, ``power 277 W``."""
    parts = []
    for lane in choose_lanes(fold):
        for name, _, label in lane.curves if not _is_resolved(lane, fold) else ():
            if name in fold.signals:
                mean = fold.signals[name].compute_mean(0.0, fold.iteration_s)
                scale = choose_scale(lane.kind, mean, 4)
                unit = f"of {fold.host_cores}" if lane.id == "cores" and fold.host_cores else scale.unit
                parts.append(f"{label or lane.label} {format_significant(mean * scale.factor)} {unit}".strip())
    return parts


def draw_lane(
    lane: SignalLane,
    fold: WaveformFold,
    pinned: WaveformFold | None,
    end_s: float,
    size: tuple[int, int],
    glyphs: Glyphs,
    scales: GrowingScales,
) -> list[Row]:
    """Draw a lane of ``size`` (cells, rows): its name, its axis, and its curves from 0 to ``end_s``."""
    width, height = size
    gutter = GUTTER if width >= 40 else 0
    canvas = Canvas(width - gutter - AXIS_WIDTH, height, glyphs)
    shown = [(fold.signals[signal], style) for signal, style, _ in lane.curves if signal in fold.signals]
    before = [pinned.signals[signal] for signal, _, _ in lane.curves if pinned is not None and signal in pinned.signals]
    largest = max([float(signal.high.max(initial=0.0)) for signal, _ in shown] + [_find_largest(before)])
    axis = scales.choose_scale(lane.id, lane.kind, largest, height)
    if lane.kind == CORES and fold.host_cores and largest > fold.host_cores / 2:
        axis = Scale(axis.unit, 1.0, fold.host_cores / 2, float(fold.host_cores), height)
    paint_tints(canvas, fold.stretches, fold.iteration_s, end_s)
    if len(shown) == 1:
        _paint_spread(canvas, shown[0][0], end_s, axis.highest)
    plot_grid(canvas, axis)
    canvas.plot_cursor(find_border(fold.iteration_s, end_s, canvas.width), BORDER_STYLE)
    for signal in before:
        _paint_curve(canvas, signal, end_s, PINNED_STYLE, axis.highest, "o", once=True)
    for (signal, style), letter in zip(shown, "*+", strict=False):
        _paint_curve(canvas, signal, end_s, style, axis.highest, letter)
    rows = add_axes(canvas, axis)
    if not gutter:
        return [fit_row(row, width, glyphs) for row in rows]
    names = _draw_names(lane, fold, axis.unit, axis.factor, height, glyphs)
    return [fit_row((*fit_row(head, gutter, glyphs), *row), width, glyphs) for head, row in zip(names, rows, strict=True)]


def find_border(iteration_s: float, end_s: float, width: int) -> int:
    """Return the column in which the next iteration begins."""
    return round(iteration_s / end_s * width) if end_s > iteration_s else width


def find_stretches(
    stretches: Sequence[PhaseStretch], depth: int, length_s: float, end_s: float, columns: int
) -> NDArray[np.int64]:
    """Return the index of the innermost stretch, up to a depth, in each column; -1 for none.

    The columns go from 0 to ``end_s``; after the iteration comes the next one. A stretch shorter than a column is shown
    only if it covers the column's middle.
    """
    indices = np.full(columns, -1, np.int64)
    if not columns or not end_s > 0:
        return indices
    middles = (np.arange(columns) + 0.5) / columns * end_s
    within = middles - np.floor(middles / length_s) * length_s if length_s > 0 else middles
    for index, stretch in enumerate(stretches):
        if stretch.depth <= depth:
            indices[(within >= stretch.begin_s) & (within < stretch.end_s)] = index
    return indices


def paint_tints(canvas: Canvas, stretches: Sequence[PhaseStretch], length_s: float, end_s: float) -> None:
    """Paint the phases' faint colours into the background."""
    which = find_stretches(stretches, 1, length_s, end_s, canvas.width)
    styles = [choose_tint(phase_style(find_phase_name(stretch.phase))) for stretch in stretches]
    canvas.fill_columns(which, styles)


def choose_tint(style: str) -> str:
    """Return the faint variant of a phase's style."""
    word = style.removeprefix("phase-")
    return f"tint-{word}" if word in ("data", "forward", "backward", "step", "transfer", "communication") else "tint-other"


def _find_largest(signals: Sequence[Signal]) -> float:
    return max((float(signal.median.max(initial=0.0)) for signal in signals), default=0.0)


def _resample_signal(signal: Signal, values: Floats, end_s: float, columns: int, *, once: bool = False) -> Floats:
    """Return values at several points per column, shape (columns, points); NaN after the iteration if ``once``."""
    length = float(signal.position_s[-1])
    at = (np.arange(columns * _FINE_POINTS) + 0.5) / (columns * _FINE_POINTS) * end_s
    points = (
        np.interp(at - np.floor(at / length) * length, signal.position_s, values) if length > 0 else np.full(len(at), np.nan)
    )
    if once:
        points = np.where(at <= length, points, np.nan)
    return np.asarray(points.reshape(columns, _FINE_POINTS), np.float64)


def _paint_curve(
    canvas: Canvas, signal: Signal, end_s: float, style: str, top: float, letter: str, *, once: bool = False
) -> None:
    values = _resample_signal(signal, signal.median, end_s, canvas.dot_columns, once=once)
    plot_line(canvas, values.min(axis=1), values.max(axis=1), style, top=top, letter=letter)


def _paint_spread(canvas: Canvas, signal: Signal, end_s: float, top: float) -> None:
    low = _resample_signal(signal, signal.low, end_s, canvas.width).min(axis=1)
    high = _resample_signal(signal, signal.high, end_s, canvas.width).max(axis=1)
    # A band thinner than an eighth of a cell would only hide the phases.
    thin = high - low < top / max(1, 8 * canvas.height)
    plot_band(canvas, np.where(thin, np.nan, low), np.where(thin, np.nan, high), "spread", top=top)


def _draw_names(lane: SignalLane, fold: WaveformFold, unit: str, factor: float, height: int, glyphs: Glyphs) -> list[Row]:
    """Return the lane's name, unit and mean, one per row, as far as they fit."""
    word = f"{lane.label} {unit}"
    if lane.id == "cores" and fold.host_cores:
        word = f"CPU/{fold.host_cores}"
    rows: list[Row] = [((word[: GUTTER - 1], "label"),)]
    for signal, style, curve in lane.curves:
        if signal in fold.signals:
            mean = fold.signals[signal].compute_mean(0.0, fold.iteration_s) * factor
            text = glyphs.to_plain(curve) if curve else f"mean {format_significant(mean)}"
            rows.append((*(((f"{glyphs.find_sample(style)} ", style),) if curve else ()), (text, "muted")))
    signals = [fold.signals[signal] for signal, _, _ in lane.curves if signal in fold.signals]
    if lane.id in _PROCESS_LANES:
        rows.append(((describe_processes(fold)[: GUTTER - 1], "muted"),))
    if not all(signal.resolved for signal in signals):
        rows.append((("means", "warn"),))
    elif lane.id == "pcie" and max(signal.window_s for signal in signals) > _MAX_COUNTED_S:
        rows.append((("at least", "muted"),))
    return (rows + [()] * height)[:height]
