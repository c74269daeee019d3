"""The means of a rank's cores and runnable threads in each phase, at the right of the chart, above the threads' figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerotop.analysis.live_view import Floats
from zerotop.analysis.processes.phases import UNSEEN_NAME
from zerotop.ui.drawing.formatting import format_fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row
from zerotop.ui.drawing.table import PlacedColumns
from zerotop.ui.drawing.text import fit_text, wrap_text

_HEADING = "by phase"
_COUNTED = "counted: of most short steps only the time is recorded, not the phases, so as not to slow the job"
_COUNTED_ROWS = 4
_NAME_WIDTH = 12  # cells that a phase's name needs
_FIRST = 2  # of the placed columns: cores, runnable threads, and one that is wide enough for a phase's name


def has_phase_means(placed: PlacedColumns[Any]) -> bool:
    """Whether the columns of figures have room for a phase's name beside its two figures."""
    return len(placed.columns) > _FIRST + 2 and placed.columns[_FIRST + 2][2] >= _NAME_WIDTH


def draw_phase_means(
    phases: Sequence[str], used: Floats, runnable: Floats, placed: PlacedColumns[Any], glyphs: Glyphs
) -> list[Row]:
    """Draw a heading and a row for each phase, in the order in which they appear, from the end of the chart on.

    Below them it says why no phase is known of some of the time.

    ``phases``, ``used`` and ``runnable`` have a value for each column of the chart.
    """
    # Time without a phase, before the first and after the last one, has the same colour as time outside of them.
    words = [phase_word(phase or "other", glyphs) for phase in phases]
    styles = dict(zip(words, map(phase_style, phases), strict=True))
    (cores_begin, cores), (runnable_begin, waiting), (name_begin, name) = (
        (begin, size) for _, begin, size in placed.columns[_FIRST : _FIRST + 3]
    )
    gap = " " * (runnable_begin - cores_begin - cores), " " * (name_begin - runnable_begin - waiting)
    lead = " " * (name_begin - cores_begin + 1)
    rows: list[Row] = [((lead, "text"), (fit_text(_HEADING, name, glyphs, at_words=False), "heading"))]
    for word, style in styles.items():
        inside = np.array(words) == word
        figures = [_compute_mean(values[inside]) for values in (used, runnable)]
        if np.isnan(figures).all():
            continue
        rows.append(
            (
                (f" {format_fixed(figures[0], 1, cores)}{gap[0]}{format_fixed(figures[1], 1, waiting)}{gap[1]}", "value"),
                (f"{glyphs.find_sample(style)} ", style),
                (fit_text(word, name - 2, glyphs, at_words=False), "muted"),
            )
        )
    if UNSEEN_NAME in phases:
        begin, end = cores_begin, name_begin + name
        lines = wrap_text(_COUNTED, end - begin, _COUNTED_ROWS, glyphs)
        rows += [(), *(((f" {line}", "muted"),) for line in lines)]
    return rows


def _compute_mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
