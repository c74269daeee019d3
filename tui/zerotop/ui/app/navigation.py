"""Actions that move through time, and between screens, ranks and findings."""

from __future__ import annotations

from textual.events import Key

from zerotop.analysis.findings import Finding
from zerotop.ui.app.monitor import Monitor
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.frame_widget import FindingChosen
from zerotop.ui.base.panels import Transport
from zerotop.ui.base.tabs import TABS
from zerotop.ui.dialogs.dialog import Prompt
from zerotop.ui.dialogs.findings_dialog import FindingsDialog
from zerotop.ui.dialogs.go_to_dialog import Destination, GoToDialog
from zerotop.ui.live.panels import Output

_SCREENS_OF_FINDINGS = {"hung_ranks": "ranks", "stuck_at_start": "ranks"}
"""Screens that show what a finding is about."""


class NavigationApp(Monitor):
    """A monitor with the keys to move through its recording."""

    def action_switch(self, name: str) -> None:
        """Show the screen of that name. No dialog can be open."""
        if name == self.shown_name:
            return
        self.shown_name = name
        with self.batch_update():  # so that it is painted at once
            self.switch_mode(name)
            interim = self.viewer.make_interim_frame()
            if interim is not None:
                self.shown_screen.show_time(interim)
        self.draw_frame()

    def action_switch_to(self, number: int) -> None:
        """Show the screen of that number, if there is one."""
        if number <= len(TABS):
            self.action_switch(TABS[number - 1].name)

    def action_choose_rank(self, number: int, shown: int | None = None) -> None:
        """Choose the rank ``number`` places further on: from the chosen one, else from the one that is shown."""
        self.viewer.choose_rank(number, shown)
        self.draw_frame()

    def action_set_rank(self, rank: int) -> None:
        """Choose a rank on all screens."""
        self.viewer.set_rank(rank)
        self.draw_frame()

    def action_toggle_play(self) -> None:
        self.viewer.toggle_play()
        self.draw_frame()

    def action_steps(self, number: int) -> None:
        self.viewer.seek_steps(number)
        self.draw_frame()

    def action_seconds(self, seconds: float) -> None:
        self.viewer.seek_seconds(seconds)
        self.draw_frame()

    def action_speed(self, direction: int) -> None:
        self.viewer.change_speed(direction)
        self.draw_frame()

    def action_begin(self) -> None:
        self.viewer.go_to_share(0.0)
        self.draw_frame()

    def action_follow(self) -> None:
        self.viewer.follow_end()
        self.draw_frame()

    def action_go_to(self) -> None:
        source = self.viewer.source
        seconds = (source.end_ns - source.begin_ns) / 1e9
        self.push_screen(GoToDialog(source.last_step, seconds, self.glyphs), self._go_to_place)

    async def on_key(self, event: Key) -> None:
        """Give keys to the prompt that a key before them has opened."""
        if isinstance(self.screen, Prompt) and await self.screen.type_key(event):
            event.stop()
            event.prevent_default()

    def _go_to_place(self, place: Destination | None) -> None:
        if place is not None:
            kind, number = place
            if kind == "end":
                self.viewer.follow_end()
            else:
                (self.viewer.go_to_step if kind == "step" else self.viewer.go_to_seconds)(number)
            self.draw_frame()

    def action_finding(self, direction: int) -> None:
        if not self.viewer.seek_finding(direction):
            self.notify("No more findings in that direction.", timeout=2)
        self.draw_frame()

    def action_feed(self) -> None:
        frame = self.shown_screen.frame
        if frame is not None:
            self.push_screen(FindingsDialog(frame, self.viewer.source.begin_ns, self.glyphs), self._go_to_finding)

    def _go_to_finding(self, finding: Finding | None) -> None:
        if finding is not None:
            self.viewer.go_to_finding(finding)
            if (name := _SCREENS_OF_FINDINGS.get(finding.name)) is not None:
                self.action_switch(name)
            self.draw_frame()

    def on_finding_chosen(self, event: FindingChosen) -> None:
        self._go_to_finding(event.finding)

    def on_monitor_screen_step_chosen(self, event: MonitorScreen.StepChosen) -> None:
        self.viewer.go_to_step(event.step)
        self.draw_frame()

    def on_transport_scrubbed(self, event: Transport.Scrubbed) -> None:
        self.viewer.go_to_share(event.share)
        self.draw_frame()

    def on_monitor_screen_seek_requested(self, event: MonitorScreen.SeekRequested) -> None:
        self.viewer.go_to_ns(event.time_ns)
        self.draw_frame()

    def on_monitor_screen_rank_chosen(self, event: MonitorScreen.RankChosen) -> None:
        self.viewer.set_rank(event.rank)
        self.draw_frame()

    def on_output_scrolled(self, event: Output.Scrolled) -> None:
        self._scheduler.submit(self.viewer.scroll_output(event.lines, event.room))
        self.draw_frame()
