"""The threads of a rank's process: which of them run, when, and on which cores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from zerotop.analysis.live_view import Rank
from zerotop.analysis.ranks.threads import RankThreads, ThreadTable, describe_crowding
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.footer import Key
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source
from zerotop.ui.base.layout import GAP, Box
from zerotop.ui.charts import GrowingScales
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row
from zerotop.ui.ranks.rank_list import draw_ranks, find_first_visible
from zerotop.ui.threads.drawing import draw_threads, measure_history, threads_text
from zerotop.ui.widgets.frame_widget import FrameWidget

_SIDE_BY_SIDE_WIDTH, _LIST_WIDTH = 130, 42  # from this width on the ranks are beside the threads


class ThreadsScreen(MonitorScreen):
    """Who computes, and who waits for a core."""

    NAME = "threads"
    TITLE = "Threads"
    HELP = "The threads of one rank: which run, in which phase, on which cores and NUMA node, and which wait for a core."
    TERMS = (
        (
            "cores, busy",
            "Processor time per wall time; and how many threads ran for at least half of the time.\n"
            "16 busy threads that use 9 cores take turns, or wait for one another.",
        ),
        (
            "wait",
            "How many threads at any time were ready to run and had no core to run on.\n"
            "Much of it means more threads than cores: set OMP_NUM_THREADS, or bind ranks to cores.",
        ),
        (
            "ran on cores, node",
            "The cores that the threads were seen on, and the NUMA nodes these belong to.\n"
            "Threads on two nodes reach half of their memory through the other one.",
        ),
        (
            "may run on",
            "The cores that a thread is bound to (its affinity); where it is not, all that the job has.\n"
            "deepspeed --bind_cores_to_rank gives each rank cores of its own.",
        ),
        (
            "others",
            "Only the busiest threads of each rank are recorded, twice a second. The others are counted:\n"
            "most sleep, as pools that nobody uses do.",
        ),
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "app.choose_rank(-1)", "Rank before", id="threads.up", tooltip="The rank before", show=False),
        Binding("down", "app.choose_rank(1)", "Next rank", id="threads.down", tooltip="The next rank", show=False),
        Binding("enter", "open", "Single threads", id="threads.open", tooltip="Each thread of a name by itself, and back"),
        Binding("pageup", "rows(-1)", "Threads back", id="threads.pageup", tooltip="A page of threads back", show=False),
        Binding("pagedown", "rows(1)", "Threads on", id="threads.pagedown", tooltip="A page of threads on", show=False),
    ]

    def __init__(self, glyphs: Glyphs, source: Source) -> None:
        super().__init__(glyphs, source)
        self.table = ThreadTable(source.session)

    main_panel = "threads"

    def build_panels(self) -> Iterable[FrameWidget]:
        yield RankList(self.glyphs, self.table, id="ranks")
        yield ThreadList(self.glyphs, self.table, self.source, id="threads")

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        ranks = max(1, len(frame.view.ranks))
        if room.width >= _SIDE_BY_SIDE_WIDTH and ranks > 2 and ranks >= room.height // 6:
            x = room.x + _LIST_WIDTH + GAP
            return {
                "ranks": Box(room.x, room.y, _LIST_WIDTH, room.height),
                "threads": Box(x, room.y, room.width - _LIST_WIDTH - GAP, room.height),
            }
        above = 1 + min(ranks, max(1, room.height // 4 - 1))
        if room.height < 8:
            return {"threads": room}
        return {
            "ranks": Box(room.x, room.y, room.width, above),
            "threads": Box(room.x, room.y + above, room.width, room.height - above),
        }

    def footer_keys(self, frame: Frame) -> Sequence[Key]:
        several = len(frame.view.ranks) > 1
        return (
            *(
                [Key("↑↓", "rank", "app.choose_rank(1)", 7, ("app.choose_rank(-1)", "app.choose_rank(1)"))]
                if several
                else []
            ),
            Key("enter", "single threads", "screen.open", 6),
            Key("y", "copy", "app.copy", 2),
        )

    def action_open(self) -> None:
        self.query_one(ThreadList).toggle_groups()

    def action_rows(self, direction: int) -> None:
        panel = self.query_one(ThreadList)
        panel.scroll_rows(direction * max(1, panel.size.height // 2))

    def on_rank_list_chosen(self, event: RankList.Chosen) -> None:
        event.stop()
        self.post_message(self.RankChosen(event.rank))


def find_shown_rank(frame: Frame) -> Rank | None:
    """The rank that the screen is about."""
    ranks = frame.view.ranks
    return next((rank for rank in ranks if rank.rank == frame.rank), ranks[0] if ranks else None)


class RankList(FrameWidget):
    """All ranks, of which a click chooses one."""

    class Chosen(Message):
        """This one."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    def __init__(self, glyphs: Glyphs, table: ThreadTable, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.table = table

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        view = frame.view
        first = find_first_visible(view.ranks, frame.rank, height - 1)
        seen = view.ranks[first : first + height - 1]
        affinities = self.table.affinities
        bound = {rank.rank: affinities.find_process_cores(rank.host, rank.pid, view.cursor_ns) for rank in seen}
        return draw_ranks(view, frame.rank, bound if any(bound.values()) else {}, width, height, self.glyphs)

    def on_click(self, event: events.Click) -> None:
        if self.frame is None or event.y < 1:
            return
        ranks = self.frame.view.ranks
        place = find_first_visible(ranks, self.frame.rank, self.size.height - 1) + event.y - 1
        if place < len(ranks):
            self.post_message(self.Chosen(ranks[place].rank))


