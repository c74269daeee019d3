"""Peak memory of each phase, and the health of PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.analysis.formatting import format_count
from zerotop.analysis.memory.allocator_health import AllocatorHealth
from zerotop.analysis.memory.phase_peaks import BEFORE, PhasePeak
from zerotop.analysis.views.memory_view import MemoryView
from zerotop.ui.charts.bars import draw_stacked_bar
from zerotop.ui.drawing.formatting import SizeUnit, choose_size_unit
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, choose_items, fit_height, fit_row, join_rows, row_width
from zerotop.ui.drawing.table import Column, draw_rule, panel_title, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop_probe.recording.tables import UNKNOWN


def draw_peaks(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw a bar for each phase with its peak of allocated memory, the highest first."""
    if view.peaks is None:
        rows = [draw_rule(panel_title("Peaks by phase", focused), width, glyphs)]
        if height > 1:
            reason = (
                "Peaks by phase are those of PyTorch's allocator on a GPU, which no rank recorded."
                if view.rank is not None
                else ""
            )
            rows.append(fit_row(((fit_text(reason, width, glyphs), "muted"),), width, glyphs))
        return fit_height(rows, width, height, glyphs)
    peaks = view.peaks.phases
    unit = choose_size_unit(peaks[0].allocated_bytes)
    placed = place_columns(_build_columns(unit, peaks, view.micro_steps > 1, glyphs), width)
    rows = [draw_rule(panel_title(f"Peak by phase, {unit.name}", focused), width, glyphs, placed)]
    rows += [placed.draw_row(peak, width, glyphs) for peak in peaks[: height - 1]]
    return fit_height(rows, width, height, glyphs)


def _build_columns(
    unit: SizeUnit, peaks: Sequence[PhasePeak], has_micro_steps: bool, glyphs: Glyphs
) -> list[Column[PhasePeak]]:
    highest, heading = peaks[0].allocated_bytes, "step/micro" if has_micro_steps else "step"
    longest = 15 if peaks[0].phase != BEFORE else len(BEFORE) + 1

    def draw_name(peak: PhasePeak, width: int) -> Row:
        return ((fit_text(peak.phase.replace("_", " "), width, glyphs), "text"),)

    def draw_bar(peak: PhasePeak, width: int) -> Row:
        parts = [(phase_style(peak.phase), float(peak.allocated_bytes))]
        return draw_stacked_bar(parts, float(highest), width, glyphs, rest="strip" if glyphs.smooth else "memory-free")

    def draw_position(peak: PhasePeak, width: int) -> Row:
        is_one = has_micro_steps and peak.step == peak.last_step and peak.micro_step != UNKNOWN
        text = f"{peak.step}/{peak.micro_step}" if is_one else peak.steps_text
        return ((text.rjust(width) if peak.is_in_step else "", "muted"),)

    def draw_exactness(peak: PhasePeak, _: int) -> Row:
        return (("" if peak.exact else "sampled", "muted"),)

    return [
        Column("", longest, 9, draw_name, left=True),
        Column("", 6, 8, draw_bar, grows=True),
        Column("peak", unit.width, 9, lambda peak, _: ((unit.format_bytes(peak.allocated_bytes), "value"),)),
        Column("reserved", 8, 4, lambda peak, _: ((unit.format_bytes(peak.reserved_bytes).rjust(8), "muted"),)),
        Column(heading, max(len(heading) + 4, *(len(peak.steps_text) for peak in peaks)), 5, draw_position),
        Column("", 7, 1, draw_exactness),
    ]


def draw_health(view: MemoryView, width: int, glyphs: Glyphs) -> Row:
    """Draw one row: cache flushes, what is unused where most is reserved, split blocks, segments, and the settings."""
    if view.health is None:
        return fit_row((), width, glyphs)
    health = view.health
    items: list[tuple[int, Row]] = [
        (9 if health.retries else 6, ((format_count(health.retries, "cache flush"), "warn" if health.retries else "text"),))
    ]
    if health.ooms:
        items.append((9, ((f"{health.ooms} out of memory", "alert"),)))
    if health.at_peak is not None:
        peak = health.at_peak
        unit = choose_size_unit(peak.reserved_bytes)
        reserved, unused = (unit.format_bytes(size).strip() for size in (peak.reserved_bytes, peak.unallocated_bytes))
        text = f"{peak.title}: {reserved} {unit.name}, {unused} unused"
        items.append((7, ((text, "text"),)))
    if health.inactive_split_bytes:
        split = choose_size_unit(health.inactive_split_bytes)
        size = f"{split.format_bytes(health.inactive_split_bytes).strip()} {split.name}"
        items.append((5, ((f"{size} in split blocks", "text"),)))
    if health.segments is not None:
        items.append((4, ((format_count(health.segments, "segment"), "text"),)))
    items.append((6, ((sanitize(_describe_settings(health), glyphs), "muted"),)))
    fitting = [item for item in items if row_width(item[1]) <= width - 11]
    row = join_rows(choose_items(fitting, width - 11, gap=3), gap=3)
    return fit_row((("allocator  ", "label"), *row), width, glyphs)


def _describe_settings(health: AllocatorHealth) -> str:
    settings = health.settings
    if not settings.caching:
        return "caching is off"
    return f"{settings.variable}={settings.text}" if settings.variable else "PyTorch's default settings"
