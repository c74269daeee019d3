"""What happened, in which order: every lane of a recording over one axis of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from zerotop.ui.base.base_screen import Watching
from zerotop.ui.base.footer import Key
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source
from zerotop.ui.base.layout import Box
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.timeline.clipboard import window_text
from zerotop.ui.timeline.drawing import LEAST_WIDTH, chart_begin, chart_cells, draw_nothing, draw_timeline
from zerotop.ui.timeline.help import TERMS
from zerotop.ui.timeline.model import Pictures
from zerotop.ui.timeline.window import WHEEL, TimelineView
from zerotop.ui.widgets.frame_widget import Drawn

# Until what could not be read in time for a picture is in the next one.
_AGAIN_S = 0.03
_PAN = 0.25  # of the window


class TimelineScreen(Watching):
    """What happened, and in which order."""

    NAME = "timeline"
    TITLE = "Timeline"
    HELP = (
        "What happened in which order: phases, GPU, CPU, memory and PCIe over one axis of time, from days to microseconds."
    )
    TERMS = TERMS

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "scale(1)", "Zoom in", id="timeline.in", tooltip="Less time, around the cursor"),
        Binding("minus", "scale(-1)", "Zoom out", id="timeline.out", tooltip="More time, up to the whole recording"),
        Binding(
            "w", "whole", "Whole recording", id="timeline.whole", tooltip="The whole recording, and back to a few steps"
        ),
        Binding("shift+left,h", "pan(-1)", "Earlier", id="timeline.earlier", tooltip="Look further back; the cursor stays"),
        Binding("shift+right,l", "pan(1)", "Later", id="timeline.later", tooltip="Look further on; the cursor stays"),
        Binding("f", "follow", "Follow", id="timeline.follow", tooltip="To the end; while the job runs, along with it"),
        Binding(
            "left_square_bracket",
            "begin_range",
            "Begin a range",
            id="timeline.begin",
            tooltip="A range begins at the cursor",
        ),
        Binding(
            "right_square_bracket", "end_range", "End the range", id="timeline.end", tooltip="The range ends at the cursor"
        ),
        Binding("escape", "back", "Forget the range", id="timeline.back", tooltip="Forget the range", show=False),
        Binding("up", "app.choose_rank(-1)", "Rank before", id="timeline.up", tooltip="The lanes of the rank before"),
        Binding("down", "app.choose_rank(1)", "Next rank", id="timeline.down", tooltip="The lanes of the next rank"),
    ]

    def __init__(self, glyphs: Glyphs, source: Source) -> None:
        super().__init__(glyphs, source)
        self.looking = TimelineView()
        self._origin_ns = source.session.begin_ns
        self._lanes = Lanes(glyphs, Pictures(source, self.looking))

    def panels(self) -> Iterable[Drawn]:
        yield self._lanes

    def place(self, room: Box, frame: Frame) -> dict[str, Box]:
        return {"lanes": room}

    def keys(self, frame: Frame) -> Sequence[Key]:
        keys = [
            Key("+-", "zoom", "screen.scale(-1)", 8, ("screen.scale(1)", "screen.scale(-1)")),
            Key("h l", "pan", "screen.pan(-1)", 5, ("screen.pan(-1)", "screen.pan(1)")),
            Key("w", "whole", "screen.whole", 5),
            Key("[ ]", "range", "screen.begin_range", 6, ("screen.begin_range", "screen.end_range")),
        ]
        if len(frame.view.ranks) > 1:
            keys.append(Key("↑↓", "rank", "app.choose_rank(1)", 5, ("app.choose_rank(-1)", "app.choose_rank(1)")))
        if self.looking.selecting:
            keys.append(Key("esc", "no range", "screen.back", 7))
        return keys

    def action_scale(self, direction: int) -> None:
        self.looking.zoom(direction)
        self._lanes.redraw()

    def action_whole(self) -> None:
        self.looking.whole()
        self._lanes.redraw()

    def action_pan(self, direction: int) -> None:
        self.looking.pan(direction * _PAN)
        self._lanes.redraw()

    async def action_follow(self) -> None:
        self.looking.release()
        await self.app.run_action("follow", self.app)

    def action_begin_range(self) -> None:
        if self._cursor is not None:
            self.looking.begin_at(self._cursor)
            self._lanes.redraw()

    def action_end_range(self) -> None:
        if self._cursor is not None:
            self.looking.end_at(self._cursor)
            self._lanes.redraw()

    def action_back(self) -> None:
        if self.looking.selecting:
            self.looking.forget_range()
            self._lanes.redraw()
        else:
            self.action_unzoom()

    @property
    def _cursor(self) -> int | None:
        """In nanoseconds since the session's begin."""
        return None if self.frame is None else self.frame.view.cursor_ns - self._origin_ns

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "back":
            return self.looking.selecting or bool(self.zoomed)
        return super().check_action(action, parameters)

    def on_lanes_chosen(self, event: Lanes.Chosen) -> None:
        event.stop()
        self.post_message(self.Sought(self._origin_ns + event.moment))

    def on_lanes_dragged(self, event: Lanes.Dragged) -> None:
        event.stop()
        self.looking.select(event.begin, event.end)
        self._lanes.redraw()

    def on_lanes_turned(self, event: Lanes.Turned) -> None:
        event.stop()
        self.looking.zoom(event.direction, event.moment, WHEEL)
        self._lanes.redraw()

    def on_lanes_pushed(self, event: Lanes.Pushed) -> None:
        event.stop()
        self.looking.pan(event.direction * _PAN / 2)
        self._lanes.redraw()


