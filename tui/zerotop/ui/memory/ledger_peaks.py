"""Which phase needs how much memory, and how PyTorch's allocator fares."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.analysis.formatting import plural
from zerotop.analysis.memory.allocator_health import AllocatorHealth
from zerotop.analysis.memory.memory_view import MemoryView
from zerotop.analysis.memory.phase_peaks import BEFORE, PhasePeak
from zerotop.ui.charts.bars import stacked_bar
from zerotop.ui.drawing.formatting import share
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, choose, filled, spaced, to_height
from zerotop.ui.drawing.table import Column, place, rule
from zerotop.ui.drawing.text import fit, literal
from zerotop.ui.memory.ledger_style import Unit, unit_for


def draw_peaks(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """A bar for each phase with the highest that was allocated in it, the owner of the peak first."""
    style = "title-focused" if focused else "title"
    if view.peaks is None:
        rows = [rule((("Peaks by phase", style),), width, glyphs)]
        if height > 1:
            why = "No rank has recorded its allocator: peaks by phase need a GPU." if view.rank is not None else ""
            rows.append(filled(((fit(why, width, glyphs), "muted"),), width, glyphs))
        return to_height(rows, width, height, glyphs)
    peaks = view.peaks.phases
    unit = unit_for(peaks[0].allocated_bytes)
    placed = place(_columns(unit, peaks, view.micro_steps > 1, glyphs), width)
    rows = [rule(((f"Peak by phase, {unit.name}", style),), width, glyphs, placed)]
    rows += [placed.row(peak, width, glyphs) for peak in peaks[: height - 1]]
    return to_height(rows, width, height, glyphs)


def _columns(unit: Unit, peaks: Sequence[PhasePeak], several: bool, glyphs: Glyphs) -> list[Column[PhasePeak]]:
    """``several``: steps have more than one micro-step."""
    highest, heading = peaks[0].allocated_bytes, "step/micro" if several else "step"
    longest = 15 if peaks[0].phase != BEFORE else len(BEFORE) + 1

    def name(peak: PhasePeak, width: int) -> Row:
        return ((fit(peak.phase.replace("_", " "), width, glyphs), "text"),)

    def bar(peak: PhasePeak, width: int) -> Row:
        parts = [(phase_style(peak.phase), float(peak.allocated_bytes))]
        return stacked_bar(parts, float(highest), width, glyphs, rest="strip" if glyphs.smooth else "memory-free")

    def place_of(peak: PhasePeak, width: int) -> Row:
        at = f"{peak.step}/{peak.micro_step}" if several else str(peak.step)
        return ((at.rjust(width) if peak.in_a_step else "", "muted"),)

    def exact(peak: PhasePeak, _: int) -> Row:
        return (("" if peak.exact else "sampled", "muted"),)

    return [
        Column((), longest, 9, name, left=True),
        Column((), 6, 8, bar, grows=True),
        Column((("peak", "heading"),), unit.width, 9, lambda peak, _: ((unit.text(peak.allocated_bytes), "value"),)),
        Column((("reserved", "heading"),), 8, 4, lambda peak, _: ((unit.text(peak.reserved_bytes).rjust(8), "muted"),)),
        Column(((heading, "heading"),), len(heading) + 4, 5, place_of),
        Column((), 7, 1, exact),
    ]


def draw_health(view: MemoryView, width: int, glyphs: Glyphs) -> Row:
    """One row: retries, fragmentation at the peak, split blocks, segments, the configuration in force."""
    if view.health is None:
        return filled((), width, glyphs)
    health, items = view.health, []
    items.append((9, ((plural(health.retries, "cache flush"), "warn" if health.retries else "text"),)))
    if health.ooms:
        items.append((9, ((f"{health.ooms} out of memory", "alert"),)))
    if health.at_peak is not None:
        unit, lost = unit_for(health.at_peak.reserved_bytes), health.at_peak.bytes
        text = f"{unit.text(lost).strip()} {unit.name} of reserved unused at its peak ({share(health.at_peak.share)})"
        items.append((7, ((text, "text"),)))
    split = unit_for(health.inactive_split_bytes)
    items.append((5, ((f"{split.text(health.inactive_split_bytes).strip()} {split.name} in split blocks", "text"),)))
    if health.segments is not None:
        items.append((4, ((plural(health.segments, "segment"), "text"),)))
    items.append((6, ((literal(_settings(health), glyphs), "muted"),)))
    row = spaced(choose([(weight, row) for weight, row in items], width - 11, gap=3), gap=3)
    return filled((("allocator  ", "label"), *row), width, glyphs)


def _settings(health: AllocatorHealth) -> str:
    settings = health.settings
    if not settings.caching:
        return "caching is off"
    return f"{settings.variable}={settings.text}" if settings.variable else "PyTorch's default settings"
