"""The ranks screen: which rank differs from the others."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import ClassVar

from textual import events
from textual.binding import BindingType

from zerotop.analysis.hangs.reader import Stillness, find_stillness
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.base.base_screen import MonitorScreen, ScreenPicture
from zerotop.ui.base.bindings import rank_bindings
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.base.pointed_panel import PointedPanel
from zerotop.ui.dialogs.find_rank_dialog import FindRankDialog, FoundRanks
from zerotop.ui.dialogs.help_terms import LEFT_OUT_TERM
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.layout import GAP, Box
from zerotop.ui.drawing.rows import Row
from zerotop.ui.ranks.clipboard import format_matrix, format_table
from zerotop.ui.ranks.heatmap import MapRows, draw_map, max_shown_steps
from zerotop.ui.ranks.model import Ranking
from zerotop.ui.ranks.stacks import copy_stacks, count_stack_rows, draw_stacks
from zerotop.ui.ranks.table import draw_table

TABLE_WIDTH = 46
_TABLE_ROWS = 12
_MAP_EXTRA_ROWS = 3  # title, sentence and steps
_LEAST_MAP_ROWS = 8  # with fewer rows under the stacks, the map is not shown
_SIDE_BY_SIDE_WIDTH = 100  # from this width, the table stands beside the map


class RankMap(PointedPanel, can_focus=True):
    """A heatmap of ranks and steps. The mouse shows values, a click chooses a rank."""

    def __init__(self, glyphs: Glyphs, ranking: Ranking, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._ranking = ranking
        self._map = MapRows([], {})

    def cache_key(self, frame: Frame) -> tuple[object, ...]:
        return (self._ranking.make_picture(frame),)

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        picture = self._ranking.make_picture(frame, max_shown_steps(width))
        self._map = draw_map(picture, width, height, self.glyphs, focused=self.has_focus)
        return self._map.rows

    def describe_cell(self, frame: Frame, x: int, y: int) -> str:
        return self._map.describe_cell(x, y)

    def copy_text(self) -> str:
        """Return all ranks and steps, including those that do not fit."""
        return format_matrix(self._ranking.make_picture(self.frame)) if self.frame is not None else ""

    def on_click(self, event: events.Click) -> None:
        rank = self._map.ranks.get(event.y)
        if rank is not None:
            self.post_message(MonitorScreen.RankChosen(rank))


class RankTable(FrameWidget, can_focus=True):
    """The chosen rank compared with the others."""

    def __init__(self, glyphs: Glyphs, ranking: Ranking, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._ranking = ranking

    def cache_key(self, frame: Frame) -> tuple[object, ...]:
        return (self._ranking.make_picture(frame),)

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return draw_table(self._ranking.make_picture(frame), width, height, self.glyphs, focused=self.has_focus)

    def copy_text(self) -> str:
        """Return the table in SI units."""
        return format_table(self._ranking.make_picture(self.frame)) if self.frame is not None else ""


class RankStacksPanel(FrameWidget, can_focus=True):
    """The stacks of the ranks while a job makes no progress."""

    def __init__(self, glyphs: Glyphs, recording: Recording, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._recording = recording

    def find_stillness(self, frame: Frame) -> Stillness | None:
        """Return the stuck ranks and their stacks at the frame's cursor; None if they work."""
        return find_stillness(self._recording.at(frame.view.cursor_ns))

    def cache_key(self, frame: Frame) -> tuple[object, ...]:
        return self.find_stillness(frame), frame.view.cursor_ns // 10**9, _needs_sentences(frame)

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        found = self.find_stillness(frame)
        if found is None:
            return []
        cursor_ns, with_sentences = frame.view.cursor_ns, _needs_sentences(frame)
        return draw_stacks(
            found, cursor_ns, width, height, self.glyphs, with_sentences=with_sentences, focused=self.has_focus
        )

    def copy_text(self) -> str:
        """Return all stacks in full."""
        found = self.find_stillness(self.frame) if self.frame is not None else None
        return copy_stacks(found.standstill) if found is not None else ""


def _needs_sentences(frame: Frame) -> bool:
    """Whether the finding about the standstill is not under the header."""
    return frame.headline is None or frame.headline.name not in ("hung_ranks", "stuck_at_start")


