"""The ranks as a short table with a chosen one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from zerotop.analysis.formatting import format_count
from zerotop.analysis.live_view import LiveView, Rank
from zerotop.analysis.processes.cores import Cores
from zerotop.ui.drawing.formatting import MISSING, format_fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import describe_no_ranks, draw_last_step, format_cores_used, rank_name
from zerotop.ui.drawing.rows import Row, align_ends, fit_height, fit_row, row_width
from zerotop.ui.drawing.table import Column, PlacedColumns, draw_rule, panel_title, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.live.cpu import build_figure_column, build_runnable_column, draw_busiest_threads, draw_phase_now
from zerotop_probe.recording.event_values import format_numbers

_WIDE = 100  # cells from which on the title has room at its right


def find_first_visible(ranks: Sequence[Rank], chosen: int | None, room: int) -> int:
    """Return the index of the first visible rank, so that the chosen one is visible with others around it."""
    chosen_index = next((index for index, rank in enumerate(ranks) if rank.rank == chosen), 0)
    return max(0, min(chosen_index - room // 2, len(ranks) - room))


def draw_ranks(
    view: LiveView, chosen: int | None, cores_by_rank: Mapping[int, Cores], width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """Draw each rank's cores and threads. ``cores_by_rank`` has the cores a rank may run on, where recorded."""
    if height <= 0 or width <= 0:
        return []
    placed = place_columns(_build_columns(view, chosen, cores_by_rank, glyphs), width)
    first = find_first_visible(view.ranks, chosen, height - 1)
    rows = [_draw_title(view, first, height - 1, placed, width, glyphs)]
    rows.extend(placed.draw_row(rank, width, glyphs) for rank in view.ranks[first : first + height - 1])
    if not view.ranks:
        rows.append(fit_row(((f"  {describe_no_ranks(view)}", "muted"),), width, glyphs))
    return fit_height(rows, width, height, glyphs)


def _draw_title(view: LiveView, first: int, shown: int, placed: PlacedColumns[Rank], width: int, glyphs: Glyphs) -> Row:
    """Draw the headings, the cores in use, and the range of shown ranks if there is no room for all."""
    count, is_wide = len(view.ranks), width >= _WIDE
    part = f" {first + 1}-{min(count, first + shown)} of {count}" if count > shown else ""
    used = format_cores_used(view, width if is_wide else 0) if width >= 60 and (is_wide or not part) else ""
    spans: Row = ((f" {used}", "title-value"),) if used else ()
    title: Row = (*panel_title("Ranks", False), *draw_last_step(view), (part, "title-warn"))
    return align_ends(draw_rule(title, width - row_width(spans), glyphs, placed), spans, width, glyphs)


def _build_columns(
    view: LiveView, chosen: int | None, cores_by_rank: Mapping[int, Cores], glyphs: Glyphs
) -> list[Column[Rank]]:
    has_hosts = len({rank.host for rank in view.ranks}) > 1
    longest = max([4, *(len(rank_name(rank.rank, short=True)) for rank in view.ranks)])

    def draw_name(rank: Rank, size: int) -> Row:
        is_chosen, name = rank.rank == chosen, rank_name(rank.rank, short=True).rjust(size - 1)
        return ((glyphs.prompt if is_chosen else " ", "accent"), (name, "accent" if is_chosen else "label"))

    def draw_phase(rank: Rank, size: int) -> Row:
        return draw_phase_now(rank, view.job, size, glyphs)

    def draw_host(rank: Rank, size: int) -> Row:
        return ((fit_text(sanitize(rank.host, glyphs), size, glyphs, at_words=False).ljust(size), "muted"),)

    def draw_affinity(rank: Rank, size: int) -> Row:
        allowed = cores_by_rank.get(rank.rank)
        text = format_numbers(allowed) if allowed else glyphs.to_plain(MISSING)
        return (((text if len(text) <= size else format_count(len(allowed or ()), "core")).rjust(size), "muted"),)

    def draw_busiest(rank: Rank, size: int) -> Row:
        return (("  ", "text"), *draw_busiest_threads(rank, size - 2, glyphs))

    figure = partial(build_figure_column, glyphs=glyphs)
    return [
        Column("", longest + 1, 9, draw_name, left=True),
        *([Column("host", 10, 1, draw_host, left=True)] if has_hosts else []),
        Column("now", 12, 6, draw_phase, left=True),
        figure("cores", 5, 9, lambda rank, size: format_fixed(rank.cores_used, 1, size)),
        build_runnable_column(8, glyphs),
        figure("threads", 7, 5, lambda rank, _: str(rank.thread_count), "muted"),
        *([Column("bound to", 10, 3, draw_affinity)] if cores_by_rank else []),
        Column("  busiest threads", 16, 1, draw_busiest, grows=True, left=True),
    ]
