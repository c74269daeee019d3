"""What happened, in which order: every lane of a recording over one axis of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.footer import Key
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source
from zerotop.ui.base.layout import Box
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.timeline.clipboard import window_text
from zerotop.ui.timeline.drawing import MIN_WIDTH, chart_begin, chart_cells, draw_empty, draw_timeline
from zerotop.ui.timeline.help import TERMS
from zerotop.ui.timeline.model import PictureBuilder
from zerotop.ui.timeline.window import WHEEL_ZOOM, TimelineView
from zerotop.ui.widgets.frame_widget import FrameWidget

_PAN_SHARE = 0.25  # of the window


class TimelineScreen(MonitorScreen):
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
        self.timeline_view = TimelineView()
        self._origin_ns = source.session.begin_ns
        self.long_work = pictures = PictureBuilder(source, self.timeline_view)
        self._lanes = TimelineLanes(glyphs, pictures)

    def build_panels(self) -> Iterable[FrameWidget]:
        yield self._lanes

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        return {"lanes": room}

    def footer_keys(self, frame: Frame) -> Sequence[Key]:
        keys = [
            Key("+-", "zoom", "screen.scale(-1)", 8, ("screen.scale(1)", "screen.scale(-1)")),
            Key("h l", "pan", "screen.pan(-1)", 5, ("screen.pan(-1)", "screen.pan(1)")),
            Key("w", "whole", "screen.whole", 5),
            Key("[ ]", "range", "screen.begin_range", 6, ("screen.begin_range", "screen.end_range")),
        ]
        if len(frame.view.ranks) > 1:
            keys.append(Key("↑↓", "rank", "app.choose_rank(1)", 5, ("app.choose_rank(-1)", "app.choose_rank(1)")))
        if self.timeline_view.has_range:
            keys.append(Key("esc", "no range", "screen.back", 7))
        return keys

    def action_scale(self, direction: int) -> None:
        self.request_redraw(partial(self.timeline_view.zoom_window, direction))

    def action_whole(self) -> None:
        self.request_redraw(self.timeline_view.toggle_whole)

    def action_pan(self, direction: int) -> None:
        self.request_redraw(partial(self.timeline_view.pan_share, direction * _PAN_SHARE))

    async def action_follow(self) -> None:
        self.request_redraw(self.timeline_view.return_to_cursor)
        await self.app.run_action("follow", self.app)

    def action_begin_range(self) -> None:
        if self._cursor_ns is not None:
            self.request_redraw(partial(self.timeline_view.set_range_begin, self._cursor_ns))

    def action_end_range(self) -> None:
        if self._cursor_ns is not None:
            self.request_redraw(partial(self.timeline_view.set_range_end, self._cursor_ns))

    def action_back(self) -> None:
        if self.timeline_view.has_range:
            self.request_redraw(self.timeline_view.clear_range)
        else:
            self.action_unzoom()

    @property
    def _cursor_ns(self) -> int | None:
        """In nanoseconds since the session's begin."""
        return None if self.frame is None else self.frame.view.cursor_ns - self._origin_ns

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "back":
            return self.timeline_view.has_range or bool(self.zoomed)
        return super().check_action(action, parameters)

    def on_timeline_lanes_chosen(self, event: TimelineLanes.Chosen) -> None:
        event.stop()
        self.post_message(self.SeekRequested(self._origin_ns + event.moment))

    def on_timeline_lanes_dragged(self, event: TimelineLanes.Dragged) -> None:
        event.stop()
        self.request_redraw(partial(self.timeline_view.select_range, event.begin, event.end))

    def on_timeline_lanes_wheel_turned(self, event: TimelineLanes.WheelTurned) -> None:
        event.stop()
        self.request_redraw(partial(self.timeline_view.zoom_window, event.direction, event.moment, WHEEL_ZOOM))

    def on_timeline_lanes_wheel_pushed(self, event: TimelineLanes.WheelPushed) -> None:
        event.stop()
        self.request_redraw(partial(self.timeline_view.pan_share, event.direction * _PAN_SHARE / 2))


class TimelineLanes(FrameWidget, can_focus=True):
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

    class WheelTurned(Message):
        """The wheel was turned at a moment: away (1) to see less time, or back (-1)."""

        def __init__(self, direction: int, moment: int) -> None:
            super().__init__()
            self.direction, self.moment = direction, moment

    class WheelPushed(Message):
        """The wheel was pushed sideways: to earlier (-1) or later (1)."""

        def __init__(self, direction: int) -> None:
            super().__init__()
            self.direction = direction

    def __init__(self, glyphs: Glyphs, pictures: PictureBuilder) -> None:
        super().__init__(glyphs, id="lanes")
        self._pictures = pictures
        self._pressed_ns: int | None = None  # the moment where the mouse's button went down

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        if width < MIN_WIDTH or not self._pictures.has_data(frame):
            return draw_empty(width, height, self.glyphs)
        picture = self._pictures.build_picture(frame, chart_cells(width), height)
        return draw_timeline(picture, width, height, self.glyphs)

    def copy_text(self) -> str:
        """The window's numbers, or the range's, where one is selected."""
        return window_text(self._pictures.last_picture) if self._pictures.last_picture is not None else ""

    def _find_moment(self, x: int, share: float = 0.5) -> int | None:
        """What time a column of the panel stands for, None beside the charts."""
        picture = self._pictures.last_picture
        cell = x - chart_begin(self.size.width)
        if picture is None or not -1 <= cell <= picture.cell_count:
            return None
        return max(0, picture.begin + int((max(0, min(picture.cell_count - 1, cell)) + share) * picture.cell_ns))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._pressed_ns = self._find_moment(event.x)
        if self._pressed_ns is not None:
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        moment = self._find_moment(event.x)
        picture = self._pictures.last_picture
        if self._pressed_ns is None or moment is None or picture is None:
            return
        begin, end = sorted((picture.find_cell(self._pressed_ns), picture.find_cell(moment)))
        if end > begin:
            self.post_message(
                self.Dragged(picture.begin + begin * picture.cell_ns, picture.begin + (end + 1) * picture.cell_ns)
            )

    def on_mouse_up(self, event: events.MouseUp) -> None:
        pressed, self._pressed_ns = self._pressed_ns, None
        self.release_mouse()
        picture, moment = self._pictures.last_picture, self._find_moment(event.x)
        if (
            pressed is not None
            and moment is not None
            and picture is not None
            and picture.find_cell(pressed) == picture.find_cell(moment)
        ):
            self.post_message(self.Chosen(pressed))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._post_wheel(event, 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._post_wheel(event, -1)

    def _post_wheel(self, event: events.MouseEvent, direction: int) -> None:
        event.stop()
        moment = self._find_moment(event.x)
        if event.shift or event.ctrl:
            self.post_message(self.WheelPushed(-direction))
        elif moment is not None:
            self.post_message(self.WheelTurned(direction, moment))

    def on_mouse_scroll_left(self, event: events.MouseScrollLeft) -> None:
        event.stop()
        self.post_message(self.WheelPushed(-1))

    def on_mouse_scroll_right(self, event: events.MouseScrollRight) -> None:
        event.stop()
        self.post_message(self.WheelPushed(1))
