"""The threads screen: which threads of a rank run, when, and on which cores."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import ClassVar

from textual import events
from textual.binding import BindingType

from zerotop.analysis.live_view import Rank
from zerotop.analysis.ranks.threads import RankThreads, ThreadTable, describe_crowding
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.bindings import rank_bindings
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.base.pointed_panel import PointedPanel
from zerotop.ui.charts import GrowingScales
from zerotop.ui.dialogs.help_terms import COUNTED_TERM, LEFT_OUT_TERM
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import describe_no_ranks
from zerotop.ui.drawing.layout import GAP, Box
from zerotop.ui.drawing.rows import Row, fit_row
from zerotop.ui.ranks.awaited_rank import AwaitedRankFinder
from zerotop.ui.ranks.rank_list import draw_ranks, find_first_visible
from zerotop.ui.threads.drawing import ListState, ThreadRows, draw_threads, format_threads, measure_history
from zerotop.ui.widgets.scrollable import Scrollable

_SIDE_BY_SIDE_WIDTH, _LIST_WIDTH = 130, 42  # from this width the ranks stand beside the threads


class ThreadsScreen(MonitorScreen):
    """Shows which threads compute, and which wait for a core."""

    NAME = "threads"
    TITLE = "Threads"
    HELP = "One rank's threads: which of them run, in which phase, on which cores and NUMA node, and which wait for a core."
    TERMS = (
        (
            "cores used, runnable",
            "Cores in use, and threads that ran or were ready to run but had no core: means over the last second.\n"
            "More runnable threads than cores used: set OMP_NUM_THREADS, or bind ranks to cores.",
        ),
        (
            "ran on cores, node",
            "The cores on which the threads ran, and their NUMA nodes.\n"
            "Threads on two nodes access half of their memory through the other node.",
        ),
        (
            "may run on",
            "The cores that a thread is bound to (its affinity), by default all of the job's cores.\n"
            "deepspeed --bind_cores_to_rank gives each rank its own cores.",
        ),
        (
            "names of threads",
            "OpenMP team: sleeps in an OpenMP library. Python NAME, or the line where it computes: started by Python code.\n"
            "pool worker: nameless, computes at the same time as others, as OpenMP, BLAS and thread pools do.",
        ),
        (
            "others",
            "Only the busiest threads of each rank are recorded, twice a second. The others are only counted:\n"
            "most of them are idle, like unused thread pools. With them, the cores add up to those of the rank.",
        ),
        COUNTED_TERM,
        LEFT_OUT_TERM,
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        *rank_bindings("threads.up", "threads.down", action="rank", importance=7),
        bind("enter", "open", "threads.open", "Single threads", "Expand or collapse threads of the same kind", 6),
        bind("pageup", "rows(-1)", "threads.pageup", "Page up", "One page of threads up"),
        bind("pagedown", "rows(1)", "threads.pagedown", "Page down", "One page of threads down"),
    ]

    def __init__(self, glyphs: Glyphs, source: RecordingSource) -> None:
        super().__init__(glyphs, source)
        self.table = ThreadTable(source.recording)
        self._ranks = ShownRanks(source)

    main_panel = "threads"

    def build_panels(self) -> Iterable[FrameWidget]:
        yield RankList(self.glyphs, self.table, self._ranks, id="ranks")
        yield ThreadList(self.glyphs, self.table, self._ranks, self.source, id="threads")

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        ranks = max(1, len(frame.view.ranks))
        if room.width >= _SIDE_BY_SIDE_WIDTH and ranks > 2 and ranks >= room.height // 6:
            x = room.x + _LIST_WIDTH + GAP
            return {
                "ranks": Box(room.x, room.y, _LIST_WIDTH, room.height),
                "threads": Box(x, room.y, room.width - _LIST_WIDTH - GAP, room.height),
            }
        above = 1 + min(ranks, max(1, room.height // 3 - 1))
        if room.height < 8:
            return {"threads": room}
        return {
            "ranks": Box(room.x, room.y, room.width, above),
            "threads": Box(room.x, room.y + above, room.width, room.height - above),
        }

    def label_keys(self, frame: Frame) -> dict[str, str]:
        return {} if len(frame.view.ranks) > 1 else {"threads.up": ""}

    async def action_rank(self, number: int) -> None:
        """Choose a rank above or below the one shown."""
        await self.run_action(f"app.choose_rank({number}, {self._ranks.shown})")

    def action_open(self) -> None:
        self.query_one(ThreadList).toggle_groups()

    def action_rows(self, direction: int) -> None:
        panel = self.query_one(ThreadList)
        panel.scroll_rows(direction * max(1, panel.size.height // 2))


class ShownRanks:
    """Which rank's threads are shown: the chosen one, else the one that the others wait for, else the first."""

    def __init__(self, source: RecordingSource) -> None:
        self._awaited = AwaitedRankFinder(source)
        self.shown: int | None = None  # in the last frame

    def find(self, frame: Frame) -> Rank | None:
        ranks = frame.state_view.ranks
        awaited = None if frame.is_rank_chosen else self._awaited.find(frame).rank
        number = frame.rank if awaited is None else awaited
        found = next((rank for rank in ranks if rank.rank == number), ranks[0] if ranks else None)
        self.shown = None if found is None else found.rank
        return found


