"""The means of a rank's cores and runnable threads in each phase, at the right of the chart, above the threads' figures."""

from __future__ import annotations

import math
from typing import Any

from zerotop.analysis.processes.phases import UNSEEN_NAME
from zerotop.analysis.ranks.threads import RankThreads
from zerotop.ui.drawing.formatting import format_fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row
from zerotop.ui.drawing.table import PlacedColumns
from zerotop.ui.drawing.text import fit_text, wrap_text

_HEADING = "by phase"
_COUNTED = "counted: of most short steps only the time is recorded, not the phases, so as not to slow the job"
_SHORT = "–: shorter than the samples; Iteration has their means"
_NOTE_ROWS = 4
_NAME_WIDTH = 12  # cells that a phase's name needs
_FIRST = 2  # of the placed columns: cores, runnable threads, and one that is wide enough for a phase's name


def has_phase_means(placed: PlacedColumns[Any]) -> bool:
    """Whether the columns of figures have room for a phase's name beside its two figures."""
    return len(placed.columns) > _FIRST + 2 and placed.columns[_FIRST + 2][2] >= _NAME_WIDTH


def draw_phase_means(threads: RankThreads, placed: PlacedColumns[Any], glyphs: Glyphs) -> list[Row]:
    """Draw a heading and a row for each phase, in the order in which they appear, from the end of the chart on.

    Below them it says why there are none of some phases.
    """
    # Time without a phase, before the first and after the last one, has the same colour as time outside of them.
    styles = {phase or "other": phase_style(phase) for phase in threads.phases}
    (cores_begin, cores), (runnable_begin, waiting), (name_begin, name) = (
        (begin, size) for _, begin, size in placed.columns[_FIRST : _FIRST + 3]
    )
    gap = " " * (runnable_begin - cores_begin - cores), " " * (name_begin - runnable_begin - waiting)
    lead = " " * (name_begin - cores_begin + 1)
    rows: list[Row] = [((lead, "text"), (fit_text(_HEADING, name, glyphs, at_words=False), "heading"))]
    for phase, style in styles.items():
        figures = threads.phase_means.get(phase, (math.nan, math.nan))
        rows.append(
            (
                (f" {format_fixed(figures[0], 1, cores)}{gap[0]}{format_fixed(figures[1], 1, waiting)}{gap[1]}", "value"),
                (f"{glyphs.find_sample(style)} ", style),
                (fit_text(phase_word(phase, glyphs), name - 2, glyphs, at_words=False), "muted"),
            )
        )
    notes = {_COUNTED: UNSEEN_NAME in styles, glyphs.to_plain(_SHORT): not styles.keys() <= threads.phase_means.keys()}
    for note in (text for text, is_said in notes.items() if is_said):
        lines = wrap_text(note, name_begin + name - cores_begin, _NOTE_ROWS, glyphs)
        rows += [(), *(((f" {line}", "muted"),) for line in lines)]
    return rows
