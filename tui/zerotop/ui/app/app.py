"""The app in the terminal: the actions on the job, and on the program itself."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

from textual.app import SystemCommand
from textual.command import Provider
from textual.dom import DOMNode
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.worker import Worker

from zerotop.analysis.formatting import format_count
from zerotop.analysis.views.notices import MUCH_HELD_BYTES
from zerotop.recording.headers import RecordingError
from zerotop.ui.app.announcements import Announcer, write_announcement
from zerotop.ui.app.monitor import freeze_garbage
from zerotop.ui.app.navigation import NavigationApp
from zerotop.ui.app.palette import ActionProvider, count_use, read_uses
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.bindings import RECORDING_ACTIONS
from zerotop.ui.base.clipboard import collect_copy_text
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import RowWidget
from zerotop.ui.base.interfaces import Controller, Leaving
from zerotop.ui.base.start_interfaces import OpenedRecording
from zerotop.ui.base.tabs import TABS
from zerotop.ui.dialogs.dialog import Page
from zerotop.ui.dialogs.quit_dialog import LeaveDialog
from zerotop.ui.dialogs.text_pages import build_help, build_job_page
from zerotop.ui.drawing import units
from zerotop.ui.drawing.text import sanitize
from zerotop.ui.drawing.theme import DARK_NAME, LIGHT_NAME
from zerotop.ui.widgets.textual_private import display_text

LEFT_S = 120.0  # after a key somebody may be looking at an old part of the recording
_REOPENING = "reopening"  # the mode in between
_ANNOUNCEMENTS, _ON, _OFF = "announcements", "on", "off"
_UNIT_NOTES = {
    units.BINARY.name: "2^30 bytes, as PyTorch and nvidia-smi count",
    units.DECIMAL.name: "10^9 bytes, as data sheets count",
}


class ZerotopApp(NavigationApp):
    """Shows one recording, see :class:`Monitor`. ``run()`` returns how the user left."""

    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {ActionProvider}

    enter_on_start = False
    """Whether to inject the probe into the ranks right after the start."""

    compare_past: Callable[[str], list[str]] | None = None
    """See :class:`FrameBuilder`; None: recordings are not compared."""

    _announcer: Announcer | None = None  # of the recording that is shown
    _reopening: Worker[None] | None = None

    def set_recording(self, opened: OpenedRecording) -> None:
        """Watch a recording."""
        super().set_recording(opened)
        self.viewer.builder.compare_past = self.compare_past

    def on_mount(self) -> None:
        if self.enter_on_start:
            self.action_enter()

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Show a notice. It may quote a recording, so ``markup`` is ignored."""
        super().notify(sanitize(message, self.glyphs), title=title, severity=severity, timeout=timeout, markup=False)

    def run_tick(self) -> None:
        super().run_tick()
        is_idle = self._reopening is None or self._reopening.is_finished
        if is_idle and self.is_watching and self.is_running and self._holds_much():
            self._reopening = self.run_worker(self.reopen_recording(), group="reopen")

    def _holds_much(self) -> bool:
        """Whether to open the recording again: it keeps much deleted detail, and no screen shows any."""
        is_left = self.viewer.playhead.following and time.monotonic() - self._last_key_s > LEFT_S
        return (
            is_left and isinstance(self.screen, MonitorScreen) and self.viewer.source.recording.held_bytes > MUCH_HELD_BYTES
        )

    async def reopen_recording(self) -> None:
        """Open the recording again at the same place, so that the file system can free deleted records."""
        old, title = self.viewer, self.title
        try:
            source = await asyncio.to_thread(old.source.reopen)
        except RecordingError as error:
            self.give_up_recording(str(error))
            return
        if not (self.is_watching and self.viewer is old and self.is_running):
            return
        self.add_mode(_REOPENING, Screen)
        await self.close_screens(_REOPENING)
        self.set_recording(OpenedRecording(source, old.controller, title))
        self.viewer.resume_from(old)
        if self._announcer is not None:
            self._announcer.source = source  # so that it does not announce old news again
        del old
        await self.switch_mode(self.shown_name)
        await self.remove_mode(_REOPENING)
        self.draw_first_frame()
        freeze_garbage()

    def action_leave(self) -> None:
        """Quit, or ask first while the job runs."""
        if not self.is_watching:
            self.exit(Leaving.QUIT)
        elif isinstance(self.screen, LeaveDialog):
            self.screen.action_again()
        elif self.viewer.controller is not None and self.viewer.source.is_live:
            self.push_screen(LeaveDialog(self.viewer.controller, self.glyphs, self._clock), self._finish_leaving)
        else:
            self.leave_recording(Leaving.QUIT)

    def _finish_leaving(self, leaving: Leaving | None) -> None:
        if leaving is not None:
            self.leave_recording(leaving)

    def leave_recording(self, leaving: Leaving) -> None:
        self.exit(leaving)

    def handle_shown_frame(self, frame: Frame) -> None:
        source = self.viewer.source
        if self._announcer is None or self._announcer.source is not source:
            self._announcer = Announcer(source, is_own_job=self.viewer.controller is not None)
        news = self._announcer.find_news(frame)
        if news and self.settings.get(_ANNOUNCEMENTS, _ON) == _ON:
            display_text(self.screen, write_announcement(news))

    def action_switch_announcements(self) -> None:
        """Switch the bell and the notification at a job's end or failure on or off."""
        choice = _OFF if self.settings.get(_ANNOUNCEMENTS, _ON) == _ON else _ON
        self.settings.set(_ANNOUNCEMENTS, choice)
        self.notify(f"Bell and notification when a job ends or fails: {choice}.", timeout=3)

    async def action_quit(self) -> None:
        self.action_leave()

    def action_help_quit(self) -> None:
        self.action_leave()

    def action_restart_sampler(self) -> None:
        if self.viewer.controller is None:
            return
        try:
            self.viewer.controller.restart_sampler()
        except OSError as error:
            self.notify(f"Cannot start the sampler: {error}", severity="error")

    def action_enter(self) -> None:
        """Inject the probe into the ranks, in the background: busy ranks answer late."""
        controller = self.viewer.controller
        if controller is not None:
            self.notify("Injecting the probe …", timeout=3)
            self.run_worker(self._enter_ranks(controller), group="enter", exclusive=True)

    async def _enter_ranks(self, controller: Controller) -> None:
        try:
            sentence = await asyncio.to_thread(controller.enter_ranks)
        except OSError as error:
            sentence = f"Cannot inject the probe: {error}"
        self.notify(sentence, timeout=10)
        self.viewer.check_job()
        self.draw_frame()

    def action_look(self) -> None:
        """Have the job record every allocation of its next step."""
        try:
            self.viewer.request_trace()
        except OSError as error:
            self.notify(f"Cannot request a trace: {error}", severity="error")
        self.draw_frame()

    def action_job(self) -> None:
        if self.shown_screen.frame is not None:
            self.push_screen(Page("This job", build_job_page(self.shown_screen.frame.view, self.glyphs), self.glyphs))

    def action_help(self) -> None:
        """Show the help of the current screen, if it has one."""
        screen = self.screen
        bindings = [binding for _, binding, enabled, _ in screen.active_bindings.values() if enabled]
        documented = [binding for binding in bindings if binding.id and binding.tooltip]
        terms = getattr(screen, "TERMS", None)
        if terms is not None:
            page = build_help(screen.HELP or "", documented, terms, self.glyphs)
            self.push_screen(Page(f"Help: {getattr(screen, 'TITLE', '')}", page, self.glyphs))

    def action_switch_theme(self) -> None:
        self.theme = LIGHT_NAME if self.theme == DARK_NAME else DARK_NAME
        self.settings.set("theme", self.theme)

    def action_switch_sizes(self) -> None:
        """Switch between GiB and GB."""
        sizes = units.other_sizes()
        self._apply_units(units.get_units()._replace(sizes=sizes))
        self.settings.set("sizes", sizes.name)
        self.notify(f"Sizes in {sizes.name}: {_UNIT_NOTES[sizes.name]}.", timeout=3)

    def action_switch_pace(self) -> None:
        """Switch between seconds per iteration and iterations per second."""
        pace = units.other_pace()
        self._apply_units(units.get_units()._replace(pace=pace))
        self.settings.set("pace", pace.value)
        self.notify(f"Pace in {pace.value}.", timeout=3)

    def _apply_units(self, choice: units.UnitChoice) -> None:
        units.set_units(choice)
        if self.is_watching:
            self.draw_frame()  # the footer names the other unit
        for screen in self.screen_stack:
            for panel in screen.query("RowWidget"):
                if isinstance(panel, RowWidget):
                    panel.repaint()

    def action_screenshot(self, filename: str | None = None, path: str | None = None) -> None:
        """Save the screen as SVG."""
        try:
            path = os.path.abspath(self.save_screenshot(filename, path))
        except OSError as error:
            self.notify(f"Cannot save the screenshot: {error}", severity="error")
        else:
            self.notify(f"Saved as {path}", title="Screenshot")

    def action_copy(self) -> None:
        """Copy the numbers of the focused panel to the clipboard, through the terminal."""
        self._scheduler.submit(partial(collect_copy_text, self.screen), self._copy_text)

    def _copy_text(self, text: str) -> None:
        if text:
            self.copy_to_clipboard(text)
            lines = text.count("\n") + 1
            self.notify(f"{format_count(lines, 'line')} copied, if the terminal allows it.", timeout=3)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in RECORDING_ACTIONS and not self.is_watching:
            return False
        if action == "look":
            return self.is_watching and self.viewer.can_control
        if action == "enter":
            return self.viewer.can_enter
        return self.viewer.sampler_missing if action == "restart_sampler" else True

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield every screen, and every action of the current one, those that were chosen most often here first."""
        uses = read_uses(self.settings)
        yield from sorted(self._list_commands(screen), key=lambda command: -uses.get(command.title, 0))

    def _list_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for tab in TABS if self.is_watching else ():
            yield SystemCommand(
                tab.title, f"The screen {tab.title}", self._make_runner(tab.title, f"switch('{tab.name}')", self)
            )
        yield SystemCommand(
            "Announcements",
            "Ring the bell and notify when a job ends or fails, or not",
            self._make_runner("Announcements", "switch_announcements", self),
        )
        seen: set[str] = set()
        for node, binding, enabled, _ in screen.active_bindings.values():
            by_name = binding.id and binding.tooltip and not binding.action.startswith(("switch_to", "command_palette"))
            if by_name and enabled and binding.action not in seen:
                seen.add(binding.action)
                run = self._make_runner(binding.description, binding.action, node)
                yield SystemCommand(binding.description, binding.tooltip, run)

    def _make_runner(self, title: str, action: str, node: DOMNode) -> Callable[[], None]:
        def run_bound() -> None:
            count_use(self.settings, title)
            self.call_next(self.run_action, action, node)

        return run_bound
