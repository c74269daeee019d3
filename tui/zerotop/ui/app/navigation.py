"""What the keys do to time, and to what is looked at: screens, ranks, findings."""

from __future__ import annotations

from dataclasses import replace

from zerotop.analysis.annotations import Annotation
from zerotop.ui.app.monitor import Monitor
from zerotop.ui.base.base_screen import Watching
from zerotop.ui.base.panels import Output, Pressable, Transport
from zerotop.ui.base.tabs import TABS
from zerotop.ui.dialogs.findings_dialog import Feed
from zerotop.ui.dialogs.go_to_dialog import GoToDialog, Place


class Moving(Monitor):
    """A monitor that moves through its recording."""

    def action_switch(self, name: str) -> None:
        """Shows the screen of that name. A dialog over it stays where it is: none can be open."""
        if name == self.shown:
            return
        self.shown = name
        was_seen = self.watching.frame is not None
        with self.batch_update():  # until it is painted, as a whole
            self.switch_mode(name)
            present = self.viewer.present() if was_seen else None
            if present is not None:
                self.watching.answer(replace(present, tabs=TABS))
        if present is None:
            self.draw()
        else:
            self.call_later(self.draw_later)

    def action_switch_to(self, number: int) -> None:
        """Shows the screen of that number, if there is one."""
        if number <= len(TABS):
            self.action_switch(TABS[number - 1].name)

    def action_choose_rank(self, number: int) -> None:
        """The rank so many places further on."""
        self.viewer.choose_rank(number)
        self.draw()

    def action_set_rank(self, rank: int) -> None:
        """This rank, on all screens."""
        self.viewer.set_rank(rank)
        self.draw()

    def action_toggle_play(self) -> None:
        self.viewer.toggle_play()
        self.draw()

    def action_steps(self, number: int) -> None:
        self.viewer.seek_steps(number)
        self.draw()

    def action_seconds(self, seconds: float) -> None:
        self.viewer.seek_seconds(seconds)
        self.draw()

    def action_speed(self, direction: int) -> None:
        self.viewer.change_speed(direction)
        self.draw()

    def action_begin(self) -> None:
        self.viewer.go_to_share(0.0)
        self.draw()

    def action_follow(self) -> None:
        self.viewer.follow()
        self.draw()

    def action_go_to(self) -> None:
        self.push_screen(GoToDialog(self.viewer.source.last_step, self.glyphs), self._go_to)

    def _go_to(self, place: Place | None) -> None:
        if place is not None:
            kind, number = place
            (self.viewer.go_to_step if kind == "step" else self.viewer.go_to_seconds)(number)
            self.draw()

    def action_finding(self, direction: int) -> None:
        if not self.viewer.seek_finding(direction):
            self.notify("Nothing more was found in that direction.", timeout=2)
        self.draw()

    def action_feed(self) -> None:
        frame = self.watching.frame
        if frame is not None:
            self.push_screen(Feed(frame, self.viewer.source.begin_ns, self.glyphs), self._go_to_finding)

    def _go_to_finding(self, finding: Annotation | None) -> None:
        if finding is not None:
            self.viewer.go_to_finding(finding)
            self.draw()

    def on_transport_scrubbed(self, event: Transport.Scrubbed) -> None:
        self.viewer.go_to_share(event.share)
        self.draw()

    def on_watching_sought(self, event: Watching.Sought) -> None:
        self.viewer.go_to_ns(event.time_ns)
        self.draw()

    def on_watching_rank_chosen(self, event: Watching.RankChosen) -> None:
        self.viewer.set_rank(event.rank)
        self.draw()

    def on_output_scrolled(self, event: Output.Scrolled) -> None:
        self.viewer.scroll_output(event.lines, event.room)
        self.draw()

    async def on_pressable_pressed(self, event: Pressable.Pressed) -> None:
        await self.run_action(event.action)
