"""The ranks as a short table, to choose one of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerotop.analysis.live_view import LiveView, Rank
from zerotop.analysis.ranks.affinity import Cores, format_cores
from zerotop.ui.drawing.formatting import MISSING, format_fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import format_cores_used, rank_name
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import Column, draw_rule, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.live.cpu_gpu import draw_busiest_threads, draw_phase_now
from zerotop.ui.live.memory import panel_title


def find_first_visible(ranks: Sequence[Rank], chosen: int | None, room: int) -> int:
    """The place of the first rank that is seen, so that the chosen one is, with others around it."""
    place_of = next((place for place, rank in enumerate(ranks) if rank.rank == chosen), 0)
    return max(0, min(place_of - room // 2, len(ranks) - room))


def draw_ranks(
    view: LiveView, chosen: int | None, cores_by_rank: Mapping[int, Cores], width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """Each rank's cores and threads. ``bound`` has the cores that a rank may run on, where that was recorded."""
    if height <= 0 or width <= 0:
        return []
    placed = place_columns(_build_columns(view, chosen, cores_by_rank, glyphs), width)
    rows = [draw_rule(_draw_title(view, width), width, glyphs, placed)]
    first = find_first_visible(view.ranks, chosen, height - 1)
    rows.extend(placed.draw_row(rank, width, glyphs) for rank in view.ranks[first : first + height - 1])
    if not view.ranks:
        rows.append(fit_row((("  no rank has said hello yet", "muted"),), width, glyphs))
    return fit_height(rows, width, height, glyphs)


def _draw_title(view: LiveView, width: int) -> Row:
    used = format_cores_used(view)
    return (*panel_title("Ranks", False), (f" {used}" if used and width >= 60 else "", "title-value"))


def _build_columns(
    view: LiveView, chosen: int | None, cores_by_rank: Mapping[int, Cores], glyphs: Glyphs
) -> list[Column[Rank]]:
    hosts = len({rank.host for rank in view.ranks}) > 1
    longest = max([4, *(len(rank_name(rank.rank, short=True)) for rank in view.ranks)])

    def draw_name(rank: Rank, size: int) -> Row:
        mine, word = rank.rank == chosen, rank_name(rank.rank, short=True).rjust(size - 1)
        return ((glyphs.prompt if mine else " ", "accent"), (word, "accent" if mine else "label"))

    def draw_phase(rank: Rank, size: int) -> Row:
        return draw_phase_now(rank, view.job, size, glyphs)

    def draw_figure(text: str, rank: Rank, size: int, style: str = "value") -> Row:
        return ((text.rjust(size), style),) if rank.alive else ((glyphs.to_plain(MISSING).rjust(size), "muted"),)

    def draw_waiting(rank: Rank, size: int) -> Row:
        return draw_figure(
            format_fixed(rank.waiting_cores, 1, size), rank, size, "warn" if rank.waiting_cores > 1 else "muted"
        )

    def draw_host(rank: Rank, size: int) -> Row:
        return ((fit_text(sanitize(rank.host, glyphs), size, glyphs, at_words=False).ljust(size), "muted"),)

    def draw_affinity(rank: Rank, size: int) -> Row:
        allowed = cores_by_rank.get(rank.rank)
        text = format_cores(allowed) if allowed else glyphs.to_plain(MISSING)
        return (((text if len(text) <= size else f"{len(allowed or ())} cores").rjust(size), "muted"),)

    def draw_busiest(rank: Rank, size: int) -> Row:
        return (("  ", "text"), *draw_busiest_threads(rank, size - 2, glyphs))

    return [
        Column((), longest + 1, 9, draw_name, left=True),
        *([Column((("host", "heading"),), 10, 1, draw_host, left=True)] if hosts else []),
        Column((("now", "heading"),), 12, 6, draw_phase, left=True),
        Column(
            (("cores", "heading"),), 5, 9, lambda rank, size: draw_figure(format_fixed(rank.cores_used, 1, size), rank, size)
        ),
        Column((("busy", "heading"),), 4, 8, lambda rank, size: draw_figure(str(rank.busy_threads), rank, size)),
        Column((("wait", "heading"),), 4, 7, draw_waiting),
        Column((("thr", "heading"),), 4, 5, lambda rank, size: draw_figure(str(rank.thread_count), rank, size, "muted")),
        *([Column((("bound to", "heading"),), 10, 3, draw_affinity)] if cores_by_rank else []),
        Column((("  busiest threads", "heading"),), 16, 1, draw_busiest, grows=True, left=True),
    ]
