"""The timeline: every lane of a recording over one time axis."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import ClassVar

from textual import events
from textual.binding import BindingType

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.base.bars.footer_keys import bind, in_footer
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.bindings import rank_bindings
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FindingChosen, FrameWidget
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.layout import Box
from zerotop.ui.drawing.rows import Row
from zerotop.ui.timeline.clipboard import format_window
from zerotop.ui.timeline.drawing import MIN_WIDTH, chart_begin, chart_cells, draw_empty, draw_timeline
from zerotop.ui.timeline.help import TERMS
from zerotop.ui.timeline.lanes import MARKS
from zerotop.ui.timeline.model import PictureBuilder
from zerotop.ui.timeline.window import WHEEL_ZOOM, TimelineView
from zerotop.ui.widgets.scrollable import Wheel

_PAN_SHARE = 0.25  # of the window
_ZOOM, _PAN, _RANGE = in_footer(8, "zoom", label_index=1), in_footer(5, "pan"), in_footer(6, "range")


class TimelineScreen(MonitorScreen):
    """Shows what happened, and in which order."""

    NAME = "timeline"
    TITLE = "Timeline"
    HELP = "What happened when: phases, GPU, CPU, memory and PCIe over one time axis, from days to microseconds."
    TERMS = TERMS

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("plus,equals_sign", "scale(1)", "timeline.in", "Zoom in", "Zoom in around the cursor", _ZOOM),
        bind("minus", "scale(-1)", "timeline.out", "Zoom out", "Zoom out, up to everything", _ZOOM),
        bind("h,shift+left", "pan(-1)", "timeline.earlier", "Pan left", "Pan left", _PAN),
        bind("l,shift+right", "pan(1)", "timeline.later", "Pan right", "Pan right", _PAN),
        bind("w", "whole", "timeline.whole", "Whole", "Switch between the whole recording and a few steps", 5),
        bind("left_square_bracket", "begin_range", "timeline.begin", "Begin range", "Begin a range at the cursor", _RANGE),
        bind("right_square_bracket", "end_range", "timeline.end", "End range", "End the range at the cursor", _RANGE),
        *rank_bindings("timeline.up", "timeline.down", importance=5),
        bind("escape", "back", "timeline.back", "No range", "Clear the range", 7),
        bind("f", "follow", "timeline.follow", "Follow", "Go to the end, and follow it while the job runs"),
    ]

    def __init__(self, glyphs: Glyphs, source: RecordingSource) -> None:
        super().__init__(glyphs, source)
        self.timeline_view = TimelineView()
        self._origin_ns = source.recording.begin_ns
        self._lanes = TimelineLanes(glyphs, source, self.timeline_view)
        self.long_work = self._lanes.pictures

    def build_panels(self) -> Iterable[FrameWidget]:
        yield self._lanes

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        return {"lanes": room}

    def label_keys(self, frame: Frame) -> dict[str, str]:
        labels = {"screen.zoom": ""} | ({} if self.timeline_view.has_range else {"timeline.back": ""})
        return labels if len(frame.view.ranks) > 1 else labels | {"timeline.up": ""}

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
        """The cursor in nanoseconds since the recording began."""
        return None if self.frame is None else self.frame.view.cursor_ns - self._origin_ns

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "back":
            return self.timeline_view.has_range or bool(self.zoomed)
        return super().check_action(action, parameters)


class TimelineLanes(Wheel, FrameWidget, can_focus=True):
    """All lanes. The mouse shows values, a click moves the cursor, dragging selects a range, the wheel zooms."""

    def __init__(self, glyphs: Glyphs, source: RecordingSource, view: TimelineView) -> None:
        super().__init__(glyphs, id="lanes")
        self._source, self._view = source, view
        self.pictures = PictureBuilder(source, view)
        self._pressed_ns: int | None = None  # the moment at which the mouse button went down

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        if width < MIN_WIDTH or not self.pictures.has_data(frame):
            return draw_empty(width, height, self.glyphs)
        picture = self.pictures.build_picture(frame, chart_cells(width), height)
        return draw_timeline(picture, width, height, self.glyphs)

    def copy_text(self) -> str:
        """Return the numbers of the window, or of the selected range."""
        return format_window(self.pictures.last_picture) if self.pictures.last_picture is not None else ""

    def _find_moment(self, x: int) -> int | None:
        """Return the time in the middle of a column of the panel; None beside the charts."""
        picture = self.pictures.last_picture
        cell = x - chart_begin(self.size.width)
        if picture is None or not -1 <= cell <= picture.cell_count:
            return None
        return max(0, picture.begin + int((max(0, min(picture.cell_count - 1, cell)) + 0.5) * picture.cell_ns))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._pressed_ns = self._find_moment(event.x)
        if self._pressed_ns is not None:
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        moment = self._find_moment(event.x)
        picture = self.pictures.last_picture
        if self._pressed_ns is None:
            self._point_at(moment)
        if self._pressed_ns is None or moment is None or picture is None:
            return
        begin, end = sorted((picture.find_cell(self._pressed_ns), picture.find_cell(moment)))
        if end > begin:
            bounds = picture.begin + begin * picture.cell_ns, picture.begin + (end + 1) * picture.cell_ns
            self.request_redraw(partial(self._view.select_range, *bounds))

    def on_leave(self) -> None:
        self._point_at(None)

    def _point_at(self, moment: int | None) -> None:
        """Show the values of a moment under the mouse instead of those at the cursor."""
        picture, before = self.pictures.last_picture, self.pictures.pointed_ns
        cells = [None if one is None or picture is None else picture.find_cell(one) for one in (before, moment)]
        if cells[0] != cells[1]:
            self.request_redraw(partial(self.pictures.point_at, moment))

    def on_mouse_up(self, event: events.MouseUp) -> None:
        pressed, self._pressed_ns = self._pressed_ns, None
        self.release_mouse()
        picture, moment = self.pictures.last_picture, self._find_moment(event.x)
        if (
            pressed is not None
            and moment is not None
            and picture is not None
            and picture.find_cell(pressed) == picture.find_cell(moment)
        ):
            mark = picture.find_mark(picture.find_cell(pressed)) if self._is_marks_row(event.y) else None
            if mark is not None:
                self.post_message(FindingChosen(mark.finding))
            else:
                self.post_message(MonitorScreen.SeekRequested(self._source.recording.begin_ns + pressed))

    def _is_marks_row(self, y: int) -> bool:
        picture = self.pictures.last_picture
        return picture is not None and any(place.name == MARKS and place.top == y for place in picture.boxes)

    def turn_wheel(self, event: events.MouseEvent, direction: int) -> None:
        """Zoom in (-1) or out (1) around the mouse; with shift or control pan."""
        event.stop()
        moment = self._find_moment(event.x)
        if event.shift or event.ctrl:
            self._pan_view(event, direction)
        elif moment is not None:
            self.request_redraw(partial(self._view.zoom_window, -direction, moment, WHEEL_ZOOM))

    def on_mouse_scroll_left(self, event: events.MouseScrollLeft) -> None:
        self._pan_view(event, -1)

    def on_mouse_scroll_right(self, event: events.MouseScrollRight) -> None:
        self._pan_view(event, 1)

    def _pan_view(self, event: events.MouseEvent, direction: int) -> None:
        event.stop()
        self.request_redraw(partial(self._view.pan_share, direction * _PAN_SHARE / 2))
