"""DeepSpeed's own estimates for a job like this, with each of its options: what another stage or offload would take."""

from __future__ import annotations

from zerotop.analysis.memory.deepspeed_estimates import Estimate
from zerotop.analysis.memory.memory_view import MemoryView
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row
from zerotop.ui.drawing.table import Column, draw_rule, place_columns
from zerotop.ui.drawing.text import fit_text, wrap_text
from zerotop.ui.memory.ledger_style import SizeUnit, choose_unit


def draw_estimates(view: MemoryView, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """At most ``height`` rows, none where there is nothing to estimate; what the job does stands out."""
    if not view.estimates or height < 3:
        return []
    unit = choose_unit(max(max(each.gpu_bytes, each.host_bytes) for each in view.estimates))
    own = set(view.own_estimates)
    placed = place_columns(_build_columns(unit, own, glyphs), width)
    rows = [draw_rule(((f"DeepSpeed's estimates, {unit.name}", "title"),), width, glyphs, placed)]
    rows += [placed.draw_row(each, width, glyphs) for each in view.estimates[: height - 1]]
    if view.setup is not None and view.setup.largest_layer is None:
        rows += [
            fit_row(((line, "muted"),), width, glyphs) for line in wrap_text(_LAYER_NOTE, width, height - len(rows), glyphs)
        ]
    return rows


_LAYER_NOTE = "those for stage 3 need the largest layer's size, which was not recorded"


def _build_columns(unit: SizeUnit, own: set[Estimate], glyphs: Glyphs) -> list[Column[Estimate]]:
    def choose_style(each: Estimate) -> str:
        return "accent" if each in own else "muted"

    def draw_options(each: Estimate, width: int) -> Row:
        return ((fit_text(_describe_estimate(each, glyphs), width, glyphs), choose_style(each)),)

    return [
        Column((), 34, 9, draw_options, grows=True, left=True),
        Column(
            (("each GPU", "heading"),),
            8,
            9,
            lambda each, _: ((unit.format_bytes(each.gpu_bytes).rjust(8), choose_style(each)),),
        ),
        Column(
            (("each host", "heading"),),
            9,
            8,
            lambda each, _: ((unit.format_bytes(each.host_bytes).rjust(9), choose_style(each)),),
        ),
        Column((), 8, 2, lambda each, _: (("this job" if each in own else "", "accent"),)),
    ]


def _describe_estimate(each: Estimate, glyphs: Glyphs) -> str:
    """``stage 3, optimizer and parameters on the CPU, zero.Init``."""
    moved = [name for name, away in (("optimizer", each.offload_optimizer), ("parameters", each.offload_parameters)) if away]
    where = f", {' and '.join(moved)} on the CPU" if moved else ""
    return glyphs.to_plain(f"stage {each.stage}{where}{', zero.Init' if each.zero_init else ''}")
