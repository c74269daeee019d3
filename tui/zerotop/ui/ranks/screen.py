"""The ranks screen: who is different."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from zerotop.ui.base.base_screen import MonitorScreen, ScreenPicture
from zerotop.ui.base.footer import Key
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source
from zerotop.ui.base.layout import GAP, Box
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.drawing.units import get_units
from zerotop.ui.ranks.clipboard import matrix_text, table_text
from zerotop.ui.ranks.heatmap import MapRows, draw_map, max_shown_steps
from zerotop.ui.ranks.model import Ranking
from zerotop.ui.ranks.table import draw_table
from zerotop.ui.widgets.frame_widget import FrameWidget

TABLE_WIDTH = 46
_TABLE_ROWS = 12
_MAP_EXTRA_ROWS = 4  # rows of title, sentence and steps
_SIDE_BY_SIDE_WIDTH = 100  # cells from which on the table stands beside the map


class RankMap(FrameWidget, can_focus=True):
    """Ranks by steps, as colours."""

    class Clicked(Message):
        """A rank's line was clicked."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    def __init__(self, glyphs: Glyphs, ranking: Ranking, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._ranking = ranking
        self._drawn_inputs: tuple[object, ...] = ()
        self._map = MapRows([], {})

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        picture = self._ranking.make_picture(frame, max_shown_steps(width))
        drawn = (picture, width, height, self.has_focus, get_units())
        if drawn != self._drawn_inputs:
            self._drawn_inputs = drawn
            self._map = draw_map(picture, width, height, self.glyphs, focused=self.has_focus)
        return self._map.rows

    def copy_text(self) -> str:
        """All ranks and steps, not only those that there is room for."""
        return matrix_text(self._ranking.make_picture(self.frame)) if self.frame is not None else ""

    def on_click(self, event: events.Click) -> None:
        rank = self._map.ranks.get(event.y)
        if rank is not None:
            self.post_message(self.Clicked(rank))


class RankTable(FrameWidget, can_focus=True):
    """The chosen rank beside the others."""

    def __init__(self, glyphs: Glyphs, ranking: Ranking, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._ranking = ranking
        self._drawn_inputs: tuple[object, ...] = ()

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        drawn = (self._ranking.make_picture(frame), width, height, self.has_focus, get_units())
        if drawn == self._drawn_inputs:
            return self.drawn_rows
        self._drawn_inputs = drawn
        return draw_table(drawn[0], width, height, self.glyphs, focused=self.has_focus)

    def copy_text(self) -> str:
        """The same, in SI units."""
        return table_text(self._ranking.make_picture(self.frame)) if self.frame is not None else ""


class RanksScreen(MonitorScreen):
    """Ranks by steps, by any metric, and the chosen one beside the others."""

    NAME = "ranks"
    TITLE = "Ranks"
    HELP = "The ranks screen: which rank is different, in what, and since when."
    TERMS = (
        (
            "map",
            "A line for each rank, a column for each step, the newest at the right. The colour says how much of what\n"
            "is named in the title there was: far from the background is much, of free memory little.",
        ),
        (
            "outliers first",
            "Ranks that are more than 3 % off the one in the middle stand on top, the others in their order. Where there\n"
            "are more ranks than lines, nodes or pieces share one: the most telling of their ranks is drawn.",
        ),
        (
            "waited for",
            "How much later than the rank in the middle a rank was done with what it does by itself (data, forward, and\n"
            "what lies between): for so long the others wait for it where they meet, mostly in backward.",
        ),
        (
            "least free",
            "The least free memory of the rank's GPU in each step, whoever used the rest.\n"
            "It says how near the rank came to an out-of-memory error.",
        ),
        (
            "median",
            "Figures are medians of the last 64 steps, and beside them is what the rank in the middle of all has.",
        ),
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "metric(1)", "Metric", id="ranks.metric", tooltip="The next metric: times, memory, cores"),
        Binding("M", "metric(-1)", "Metric before", id="ranks.metric.back", tooltip="The metric before", show=False),
        Binding("o", "order", "Order", id="ranks.order", tooltip="Outliers first, or by number"),
        Binding("up", "choose(-1)", "Rank above", id="ranks.up", tooltip="The rank above in the map", show=False),
        Binding("down", "choose(1)", "Rank below", id="ranks.down", tooltip="The rank below in the map", show=False),
        Binding("enter", "timeline", "Its timeline", id="ranks.timeline", tooltip="The chosen rank's timeline"),
    ]

    def __init__(self, glyphs: Glyphs, source: Source) -> None:
        super().__init__(glyphs, source)
        self.ranking = self.long_work = Ranking(source)
        self._wanted_rank: int | None = None  # the rank that was chosen, until a picture has it

    def build_panels(self) -> Iterable[FrameWidget]:
        yield RankMap(self.glyphs, self.ranking, id="rank-map")
        yield RankTable(self.glyphs, self.ranking, id="rank-table")

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        if self.ranking.make_picture(frame).why_empty:
            return {"rank-map": room}
        if room.width >= _SIDE_BY_SIDE_WIDTH:
            left = room.width - GAP - TABLE_WIDTH
            return {
                "rank-map": Box(room.x, room.y, left, room.height),
                "rank-table": Box(room.x + left + GAP, room.y, TABLE_WIDTH, room.height),
            }
        # The map has a line for each rank if the table keeps half of its rows.
        under = max(_TABLE_ROWS // 2, min(_TABLE_ROWS, room.height - len(frame.view.ranks) - _MAP_EXTRA_ROWS))
        under = under if room.height >= 12 else 0
        return {
            "rank-map": Box(room.x, room.y, room.width, room.height - under),
            "rank-table": Box(room.x, room.y + room.height - under, room.width, under),
        }

    def show_picture(self, picture: ScreenPicture) -> None:
        if picture.frame.rank == self._wanted_rank:
            self._wanted_rank = None
        super().show_picture(picture)

    def footer_keys(self, frame: Frame) -> Sequence[Key]:
        return (
            Key("m", "metric", "screen.metric(1)", 6),
            Key("o", "by rank" if not self.ranking.by_number else "outliers", "screen.order", 4),
            Key("↑↓", "rank", "screen.choose(1)", 4, ("screen.choose(-1)", "screen.choose(1)")),
            Key("enter", "timeline", "screen.timeline", 5),
            Key("z", "zoom", "screen.zoom", 2),
        )

    def action_metric(self, number: int) -> None:
        self.request_redraw(partial(self.ranking.switch_metric, number))

    def action_order(self) -> None:
        self.request_redraw(self.ranking.switch_order)

    async def action_choose(self, number: int) -> None:
        picture = self.ranking.last_picture
        rank = picture.find_neighbor(number, self._wanted_rank) if picture is not None else None
        if rank is not None:
            await self._choose_rank(rank)

    async def _choose_rank(self, rank: int) -> None:
        self._wanted_rank = rank
        await self.run_action(f"app.set_rank({rank})")

    async def on_rank_map_clicked(self, event: RankMap.Clicked) -> None:
        await self._choose_rank(event.rank)

    async def action_timeline(self) -> None:
        """To the timeline of the rank that is marked here."""
        await self.action_choose(0)
        await self.run_action("app.switch('timeline')")
