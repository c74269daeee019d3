"""The samples behind a folded iteration: their number and length for each sensor, and their peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.signals import Signal
from zerotop.ui.charts import choose_scale
from zerotop.ui.drawing.formatting import format_duration, format_grouped, format_significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import Column, draw_rule, panel_title, place_columns
from zerotop.ui.iteration.lanes import SignalLane, choose_lanes

# A curve says nothing about phases shorter than this share of an iteration.
_MIN_SHARE = 0.005


@dataclass(frozen=True)
class _SampleLine:
    lane: SignalLane
    signal: Signal
    style: str
    label: str
    highest_phase: str  # with the highest mean
    unit: str
    factor: float


def draw_samples(fold: WaveformFold, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw the panel: ``height`` rows of ``width`` cells."""
    columns = place_columns(_build_columns(glyphs), width)
    rows = [draw_rule(panel_title("Samples", focused), width, glyphs, columns)]
    rows += [columns.draw_row(line, width, glyphs) for line in _build_lines(fold)]
    return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)


def count_sample_rows(fold: WaveformFold) -> int:
    """Return the rows that the whole panel needs."""
    return 1 + len(_build_lines(fold))


def _build_lines(fold: WaveformFold) -> list[_SampleLine]:
    lines = []
    for lane in choose_lanes(fold):
        for which, style, word in lane.curves:
            if which in fold.signals:
                signal = fold.signals[which]
                axis = choose_scale(lane.kind, float(signal.high.max(initial=0.0)), 4)
                at = _find_highest_phase(fold, signal) if signal.resolved else ""
                lines.append(_SampleLine(lane, signal, style, word, at, axis.unit, axis.factor))
    return lines


def _find_highest_phase(fold: WaveformFold, signal: Signal) -> str:
    """Return the innermost phase with the signal's highest mean."""
    highest = max(fold.phases, key=lambda row: (compute_mean(signal, row.intervals), row.depth), default=None)
    return highest.phase if highest is not None else ""


def compute_mean(signal: Signal, intervals: Sequence[tuple[float, float]]) -> float:
    """Return the mean over some intervals in seconds, -1 if they are too short."""
    lengths = sum(end - begin for begin, end in intervals)
    if not lengths > _find_end(signal) * _MIN_SHARE:
        return -1.0
    return sum(signal.compute_mean(begin, end) * (end - begin) for begin, end in intervals if end > begin) / lengths


def _build_columns(glyphs: Glyphs) -> list[Column[_SampleLine]]:
    def draw_label(line: _SampleLine, width: int) -> Row:
        text = " ".join(part for part in (line.lane.label, line.label, line.unit) if part)
        return (f"{glyphs.find_sample(line.style)} ", line.style), (glyphs.to_plain(text), "text")

    def draw_figure(value: float) -> Row:
        return ((format_significant(value).rjust(7), "value"),)

    def draw_window(line: _SampleLine) -> Row:
        text = format_duration(line.signal.window_s) if line.signal.window_s else "instant"
        return ((text.rjust(8), "text" if line.signal.resolved else "warn"),)

    def draw_highest_phase(line: _SampleLine) -> Row:
        if not line.highest_phase:
            return ()
        style = phase_style(line.highest_phase)
        return (f"{glyphs.find_sample(style)} ", style), (phase_word(line.highest_phase, glyphs), "text")

    return [
        Column[_SampleLine]("signal", 18, 9, draw_label, left=True),
        Column[_SampleLine]("samples", 8, 7, lambda line, width: ((format_grouped(line.signal.samples).rjust(8), "text"),)),
        Column[_SampleLine]("averaged", 8, 6, lambda line, width: draw_window(line)),
        Column[_SampleLine](
            "mean",
            7,
            8,
            lambda line, width: draw_figure(line.signal.compute_mean(0.0, _find_end(line.signal)) * line.factor),
        ),
        Column[_SampleLine]("highest", 7, 8, lambda line, width: draw_figure(float(line.signal.median.max()) * line.factor)),
        Column[_SampleLine]("peaks in", 11, 5, lambda line, width: draw_highest_phase(line), left=True),
    ]


def _find_end(signal: Signal) -> float:
    return float(signal.position_s[-1])
