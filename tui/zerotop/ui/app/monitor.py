"""The app that shows a recording: its timer, its worker, and its screens, each made when it is first needed."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from rich.text import Text
from textual.app import App
from textual.events import Event, InputEvent
from textual.filter import ANSIToTruecolor, LineFilter

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.ascii_filter import AsciiFilter
from zerotop.ui.app.frame_scheduler import FrameScheduler
from zerotop.ui.app.settings import UserSettings
from zerotop.ui.app.terminal_lost import exit_hung_up, find_terminal, is_hung_up
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.bindings import APP_BINDINGS
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import RedrawRequested
from zerotop.ui.base.interfaces import Controller, Leaving
from zerotop.ui.base.start_interfaces import OpenedRecording
from zerotop.ui.base.tabs import TABS, load_screen_class
from zerotop.ui.dialogs.quit_dialog import LeaveDialog
from zerotop.ui.drawing import units
from zerotop.ui.drawing.glyphs import Glyphs, choose_glyphs
from zerotop.ui.drawing.text import sanitize
from zerotop.ui.drawing.theme import DARK, DARK_NAME, LIGHT, LIGHT_NAME, adapt_theme

FRAME_S = 0.22  # between two polls: a new record is on screen within this and one frame
HEARTBEAT_S = 0.5  # a frame at least this often, so that clocks advance
FIRST_POLLS, FIRST_S = 8, 0.05  # polls right after the start: a job just attached to has its first figures soon
SETTLED_S = 2.0  # after the start, when the objects of the screen exist
READY_S = 0.3  # between two steps of preloading screens
KEYED_S = 1.0  # after a key another one is likely: work that can wait does not start
GARBAGE_OBJECTS = 20_000  # allocations beyond deallocations that make a collection (some 10 ms) worth it


class Monitor(App[Leaving]):
    """Shows one recording. ``run()`` returns how the user left.

    Args:
        source: the recording to show; None to open one later.
        controller: the running job; None for a replay.
        title: the terminal's title, usually the recording's name.
        play_from_ns: play from this unix time; None follows the end.
        glyphs: characters to draw with; None chooses by the locale.
        settings: the user's settings.
        clock: monotonic seconds.
    """

    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = "ctrl+p"
    ESCAPE_TO_MINIMIZE = False
    DEFAULT_MODE = TABS[0].name

    BINDINGS = APP_BINDINGS

    def __init__(
        self,
        source: RecordingSource | None,
        controller: Controller | None = None,
        *,
        title: str = "",
        play_from_ns: int | None = None,
        glyphs: Glyphs | None = None,
        settings: UserSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.glyphs = glyphs or choose_glyphs(os.environ, getattr(sys.__stdout__, "encoding", None))
        super().__init__()
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.settings = settings or UserSettings()
        self.theme = LIGHT_NAME if self.settings.get("theme", DARK_NAME) == LIGHT_NAME else DARK_NAME
        units.set_units(units.parse_units(self.settings.get("sizes", ""), self.settings.get("pace", "")))
        self._clock = clock
        self._viewer: Viewer | None = None
        self._made_screens: dict[str, MonitorScreen] = {}
        self.shown_name = TABS[0].name  # of the screen shown now or last
        self._tick_count = 0
        self._scheduler = FrameScheduler(self)
        self._last_key_s = -KEYED_S  # of the last key or mouse event
        self._job_check: asyncio.Future[None] | None = None
        self._imported_screen = ""  # name of the screen whose module was imported last
        self._terminal: int | None = None
        self._ascii_filters = [AsciiFilter(self.glyphs)] if self.glyphs.name == "ascii" else []
        self.title = title or "zerotop"
        if source is not None:
            self.set_recording(OpenedRecording(source, controller, self.title, play_from_ns))

    def set_recording(self, opened: OpenedRecording) -> None:
        """Watch a recording."""
        self.title = opened.title
        self._viewer = Viewer(opened.source, opened.controller, self._clock)
        if opened.play_from_ns is not None:
            self._viewer.playhead.play(opened.play_from_ns)
        for tab in TABS:
            self.add_mode(tab.name, partial(self._make_screen, tab.name))

    def close_recording(self) -> None:
        """Stop watching. The caller removes the screens."""
        self._scheduler.close()
        self._scheduler = FrameScheduler(self)
        self.viewer.source.close()
        self._viewer = None
        self._made_screens.clear()
        self.title = "zerotop"

    async def close_screens(self, mode: str) -> None:
        """Show another mode, and close the recording and its screens."""
        await self.switch_mode(mode)
        self.close_recording()
        for tab in TABS:
            await self.remove_mode(tab.name)

    @property
    def is_watching(self) -> bool:
        """Whether a recording is open."""
        return self._viewer is not None

    @property
    def is_busy(self) -> bool:
        """Whether the worker still has something to deliver."""
        return self._scheduler.is_busy

    @property
    def viewer(self) -> Viewer:
        """The viewer of the open recording."""
        assert self._viewer is not None
        return self._viewer

    @property
    def shown_screen(self) -> MonitorScreen:
        """The screen shown now or last."""
        return self._make_screen(self.shown_name)

    def _make_screen(self, name: str) -> MonitorScreen:
        """Return the screen of that name; it is made once and keeps its state."""
        if name not in self._made_screens:
            screen = self._made_screens[name] = load_screen_class(name)(self.glyphs, self.viewer.source)
            screen.restore_zoom(self.settings.get(f"zoom.{name}", ""))
            screen._css_update_count = self._css_update_count  # mounting styles it; Textual would style all others
        return self._made_screens[name]

    def _preload_screen(self) -> None:
        """Make one more of the screens that were not needed yet, while no key is pressed."""
        lacking = [tab.name for tab in TABS if tab.name not in self._screen_stacks]
        if (
            not (lacking and self.is_watching and self.is_running)
            or self._exit
            or time.monotonic() - self._last_key_s < KEYED_S
        ):
            return
        if self._imported_screen == lacking[0]:
            self._init_mode(lacking[0])
        self._imported_screen = lacking[0]
        load_screen_class(self._imported_screen)  # takes as long as the rest

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Define our palette's variables for any other theme."""
        return DARK.variables

    def get_line_filters(self) -> Sequence[LineFilter]:
        # The themes have no ANSI colours: translating them would waste a tenth of a frame.
        used = (kind for kind in super().get_line_filters() if not isinstance(kind, ANSIToTruecolor))
        return [*used, *self._ascii_filters]

    def on_mount(self) -> None:
        self._terminal = None if self.is_headless else find_terminal()
        if not self.is_headless and self.console.color_system != "truecolor":
            for theme in (DARK, LIGHT):
                self.register_theme(adapt_theme(theme, self.console.color_system))
            self.refresh_css(animate=False)
        self.draw_first_frame()
        self.set_interval(FRAME_S, self.run_tick, name="collector")
        self.set_interval(FIRST_S, self._scheduler.poll_rested, repeat=FIRST_POLLS)
        self.set_timer(SETTLED_S, self._finish_startup)

    def _finish_startup(self) -> None:
        freeze_garbage()
        self.set_interval(READY_S, self._preload_screen)

    async def on_event(self, event: Event) -> None:
        if isinstance(event, InputEvent):
            self._last_key_s = time.monotonic()
        await super().on_event(event)

    def on_unmount(self) -> None:
        self._scheduler.close()

    def draw_first_frame(self) -> None:
        """Read the recording and show its first frame, before the worker has anything to do."""
        if self.is_watching:
            self.viewer.poll()
            self.viewer.check_job()
            self.shown_screen.show_time(self.viewer.make_frame())
            self._scheduler.search_findings()

    def run_tick(self) -> None:
        """Poll the recording; called by the monitor's only regular timer."""
        self._tick_count += 1
        if self._terminal is not None and is_hung_up(self._terminal):
            exit_hung_up()
        if not (self.is_watching and self.is_running):  # screens are closed before timers
            return
        beat = max(1, round(HEARTBEAT_S / FRAME_S))
        if self._tick_count % (2 * beat) == 0:
            self._check_job()
        if gc.get_count()[0] > GARBAGE_OBJECTS and time.monotonic() - self._last_key_s > KEYED_S:
            gc.collect(0)
        self._scheduler.poll_rested(force=self._tick_count % beat == 0)
        if isinstance(self.screen, LeaveDialog):
            self.screen.note_job(self.viewer.source.is_live)

    def _check_job(self) -> None:  # on a thread: very many ranks have many files
        if self._job_check is None or self._job_check.done():
            if self._job_check is not None:
                self._job_check.result()  # raises the error of the check
            self._job_check = asyncio.get_running_loop().run_in_executor(None, self.viewer.check_job)

    def give_up_recording(self, reason: str) -> None:
        """Leave a recording that can no longer be read; ``reason`` is a sentence."""
        self.exit(Leaving.QUIT, return_code=1, message=Text(f"zerotop: {sanitize(reason, self.glyphs)}"))

    def draw_frame(self) -> None:
        """Have the current frame made and shown."""
        self._scheduler.draw_frame()

    def handle_shown_frame(self, frame: Frame) -> None:
        """Called after the screen has shown a new frame."""

    def on_monitor_screen_panel_zoomed(self, event: MonitorScreen.PanelZoomed) -> None:
        self.settings.set(f"zoom.{event.screen}", event.panel)

    def on_redraw_requested(self, event: RedrawRequested) -> None:
        event.stop()
        if event.change is not None:
            self._scheduler.submit(event.change, event.deliver)
        if self.is_watching and self.is_running:
            self.draw_frame()

    def delay_update(self, delay: float = 0.05) -> None:
        """Skip the delay in which Textual hides a change of screens: a mounted screen needs none."""
        if not (self._batch_count and self.is_watching and self.shown_screen.is_mounted):
            super().delay_update(delay)


def freeze_garbage() -> None:
    """Collect garbage rarely, and never in modules, styles and widgets.

    A frame makes tens of thousands of small tuples, which reference counting frees. Collections took a fifth of its time,
    with very many ranks 40 ms each; now they run while no key is pressed.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(25 * GARBAGE_OBJECTS)
