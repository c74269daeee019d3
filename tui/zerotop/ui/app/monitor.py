"""What shows a recording: one timer that reads and draws, and the screens, each made when it is first asked for."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial

from textual.app import App
from textual.events import Event, InputEvent
from textual.filter import ANSIToTruecolor, LineFilter

from zerotop.ui.app.ascii_filter import AsciiFilter
from zerotop.ui.app.settings import UserSettings
from zerotop.ui.app.terminal_lost import exit_hung_up, find_terminal, is_hung_up
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.bindings import APP_BINDINGS
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Controller, Leaving, Source
from zerotop.ui.base.start_interfaces import OpenedRecording
from zerotop.ui.base.tabs import TABS, load_screen_class
from zerotop.ui.dialogs.quit_dialog import LeaveDialog
from zerotop.ui.drawing import units
from zerotop.ui.drawing.glyphs import Glyphs, choose_glyphs
from zerotop.ui.drawing.theme import DARK, DARK_NAME, LIGHT, LIGHT_NAME

FRAME_S = 0.22  # between looks at the recording: what was written is on screen within this and one drawing
SETTLED_S = 2.0  # until the screen's own objects are made
READY_S = 0.3  # between two things that are done for screens that may be asked for
SLICE_S = 0.015  # of reading in one go: with very many ranks it takes longer, and keys are answered in between
KEYED_S, KEYED_SLICE_S = 1.0, 0.005  # so long after a key another one is likely, which is not to wait for that long
AT_ONCE_S = 0.012  # of processor time for a frame before anything is drawn, unless the last one took far longer
PAUSE_S = 0.001  # between two slices
REST_FACTOR = (
    6.0  # so many times as long as reading and drawing took nothing is read: with very many ranks pictures are rarer
)
FIRST_POLLS, FIRST_S = 8, 0.05  # a job that was attached to just now has its first figures within these
GARBAGE_OBJECTS = 20_000  # objects more than went make a search for garbage worth its time, some ten milliseconds
HEARTBEAT_S = 0.5  # a frame at least this often, so that times go on counting


class Monitor(App[Leaving]):
    """Shows one source. ``run()`` returns how the user left.

    Args:
        source: the recording to show; None where one is opened later.
        controller: the running job; None for a replay.
        title: the terminal's title, usually the session's name.
        play_from_ns: begin by playing from here (unix ns); None goes along with the end.
        speed: of playing, one of ``playhead.SPEEDS``.
        glyphs: characters to draw with; None chooses by locale.
        habits: what the user has set before.
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
        source: Source | None,
        controller: Controller | None = None,
        *,
        title: str = "",
        play_from_ns: int | None = None,
        speed: float = 1.0,
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
        self.shown_name = TABS[0].name  # of the screen that is shown, or was shown last
        self._tick_count = 0
        self._poll_work: Generator[None, None, bool] | None = None  # what is being read
        self._frame_work: Generator[None, None, Frame] | None = None  # the frame that is being made
        self._frame_cpu_s = 0.0  # of processor time so far
        self._at_once_s = AT_ONCE_S
        self._redraw_needed = False  # something was changed since it was begun
        self._poll_cpu_s = 0.0
        self._rest_until_s = 0.0
        self._last_key_s = -KEYED_S  # when somebody last pressed something
        self._job_check: asyncio.Future[None] | None = None
        self._imported_screen = ""  # the screen whose module was imported last
        self._terminal: int | None = None
        self._ascii_filters = [AsciiFilter(self.glyphs)] if self.glyphs.name == "ascii" else []
        self.title = title or "zerotop"
        if source is not None:
            self.set_recording(OpenedRecording(source, controller, self.title, play_from_ns), speed)

    def set_recording(self, opened: OpenedRecording, speed: float = 1.0) -> None:
        """Makes it what is watched."""
        self.title = opened.title
        self._viewer = Viewer(opened.source, opened.controller, self._clock)
        self._viewer.playhead.speed = speed
        if opened.play_from_ns is not None:
            self._viewer.playhead.play(opened.play_from_ns)
        for tab in TABS:
            self.add_mode(tab.name, partial(self._make_screen, tab.name))

    def close_recording(self) -> None:
        """Nothing is watched any more; its screens are for the caller to remove."""
        self._viewer = None
        self._poll_work = self._frame_work = None
        self._made_screens.clear()
        self.title = "zerotop"

    @property
    def is_watching(self) -> bool:
        """Whether a recording is open."""
        return self._viewer is not None

    @property
    def viewer(self) -> Viewer:
        """Of the recording that is open."""
        assert self._viewer is not None
        return self._viewer

    @property
    def shown_screen(self) -> MonitorScreen:
        """The screen that is shown, or was shown last."""
        return self._make_screen(self.shown_name)

    def _make_screen(self, name: str) -> MonitorScreen:
        """The screen of that name, made when it is first asked for and kept with all that was set on it."""
        if name not in self._made_screens:
            screen = self._made_screens[name] = load_screen_class(name)(self.glyphs, self.viewer.source)
            screen._css_update_count = self._css_update_count  # mounting styles it; Textual would style all others too
        return self._made_screens[name]

    def _preload_screen(self) -> None:
        """Makes one more of the screens that were not asked for yet, at a moment at which nobody presses a key."""
        lacking = [tab.name for tab in TABS if tab.name not in self._screen_stacks]
        if not (lacking and self.is_watching and self.is_running) or time.monotonic() - self._last_key_s < KEYED_S:
            return
        if self._imported_screen == lacking[0]:
            self._init_mode(lacking[0])
        self._imported_screen = lacking[0]
        load_screen_class(self._imported_screen)  # which takes as long as all else

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our palettes' names for any other theme."""
        return DARK.variables

    def get_line_filters(self) -> Sequence[LineFilter]:
        # The themes have no ANSI colours: translating them would cost a tenth of a frame for nothing.
        used = (kind for kind in super().get_line_filters() if not isinstance(kind, ANSIToTruecolor))
        return [*used, *self._ascii_filters]

    def on_mount(self) -> None:
        self._terminal = None if self.is_headless else find_terminal()
        self.draw_first_frame()
        self.set_interval(FRAME_S, self.run_tick, name="collector")
        self.set_interval(FIRST_S, self._start_poll, repeat=FIRST_POLLS)
        self.set_timer(SETTLED_S, self._finish_startup)

    def _finish_startup(self) -> None:
        _freeze_garbage()
        self.set_interval(READY_S, self._preload_screen)

    async def on_event(self, event: Event) -> None:
        if isinstance(event, InputEvent):
            self._last_key_s = time.monotonic()
        await super().on_event(event)

    @property
    def _slice_s(self) -> float:
        return KEYED_SLICE_S if time.monotonic() - self._last_key_s < KEYED_S else SLICE_S

    def draw_first_frame(self) -> None:
        """The first frame of a recording that is there."""
        if self.is_watching:
            self.viewer.poll()
            self.viewer.check_job()
            self.draw_frame()

    def run_tick(self) -> None:
        """Reads what is new and draws it. But for the first moments, the monitor's only timer."""
        self._tick_count += 1
        if self._terminal is not None and is_hung_up(self._terminal):
            exit_hung_up()
        if not (self.is_watching and self.is_running):  # screens go before timers do
            return
        beat = max(1, round(HEARTBEAT_S / FRAME_S))
        if self._tick_count % (2 * beat) == 0:
            self._check_job()
        if gc.get_count()[0] > GARBAGE_OBJECTS and time.monotonic() - self._last_key_s > KEYED_S:
            gc.collect(0)
        self._start_poll()
        if isinstance(self.screen, LeaveDialog):
            self.screen.note_job(self.viewer.source.is_live)

    def _check_job(self) -> None:  # on a thread: of very many ranks there are files to look through
        if self._job_check is None or self._job_check.done():
            if self._job_check is not None:
                self._job_check.result()  # raises what it raised
            self._job_check = asyncio.get_running_loop().run_in_executor(None, self.viewer.check_job)

    def _start_poll(self) -> None:
        """Begins to read what is new, if that is not going on and has rested."""
        if self.is_watching and self._poll_work is None and time.monotonic() >= self._rest_until_s:
            self._poll_work, self._poll_cpu_s = self.viewer.iter_poll(), 0.0
            self._continue_poll()

    def _continue_poll(self) -> None:
        """Reads for a slice of time; keys have their turn before the next one."""
        if self._poll_work is None or not self.is_running:
            return
        if self._frame_work is not None:  # somebody waits for that
            self._call_soon(self._continue_poll)
            return
        begun, cpu_s = time.monotonic(), time.thread_time()
        try:
            while time.monotonic() - begun < self._slice_s:
                next(self._poll_work)
        except StopIteration as end:
            self._poll_work = None
            if end.value or self._tick_count % max(1, round(HEARTBEAT_S / FRAME_S)) == 0:
                self.draw_frame()
        else:
            self._call_soon(self._continue_poll)
        self._poll_cpu_s += time.thread_time() - cpu_s
        self._rest_until_s = time.monotonic() + REST_FACTOR * self._poll_cpu_s

    def _call_soon(self, work: Callable[[], None]) -> None:
        # What is called later is called without a pause in between: keys would wait in the terminal's thread.
        asyncio.get_running_loop().call_later(PAUSE_S, self.call_later, work)

    def delay_update(self, delay: float = 0.05) -> None:
        """Textual hides changes of screens for longer than a key may wait. Screens that are there need no hiding."""
        if not (self._batch_count and self.is_watching and self.shown_screen.is_mounted):
            super().delay_update(delay)

    async def draw_later(self) -> None:
        """Draws when what was just painted is on the terminal."""
        await asyncio.sleep(PAUSE_S)
        if self.is_watching and self.is_running:
            self.draw_frame()

    def draw_frame(self) -> None:
        """Draws the frame of this moment.

        With very many ranks a look at another moment takes longer than keys may wait. Then it is made in slices, and until
        it is there only what tells of time is drawn anew.
        """
        self._redraw_needed = self._frame_work is not None
        if self._frame_work is None:
            self._frame_work, self._frame_cpu_s = self.viewer.iter_frame(), 0.0
            self._continue_frame(self._at_once_s)
        present = self.viewer.make_interim_frame() if self._frame_work is not None else None
        if present is not None:
            self.shown_screen.show_time(replace(present, tabs=TABS))

    def _continue_frame(self, most_s: float) -> None:
        """Makes the frame for about so long, and draws it when it is whole."""
        if self._frame_work is None:
            return
        begun = time.thread_time()
        try:
            next(self._frame_work)
            while time.thread_time() - begun < most_s:
                next(self._frame_work)
            self._frame_cpu_s += time.thread_time() - begun
        except StopIteration as end:
            self._frame_work = None
            self.shown_screen.frame = replace(end.value, tabs=TABS)
            if self._redraw_needed:
                self.draw_frame()
        else:
            self._call_soon(self._resume_frame)

    def _resume_frame(self) -> None:
        if self.is_watching:
            self._at_once_s = AT_ONCE_S if self._frame_cpu_s < 2 * AT_ONCE_S else 0.0
            self._continue_frame(self._slice_s)


def _freeze_garbage() -> None:
    """Searches for garbage in what frames leave, seldom, and no longer in modules, styles and widgets.

    A frame makes tens of thousands of small tuples, which go without that. The searches were a fifth of its time, with very
    many ranks 40 ms each: now they are for moments at which nobody presses a key.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(25 * GARBAGE_OBJECTS)
