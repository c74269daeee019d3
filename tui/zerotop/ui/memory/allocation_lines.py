"""The lines that allocated the largest blocks of the step that the probe looked at last."""

from __future__ import annotations

from zerotop.analysis.memory.block_lines import Look
from zerotop.ui.drawing.formatting import choose_size_unit
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import draw_rule, panel_title
from zerotop.ui.drawing.text import fit_text, sanitize, wrap_text

_HINT_ROWS = 2


def draw_look(look: Look, hint: str, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw a row for each line; ``hint`` says how to see every allocation."""
    unit = choose_size_unit(look.whole_bytes)
    rows = [draw_rule(panel_title(f"{look.description}, by line, {unit.name}", focused), width, glyphs)]
    for blocks in look.blocks:
        style = phase_style(blocks.phase)
        size = unit.format_bytes(blocks.total_bytes)
        text = fit_text(sanitize(blocks.text, glyphs), width - len(size) - 3, glyphs)
        rows.append(((f"{size} ", "value"), (glyphs.find_sample(style), style), (f" {text}", "text")))
    if look.before_bytes:
        rows.append(((f"{unit.format_bytes(look.before_bytes)} ", "value"), ("  allocated before", "muted")))
    hints: list[Row] = [((line, "muted"),) for line in wrap_text(hint, width, _HINT_ROWS, glyphs)]
    rows = rows[: max(1, height - len(hints))] + hints
    return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)


def count_look_rows(look: Look) -> int:
    """Return how many rows :func:`draw_look` can use."""
    return 1 + len(look.blocks) + bool(look.before_bytes) + _HINT_ROWS
