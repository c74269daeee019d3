"""The panels that all monitor screens share: header, notices, transport, tabs and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from textual import events
from textual.message import Message

from zerotop.analysis.failures.end import End
from zerotop.ui.base.bars.footer import draw_badge, draw_tabs, draw_transport, find_track_cell, measure_track
from zerotop.ui.base.bars.footer_keys import label_common_keys
from zerotop.ui.base.bars.header import ADVICE_MARK, draw_header, draw_notices
from zerotop.ui.base.findings import choose_most_severe
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import CommonPanel, FindingChosen
from zerotop.ui.base.key_row import ClickableRow
from zerotop.ui.base.post_mortem import draw_post_mortem, find_fix
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.drawing.units import convert_sizes


class Header(CommonPanel):
    """The job, its progress and speed, and whether the screen follows it."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        badge = draw_badge(frame.view, frame.moment, self.glyphs)
        return draw_header(frame.view, badge, width, height, self.glyphs)


class Notices(CommonPanel):
    """Sentences about the job and its findings, or why it failed."""

    def __init__(self, glyphs: Glyphs, find_post_mortem: Callable[[Frame], End | None], *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._find_post_mortem = find_post_mortem

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        if (failure := self._find_post_mortem(frame)) is not None:
            return draw_post_mortem(failure, frame.view.cursor_ns, width, height, self.glyphs, frame.headline)
        return draw_notices(frame.list_notices(self.app.size.height), width, height, self.glyphs)

    def find_shown_fix(self) -> str:
        """Return the fix of what it shows, "" if it shows none."""
        frame = self.frame
        if frame is None:
            return ""
        if (failure := self._find_post_mortem(frame)) is not None:
            return find_fix(failure)
        is_shown = any(notice.mark == ADVICE_MARK for notice in frame.list_notices(self.app.size.height))
        return convert_sizes(frame.headline.fix) if is_shown and frame.headline is not None else ""

    def on_click(self) -> None:
        """Show all findings with the details of this one, or all about the job."""
        if self.frame is not None:
            has_finding = self.frame.failure is None and self.frame.headline is not None
            self.app.call_later(self.app.run_action, "feed" if has_finding else "job")


class Transport(CommonPanel):
    """The cursor's position in the recording; the mouse moves it."""

    class Scrubbed(Message):
        """The mouse chose a position, as a share of the recording's length."""

        def __init__(self, share: float) -> None:
            super().__init__()
            self.share = share

    _is_dragging = False

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return [draw_transport(frame.moment, width, self.glyphs)]

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._is_dragging = True
        self.capture_mouse()
        self._scrub_to(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._is_dragging:
            self._scrub_to(event.x)

    def on_mouse_up(self) -> None:
        self._is_dragging = False
        self.release_mouse()

    def on_click(self, event: events.Click) -> None:
        """Go to the finding whose mark was clicked."""
        if self.frame is None:
            return
        moment, view = self.frame.moment, self.frame.view
        begin, length = measure_track(self.size.width, moment)
        begin_s = view.cursor_ns / 1e9 - moment.cursor_s
        marked = (
            finding
            for finding in self.frame.all_findings
            if find_track_cell(finding.detected_ns / 1e9 - begin_s, moment, length) == event.x - begin
        )
        if length >= 6 and (finding := choose_most_severe(marked)) is not None:
            self.post_message(FindingChosen(finding))

    def _scrub_to(self, x: int) -> None:
        if self.frame is None:
            return
        begin, length = measure_track(self.size.width, self.frame.moment)
        if length >= 6:
            self.post_message(self.Scrubbed(max(0.0, min(1.0, (x - begin) / (length - 1)))))


class Tabs(CommonPanel, ClickableRow):
    """The screens, and the cost of watching."""

    def __init__(self, glyphs: Glyphs, *, id: str, active: str) -> None:
        super().__init__(glyphs, id=id)
        self.active = active

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        row, places = draw_tabs(frame.tabs, self.active, frame.view.cost, width, self.glyphs)
        self._click_boxes = tuple(places)
        return [row]


class Keys(CommonPanel, ClickableRow):
    """The keys that work here."""

    def __init__(self, glyphs: Glyphs, *, id: str, own_labels: Callable[[], Mapping[str, str]]) -> None:
        super().__init__(glyphs, id=id)
        self._own_labels = own_labels

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        labels = label_common_keys(frame.moment, len(frame.all_findings))
        return [self.draw_key_row({**labels, **self._own_labels()}, width)]
