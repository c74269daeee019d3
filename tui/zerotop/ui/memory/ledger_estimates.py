"""DeepSpeed's own memory estimates for this model with each ZeRO stage and offload."""

from __future__ import annotations

from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate
from zerotop.analysis.views.memory_view import MemoryView
from zerotop.ui.drawing.formatting import SizeUnit, choose_size_unit
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row
from zerotop.ui.drawing.table import Column, draw_rule, panel_title, place_columns
from zerotop.ui.drawing.text import fit_text, wrap_text


def draw_estimates(view: MemoryView, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw at most ``height`` rows, none without an estimate; those of the job's own options are highlighted."""
    if not view.estimates or height < 3:
        return []
    unit = choose_size_unit(max(max(estimate.gpu_bytes, estimate.host_bytes) for estimate in view.estimates))
    own = set(view.own_estimates)
    placed = place_columns(_build_columns(unit, own, glyphs), width)
    rows = [draw_rule(panel_title(f"DeepSpeed's estimates, {unit.name}", False), width, glyphs, placed)]
    rows += [placed.draw_row(estimate, width, glyphs) for estimate in view.estimates[: height - 1]]
    if view.setup is not None and view.setup.largest_layer is None:
        lines = wrap_text(_LAYER_NOTE, width, height - len(rows), glyphs)
        rows += [fit_row(((line, "muted"),), width, glyphs) for line in lines]
    return rows


_LAYER_NOTE = "stage 3 needs the size of the largest layer, which was not recorded"


def _build_columns(unit: SizeUnit, own: set[Estimate], glyphs: Glyphs) -> list[Column[Estimate]]:
    def choose_style(estimate: Estimate) -> str:
        return "accent" if estimate in own else "muted"

    def draw_options(estimate: Estimate, width: int) -> Row:
        return ((fit_text(_describe_options(estimate, glyphs), width, glyphs), choose_style(estimate)),)

    def draw_gpu(estimate: Estimate, width: int) -> Row:
        return ((unit.format_bytes(estimate.gpu_bytes).rjust(width), choose_style(estimate)),)

    def draw_host(estimate: Estimate, width: int) -> Row:
        return ((unit.format_bytes(estimate.host_bytes).rjust(width), choose_style(estimate)),)

    return [
        Column("", 34, 9, draw_options, grows=True, left=True),
        Column("each GPU", 8, 9, draw_gpu),
        Column("each host", 9, 8, draw_host),
        Column("", 8, 2, lambda estimate, _: (("this job" if estimate in own else "", "accent"),)),
    ]


def _describe_options(estimate: Estimate, glyphs: Glyphs) -> str:
    """Return ``stage 3, params+optimizer→CPU, zero.Init``."""
    options = (("params", estimate.offload_parameters), ("optimizer", estimate.offload_optimizer))
    offloaded = [name for name, is_offloaded in options if is_offloaded]
    offload = f", {'+'.join(offloaded)}→CPU" if offloaded else ""
    return glyphs.to_plain(f"stage {estimate.stage}{offload}{', zero.Init' if estimate.zero_init else ''}")