class Lanes(Drawn, can_focus=True):
    """All lanes. A click moves the cursor, dragging selects a range, the wheel zooms."""

    class Chosen(Message):
        """A moment was clicked: nanoseconds since the session's begin, as all here."""

        def __init__(self, moment: int) -> None:
            super().__init__()
            self.moment = moment

    class Dragged(Message):
        """The mouse was drawn from one moment to another, with its button down."""

        def __init__(self, begin: int, end: int) -> None:
            super().__init__()
            self.begin, self.end = begin, end

    class Turned(Message):
        """The wheel was turned at a moment: away (1) to see less time, or back (-1)."""

        def __init__(self, direction: int, moment: int) -> None:
            super().__init__()
            self.direction, self.moment = direction, moment

    class Pushed(Message):
        """The wheel was pushed sideways: to earlier (-1) or later (1)."""

        def __init__(self, direction: int) -> None:
            super().__init__()
            self.direction = direction

    def __init__(self, glyphs: Glyphs, pictures: Pictures) -> None:
        super().__init__(glyphs, id="lanes")
        self._pictures = pictures
        self._pressed: int | None = None  # the moment where the mouse's button went down
        self._waiting = False

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        if width < LEAST_WIDTH or not self._pictures.recorded(frame):
            return draw_nothing(width, height, self.glyphs)
        picture = self._pictures.picture(frame, chart_cells(width), height)
        if not picture.timeline.complete and not self._waiting:
            self._waiting = True
            self.set_timer(_AGAIN_S, self._go_on)
        return draw_timeline(picture, width, height, self.glyphs)

    def copyable(self) -> str:
        """The window's numbers, or the range's, where one is selected."""
        return window_text(self._pictures.last) if self._pictures.last is not None else ""

    def _go_on(self) -> None:
        self._waiting = False
        self.redraw()

    def _moment(self, x: int, share: float = 0.5) -> int | None:
        """What time a column of the panel stands for, None beside the charts."""
        picture = self._pictures.last
        cell = x - chart_begin(self.size.width)
        if picture is None or not -1 <= cell <= picture.cells:
            return None
        return max(0, picture.begin + int((max(0, min(picture.cells - 1, cell)) + share) * picture.cell_ns))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._pressed = self._moment(event.x)
        if self._pressed is not None:
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        moment = self._moment(event.x)
        picture = self._pictures.last
        if self._pressed is None or moment is None or picture is None:
            return
        begin, end = sorted((picture.cell(self._pressed), picture.cell(moment)))
        if end > begin:
            self.post_message(
                self.Dragged(picture.begin + begin * picture.cell_ns, picture.begin + (end + 1) * picture.cell_ns)
            )

    def on_mouse_up(self, event: events.MouseUp) -> None:
        pressed, self._pressed = self._pressed, None
        self.release_mouse()
        picture, moment = self._pictures.last, self._moment(event.x)
        if (
            pressed is not None
            and moment is not None
            and picture is not None
            and picture.cell(pressed) == picture.cell(moment)
        ):
            self.post_message(self.Chosen(pressed))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._turn(event, 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._turn(event, -1)

    def _turn(self, event: events.MouseEvent, direction: int) -> None:
        event.stop()
        moment = self._moment(event.x)
        if event.shift or event.ctrl:
            self.post_message(self.Pushed(-direction))
        elif moment is not None:
            self.post_message(self.Turned(direction, moment))

    def on_mouse_scroll_left(self, event: events.MouseScrollLeft) -> None:
        event.stop()
        self.post_message(self.Pushed(-1))

    def on_mouse_scroll_right(self, event: events.MouseScrollRight) -> None:
        event.stop()
        self.post_message(self.Pushed(1))
