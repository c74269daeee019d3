"""The ranks as a short table, to choose one of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerotop.analysis.live_view import LiveView, Rank
from zerotop.analysis.ranks.affinity import Cores, cores_text
from zerotop.ui.drawing.formatting import MISSING, fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import cores, rank_name
from zerotop.ui.drawing.rows import Row, filled, to_height
from zerotop.ui.drawing.table import Column, place, rule
from zerotop.ui.drawing.text import fit, literal
from zerotop.ui.live.cpu_gpu import busiest_threads, phase_now
from zerotop.ui.live.memory import panel_title


def first_seen(ranks: Sequence[Rank], chosen: int | None, room: int) -> int:
    """The place of the first rank that is seen, so that the chosen one is, with others around it."""
    place_of = next((place for place, rank in enumerate(ranks) if rank.rank == chosen), 0)
    return max(0, min(place_of - room // 2, len(ranks) - room))


def draw_ranks(
    view: LiveView, chosen: int | None, bound: Mapping[int, Cores], width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """Each rank's cores and threads. ``bound`` has the cores that a rank may run on, where that was recorded."""
    if height <= 0 or width <= 0:
        return []
    placed = place(_columns(view, chosen, bound, glyphs), width)
    rows = [rule(_title(view, width), width, glyphs, placed)]
    first = first_seen(view.ranks, chosen, height - 1)
    rows.extend(placed.row(rank, width, glyphs) for rank in view.ranks[first : first + height - 1])
    if not view.ranks:
        rows.append(filled((("  no rank has said hello yet", "muted"),), width, glyphs))
    return to_height(rows, width, height, glyphs)


def _title(view: LiveView, width: int) -> Row:
    used = cores(view)
    return (*panel_title("Ranks", False), (f" {used}" if used and width >= 60 else "", "title-value"))


def _columns(view: LiveView, chosen: int | None, bound: Mapping[int, Cores], glyphs: Glyphs) -> list[Column[Rank]]:
    hosts = len({rank.host for rank in view.ranks}) > 1
    longest = max([4, *(len(rank_name(rank.rank, short=True)) for rank in view.ranks)])

    def name(rank: Rank, size: int) -> Row:
        mine, word = rank.rank == chosen, rank_name(rank.rank, short=True).rjust(size - 1)
        return ((glyphs.prompt if mine else " ", "accent"), (word, "accent" if mine else "label"))

    def phase(rank: Rank, size: int) -> Row:
        return phase_now(rank, view.job, size, glyphs)

    def figure(text: str, rank: Rank, size: int, style: str = "value") -> Row:
        return ((text.rjust(size), style),) if rank.alive else ((glyphs.plain(MISSING).rjust(size), "muted"),)

    def waiting(rank: Rank, size: int) -> Row:
        return figure(fixed(rank.waiting_cores, 1, size), rank, size, "warn" if rank.waiting_cores > 1 else "muted")

    def host(rank: Rank, size: int) -> Row:
        return ((fit(literal(rank.host, glyphs), size, glyphs, words=False).ljust(size), "muted"),)

    def may_run_on(rank: Rank, size: int) -> Row:
        allowed = bound.get(rank.rank)
        text = cores_text(allowed) if allowed else glyphs.plain(MISSING)
        return (((text if len(text) <= size else f"{len(allowed or ())} cores").rjust(size), "muted"),)

    def busiest(rank: Rank, size: int) -> Row:
        return (("  ", "text"), *busiest_threads(rank, size - 2, glyphs))

    return [
        Column((), longest + 1, 9, name, left=True),
        *([Column((("host", "heading"),), 10, 1, host, left=True)] if hosts else []),
        Column((("now", "heading"),), 12, 6, phase, left=True),
        Column((("cores", "heading"),), 5, 9, lambda rank, size: figure(fixed(rank.cores_used, 1, size), rank, size)),
        Column((("busy", "heading"),), 4, 8, lambda rank, size: figure(str(rank.busy_threads), rank, size)),
        Column((("wait", "heading"),), 4, 7, waiting),
        Column((("thr", "heading"),), 4, 5, lambda rank, size: figure(str(rank.thread_count), rank, size, "muted")),
        *([Column((("bound to", "heading"),), 10, 3, may_run_on)] if bound else []),
        Column((("  busiest threads", "heading"),), 16, 1, busiest, grows=True, left=True),
    ]