class RankList(FrameWidget):
    """All ranks; a click chooses one."""

    def __init__(self, glyphs: Glyphs, table: ThreadTable, ranks: ShownRanks, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.table = table
        self._ranks = ranks

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        view = frame.state_view
        self._ranks.find(frame)
        first = find_first_visible(view.ranks, self._ranks.shown, height - 1)
        visible = view.ranks[first : first + height - 1]
        affinities = self.table.affinities
        bound = {rank.rank: affinities.find_process_cores(rank.host, rank.pid, view.cursor_ns) for rank in visible}
        return draw_ranks(view, self._ranks.shown, bound if any(bound.values()) else {}, width, height, self.glyphs)

    def on_click(self, event: events.Click) -> None:
        if self.frame is None or event.y < 1:
            return
        ranks = self.frame.state_view.ranks
        place = find_first_visible(ranks, self._ranks.shown, self.size.height - 1) + event.y - 1
        if place < len(ranks):
            self.post_message(MonitorScreen.RankChosen(ranks[place].rank))


class ThreadList(Scrollable, PointedPanel):
    """The threads of the chosen rank. The mouse shows values, a click on a name shows its threads or hides them."""

    def __init__(self, glyphs: Glyphs, table: ThreadTable, ranks: ShownRanks, source: RecordingSource, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.table = table
        self._ranks = ranks
        self.source = source
        self._axis_scales = GrowingScales()
        self._process_key: tuple[str, int] | None = None
        self._open_groups: set[str] | None = None  # None: chosen by the room there is
        self._top_row = 0
        self.shown_threads: RankThreads | None = None
        self._drawn: ThreadRows | None = None

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        rank = self._ranks.find(frame)
        if rank is None:
            is_over = frame.view.job.state.is_over
            text = f"  {describe_no_ranks(frame.view)}{'.' if is_over else ': their threads appear here.'}"
            return [fit_row(((text, "muted"),), width, self.glyphs), *[fit_row((), width, self.glyphs)] * (height - 1)]
        if (rank.host, rank.pid) != self._process_key:
            self._process_key, self._top_row = (rank.host, rank.pid), 0
            self._axis_scales.clear()
        view = frame.state_view
        affinities = self.table.affinities
        nodes, bound = (
            affinities.count_nodes(rank.host),
            bool(affinities.find_process_cores(rank.host, rank.pid, view.cursor_ns)),
        )
        cells, cell_ns = measure_history(width, view.cursor_ns, nodes=nodes, bound=bound)
        first_ns = self.table.find_first_sample(rank, view.cursor_ns, cells * cell_ns)
        if first_ns is not None:
            cells, cell_ns = measure_history(width, view.cursor_ns - first_ns, nodes=nodes, bound=bound)
        self.shown_threads = self.table.threads_at(rank, view.cursor_ns, cells, cell_ns)
        cores = {host.name: host.cores for host in view.hosts}
        self._drawn = draw_threads(
            self.shown_threads,
            describe_crowding([one for one in view.ranks if one.host == rank.host], cores, affinities, view.cursor_ns),
            ListState(self._open_groups, self._top_row),
            self._axis_scales,
            self.source.begin_ns / 1e9,
            (width, height),
            self.glyphs,
        )
        self._top_row = self._drawn.top
        return self._drawn.rows

    def describe_cell(self, frame: Frame, x: int, y: int) -> str:
        if self.shown_threads is None or self._drawn is None:
            return ""
        return self._drawn.describe_cell(self.shown_threads, self.source.begin_ns / 1e9, x, y, self.glyphs)

    def on_click(self, event: events.Click) -> None:
        """Expand or collapse the threads of a name."""
        line = self._drawn.lines.get(event.y) if self._drawn is not None else None
        if line is not None and len(line.group.threads) > 1:
            self.request_redraw(partial(self._toggle_group, line.group.name))

    def copy_text(self) -> str:
        """Return each thread's figures."""
        return format_threads(self.shown_threads) if self.shown_threads is not None else ""

    def toggle_groups(self) -> None:
        """Show each thread, or one row for all threads of a name."""
        self.request_redraw(self._toggle_groups)

    def _toggle_groups(self) -> None:
        groups = self.shown_threads.groups if self.shown_threads is not None else ()
        self._open_groups = set() if self._open_groups else {group.name for group in groups}
        self._top_row = 0

    def _toggle_group(self, name: str) -> None:
        self._open_groups = (self._open_groups or set()) ^ {name}

    def scroll_rows(self, rows: int) -> None:
        """Scroll down the threads, or up if negative."""
        self.request_redraw(partial(self._scroll_rows, rows))

    def _scroll_rows(self, rows: int) -> None:
        self._top_row = max(0, self._top_row + rows)