class RanksScreen(MonitorScreen):
    """Shows ranks by steps for any metric, and compares the chosen rank with the others."""

    NAME = "ranks"
    TITLE = "Ranks"
    HELP = "The ranks screen: which rank differs, in which metric, and since when."
    TERMS = (
        (
            "map",
            "A line for each rank, a column for each step, the newest at the right. The colour shows the metric in the\n"
            "title: the farther from the background, the higher the value.",
        ),
        (
            "outliers first",
            "Ranks that differ from the median rank by more than 3 % come first, the others follow in order. With more\n"
            "ranks than lines, the ranks of a node or of a block share a line, which shows the most extreme of them.",
        ),
        (
            "delays others",
            "How much later than the median rank a rank finished the work it does alone (data, forward, and the gaps\n"
            "between them): the others wait that long for it at the next collective, mostly in backward.",
        ),
        (
            "least free",
            "The lowest free memory of the rank's GPU in NVML's samples of each step; other processes' use counts.\n"
            "It shows how close the rank came to an out-of-memory error.",
        ),
        (
            "stacks",
            "The lines at which ranks are stuck while no phase begins or ends: ranks with the same stack together, the\n"
            "one that the others wait for first. The innermost line is on top; lines of libraries are dim.",
        ),
        (
            "other, others",
            "Times are means of the last 64 steps, or of those since a rank began to delay the others, or since fp16\n"
            "stopped skipping steps; phases of steps that were only counted are estimated (≈). Memory is the highest\n"
            "peak and the least free in these steps, cores are medians. Beside them are those of the median rank, of two\n"
            "ranks the other's.",
        ),
        (
            "nodes",
            "A line for each node, with its ranks and the range of their values. Its colours show the most extreme rank.\n"
            "Nodes of which a rank differs come first. Enter shows a node's ranks, / finds a node or a rank.",
        ),
        (
            "reduced",
            "With many nodes, those with a dim name send steps, phases, GPU memory and events once a second, and the rest\n"
            "while they are chosen or have a finding. clocks within: how far times of two nodes may be wrong at most.",
        ),
        LEFT_OUT_TERM,
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("m", "metric(1)", "ranks.metric", "Metric", "The next metric: times, memory, cores", 6),
        bind("M", "metric(-1)", "ranks.metric.back", "Previous metric", "The previous metric"),
        bind("N", "nodes", "ranks.nodes", "Nodes", "A line for each node, or for each rank", 6),
        bind("slash", "find", "ranks.find", "Find", "Find a node or a rank", 4, priority=True),
        bind("o", "order", "ranks.order", "Order", "Sort outliers first, or by rank", 4),
        *rank_bindings("ranks.up", "ranks.down", action="choose", importance=4),
        bind("S", "stacks", "ranks.stacks", "Stacks", "Show or hide the stacks of stuck ranks", 7),
        bind("enter", "timeline", "ranks.timeline", "Timeline", "Show a node's ranks, or the chosen rank's timeline", 5),
        bind("escape", "back", "ranks.back", "Close the node", "Restore all panels, or show the node as one line again"),
    ]

    def __init__(self, glyphs: Glyphs, source: RecordingSource) -> None:
        super().__init__(glyphs, source)
        self.ranking = self.long_work = Ranking(source)
        self._wanted_rank: int | None = None  # the chosen rank until a picture shows it
        self._stacks = RankStacksPanel(glyphs, source.recording, id="rank-stacks")
        self._hides_stacks = False

    def build_panels(self) -> Iterable[FrameWidget]:
        yield RankMap(self.glyphs, self.ranking, id="rank-map")
        yield RankTable(self.glyphs, self.ranking, id="rank-table")
        yield self._stacks

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        found = None if self._hides_stacks else self._stacks.find_stillness(frame)
        if found is None:
            return self._layout_map(room, frame)
        wanted = count_stack_rows(found, room.width, self.glyphs, with_sentences=_needs_sentences(frame))
        left = room.height - wanted
        if left < _LEAST_MAP_ROWS:
            return {"rank-stacks": room}
        below = Box(room.x, room.y + wanted, room.width, left)
        return {"rank-stacks": Box(room.x, room.y, room.width, wanted), **self._layout_map(below, frame)}

    def _layout_map(self, room: Box, frame: Frame) -> dict[str, Box]:
        picture = self.ranking.make_picture(frame)
        if picture.why_empty:
            return {"rank-map": room}
        if room.width >= _SIDE_BY_SIDE_WIDTH:
            left = room.width - GAP - TABLE_WIDTH
            return {
                "rank-map": Box(room.x, room.y, left, room.height),
                "rank-table": Box(room.x + left + GAP, room.y, TABLE_WIDTH, room.height),
            }
        # The map has a line for each rank or node if the table keeps half of its rows.
        under = max(_TABLE_ROWS // 2, min(_TABLE_ROWS, room.height - len(picture.lines) - _MAP_EXTRA_ROWS))
        under = under if room.height >= 12 else 0
        return {
            "rank-map": Box(room.x, room.y, room.width, room.height - under),
            "rank-table": Box(room.x, room.y + room.height - under, room.width, under),
        }

    def show_picture(self, picture: ScreenPicture) -> None:
        if picture.frame.rank == self._wanted_rank:
            self._wanted_rank = None
        super().show_picture(picture)

    def label_keys(self, frame: Frame) -> dict[str, str]:
        stands_still = self._stacks.find_stillness(frame) is not None
        picture = self.ranking.last_picture
        return {
            "ranks.nodes": "each rank" if picture is not None and picture.nodes else "nodes",
            "ranks.find": "" if picture is None or not picture.has_nodes else "find",
            "ranks.timeline": "its ranks" if picture is not None and picture.find_node(picture.chosen_rank) else "timeline",
            "ranks.order": "outliers" if self.ranking.by_number else "by rank",
            "ranks.stacks": "" if not stands_still else "stacks" if self._hides_stacks else "hide stacks",
        }

    def action_metric(self, number: int) -> None:
        self.request_redraw(partial(self.ranking.switch_metric, number))

    def action_stacks(self) -> None:
        self.request_redraw(self._switch_stacks)

    def _switch_stacks(self) -> None:
        self._hides_stacks = not self._hides_stacks

    def action_order(self) -> None:
        self.request_redraw(self.ranking.switch_order)

    async def action_choose(self, number: int) -> None:
        picture = self.ranking.last_picture
        rank = picture.find_neighbor(number, self._wanted_rank) if picture is not None else None
        if rank is not None:
            self._wanted_rank = rank
            await self.run_action(f"app.set_rank({rank})")

    def on_monitor_screen_rank_chosen(self, event: MonitorScreen.RankChosen) -> None:
        self._wanted_rank = event.rank

    async def action_timeline(self) -> None:
        """Show the ranks of the chosen node, or the timeline of the chosen rank."""
        await self.action_choose(0)
        picture = self.ranking.last_picture
        if picture is not None and (host := picture.find_node(picture.find_neighbor(0, self._wanted_rank))):
            self.request_redraw(partial(self.ranking.open_node, host))
        else:
            await self.run_action("app.switch('timeline')")

    def action_nodes(self) -> None:
        self.request_redraw(self.ranking.switch_nodes)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "back":
            return bool(self.zoomed or self.ranking.opened)
        if action == "nodes":
            picture = self.ranking.last_picture
            return picture is not None and picture.has_nodes
        return super().check_action(action, parameters)

    def action_back(self) -> None:
        """Restore all panels, or show the open node as one line again."""
        if self.zoomed:
            self.action_unzoom()
        else:
            self.request_redraw(partial(self.ranking.open_node, ""))

    def action_find(self) -> None:
        picture = self.ranking.last_picture
        if picture is not None and picture.matrix.processes:
            ranks = dict(zip(picture.matrix.rank_numbers.tolist(), picture.matrix.host_names, strict=True))
            self.app.push_screen(FindRankDialog(ranks, self.glyphs), self._show_found)

    async def _show_found(self, found: FoundRanks | None) -> None:
        """Choose the line of a node, or a rank, whose node then shows its ranks."""
        picture = self.ranking.last_picture
        if found is None or picture is None:
            return
        rank = picture.find_first_rank(found.ranks)
        self._wanted_rank = rank
        await self.run_action(f"app.set_rank({rank})")
        self.request_redraw(partial(self.ranking.open_node, "" if found.is_node else picture.find_host(rank)))
