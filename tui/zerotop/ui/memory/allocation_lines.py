"""The lines that allocated the largest blocks of the step that the probe looked at last."""

from __future__ import annotations

from zerotop.analysis.memory.block_lines import Look
from zerotop.analysis.memory.phase_peaks import PhasePeak
from zerotop.ui.drawing.formatting import choose_size_unit
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, fit_height, fit_row, row_width
from zerotop.ui.drawing.table import draw_rule, panel_title
from zerotop.ui.drawing.text import fit_text, sanitize, wrap_text

_HINT_ROWS = 2
_HIGHER = 1.1  # a peak this many times as high has other lines


def draw_look(
    look: Look, peak: PhasePeak | None, hint: str, size: tuple[int, int], glyphs: Glyphs, *, focused: bool = False
) -> list[Row]:
    """Draw a row for each line; ``hint`` says how to see every allocation. A later ``peak`` that is higher is named."""
    (width, height), unit = size, choose_size_unit(look.whole_bytes)
    later = peak is not None and peak.step is not None and peak.step > look.first_step
    is_higher = later and peak is not None and peak.allocated_bytes > _HIGHER * look.whole_bytes
    note: Row = ((f" the highest: {peak.describe_steps()}", "warn"),) if is_higher and peak is not None else ()
    title = (*panel_title(f"{look.description}, by line, {unit.name}", focused), *note)
    rows = [draw_rule(title if row_width(title) < width else title[:1], width, glyphs)]
    for blocks in look.blocks:
        style = phase_style(blocks.phase)
        figure = unit.format_bytes(blocks.total_bytes)
        text = fit_text(sanitize(blocks.text, glyphs), width - len(figure) - 3, glyphs)
        rows.append(((f"{figure} ", "value"), (glyphs.find_sample(style), style), (f" {text}", "text")))
    if look.before_bytes:
        rows.append(((f"{unit.format_bytes(look.before_bytes)} ", "value"), ("  allocated before", "muted")))
    hints: list[Row] = [((line, "muted"),) for line in wrap_text(hint, width, _HINT_ROWS, glyphs)]
    rows = rows[: max(1, height - len(hints))] + hints
    return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)


def count_look_rows(look: Look) -> int:
    """Return how many rows :func:`draw_look` can use."""
    return 1 + len(look.blocks) + bool(look.before_bytes) + _HINT_ROWS
