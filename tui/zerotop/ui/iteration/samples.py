"""What a folded iteration rests on: how many samples of each sensor, of what length, and where they are highest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.signals import Signal
from zerotop.ui.charts import scale
from zerotop.ui.drawing.formatting import grouped, seconds, significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row, filled, to_height
from zerotop.ui.drawing.table import Column, place, rule
from zerotop.ui.iteration.labels import left_out
from zerotop.ui.iteration.lanes import Lane, lanes
from zerotop.ui.live.memory import panel_title

# Of phases shorter than this share of an iteration a curve tells nothing.
_TOO_SHORT = 0.005


@dataclass(frozen=True)
class _Line:
    lane: Lane
    signal: Signal
    style: str
    word: str
    at: str  # the phase in which it is highest on average
    unit: str
    factor: float


def draw_samples(fold: WaveformFold, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """The panel: ``height`` rows of ``width`` cells."""
    columns = place(_columns(glyphs), width)
    rows = [rule(panel_title("Samples", focused), width, glyphs, columns)]
    rows += [columns.row(line, width, glyphs) for line in _lines(fold)]
    if text := left_out(fold):
        rows += [(), ((text, "muted"),)]
    return to_height([filled(row, width, glyphs) for row in rows], width, height, glyphs)


def rows_wanted(fold: WaveformFold) -> int:
    """Rows that show all of it."""
    return 1 + len(_lines(fold)) + (2 if fold.left_out else 0)


def _lines(fold: WaveformFold) -> list[_Line]:
    found = []
    for lane in lanes(fold):
        for which, style, word in lane.curves:
            if which in fold.signals:
                signal = fold.signals[which]
                axis = scale(lane.kind, float(signal.high.max(initial=0.0)), 4)
                at = _phase_at(fold, signal) if signal.resolved else ""
                found.append(_Line(lane, signal, style, word, at, axis.unit, axis.factor))
    return found


def _phase_at(fold: WaveformFold, signal: Signal) -> str:
    """The phase in which it is highest on average, of those that contain no others."""
    found = max(fold.phases, key=lambda row: (mean_of(signal, row.places), row.depth), default=None)
    return found.phase if found is not None else ""


def mean_of(signal: Signal, places: Sequence[tuple[float, float]]) -> float:
    """The mean over some places, -1 where they have no length."""
    lengths = sum(end - begin for begin, end in places)
    if not lengths > _end(signal) * _TOO_SHORT:
        return -1.0
    return sum(signal.mean(begin, end) * (end - begin) for begin, end in places if end > begin) / lengths


def _columns(glyphs: Glyphs) -> list[Column[_Line]]:
    def word(line: _Line, width: int) -> Row:
        text = " ".join(part for part in (line.lane.word, line.word, line.unit) if part)
        return ((glyphs.plain(text), line.style),)

    def figure(value: float) -> Row:
        return ((significant(value).rjust(7), "value"),)

    def each(line: _Line) -> Row:
        text = seconds(line.signal.window_s) if line.signal.window_s else "moment"
        return ((text.rjust(8), "text" if line.signal.resolved else "warn"),)

    def at(line: _Line) -> Row:
        return ((phase_word(line.at, glyphs), phase_style(line.at)),) if line.at else ()

    return [
        Column[_Line]((("signal", "heading"),), 18, 9, word, left=True),
        Column[_Line](
            (("samples", "heading"),), 8, 7, lambda line, width: ((grouped(line.signal.samples).rjust(8), "text"),)
        ),
        Column[_Line]((("each of", "heading"),), 8, 6, lambda line, width: each(line)),
        Column[_Line](
            (("mean", "heading"),), 7, 8, lambda line, width: figure(line.signal.mean(0.0, _end(line.signal)) * line.factor)
        ),
        Column[_Line](
            (("highest", "heading"),), 7, 8, lambda line, width: figure(float(line.signal.median.max()) * line.factor)
        ),
        Column[_Line]((("mostly in", "heading"),), 11, 5, lambda line, width: at(line), left=True),
    ]


def _end(signal: Signal) -> float:
    return float(signal.position_s[-1])