class ThreadList(FrameWidget):
    """The threads of the chosen rank."""

    def __init__(self, glyphs: Glyphs, table: ThreadTable, source: Source, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.table = table
        self.source = source
        self._axis_scales = GrowingScales()
        self._process_key: tuple[str, int] | None = None
        self._open_groups: set[str] | None = None  # nobody chose
        self._top_row = 0
        self._shown_threads: RankThreads | None = None

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        rank = find_shown_rank(frame)
        if rank is None:
            text = "  No rank process was seen yet: its threads are shown here once it runs."
            return [fit_row(((text, "muted"),), width, self.glyphs), *[fit_row((), width, self.glyphs)] * (height - 1)]
        if (rank.host, rank.pid) != self._process_key:
            self._process_key, self._top_row = (rank.host, rank.pid), 0
            self._axis_scales.clear()
        view = frame.view
        affinities = self.table.affinities
        nodes, bound = (
            affinities.count_nodes(rank.host),
            bool(affinities.find_process_cores(rank.host, rank.pid, view.cursor_ns)),
        )
        length_ns = self.source.end_ns - self.source.begin_ns
        self._shown_threads = self.table.threads_at(
            rank, view.cursor_ns, *measure_history(width, length_ns, nodes=nodes, bound=bound)
        )
        cores = {host.name: host.cores for host in view.hosts}
        rows, self._top_row = draw_threads(
            self._shown_threads,
            describe_crowding([one for one in view.ranks if one.host == rank.host], cores, affinities, view.cursor_ns),
            self._open_groups,
            nodes,
            self._axis_scales,
            self.source.begin_ns / 1e9,
            (width, height),
            self.glyphs,
            top=self._top_row,
        )
        return rows

    def copy_text(self) -> str:
        """Each thread's figures."""
        return threads_text(self._shown_threads) if self._shown_threads is not None else ""

    def toggle_groups(self) -> None:
        """Each thread by itself, or all of a name together."""
        self.request_redraw(self._toggle_groups)

    def _toggle_groups(self) -> None:
        groups = self._shown_threads.groups if self._shown_threads is not None else ()
        self._open_groups = set() if self._open_groups else {group.name for group in groups}
        self._top_row = 0

    def scroll_rows(self, rows: int) -> None:
        """Further down the threads, or (negative) up."""
        self.request_redraw(partial(self._scroll_rows, rows))

    def _scroll_rows(self, rows: int) -> None:
        self._top_row = max(0, self._top_row + rows)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.scroll_rows(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.scroll_rows(3)
