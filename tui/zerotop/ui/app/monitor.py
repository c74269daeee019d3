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

from zerotop.ui.app.ascii_filter import PlainText
from zerotop.ui.app.settings import Habits
from zerotop.ui.app.terminal_lost import end_as_hung_up, hung_up, terminal
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.base.base_screen import Watching
from zerotop.ui.base.bindings import APP_BINDINGS
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Controller, Leaving, Source
from zerotop.ui.base.start_interfaces import Opened
from zerotop.ui.base.tabs import TABS, screen_of
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
RESTS = 6.0  # so many times as long as reading and drawing took nothing is read: with very many ranks pictures are rarer
FIRST_LOOKS, FIRST_S = 8, 0.05  # a job that was attached to just now has its first figures within these
GARBAGE = 20_000  # objects more than went make a search for garbage worth its time, some ten milliseconds
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
        habits: Habits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.glyphs = glyphs or choose_glyphs(os.environ, getattr(sys.__stdout__, "encoding", None))
        super().__init__()
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.habits = habits or Habits()
        self.theme = LIGHT_NAME if self.habits.get("theme", DARK_NAME) == LIGHT_NAME else DARK_NAME
        units.choose(units.named(self.habits.get("sizes", ""), self.habits.get("pace", "")))
        self._clock = clock
        self._viewer: Viewer | None = None
        self._screens: dict[str, Watching] = {}
        self.shown = TABS[0].name  # of the screen that is shown, or was shown last
        self._ticks = 0
        self._polling: Generator[None, None, bool] | None = None  # what is being read
        self._framing: Generator[None, None, Frame] | None = None  # the frame that is being made
        self._framing_s = 0.0  # of processor time so far
        self._at_once_s = AT_ONCE_S
        self._another = False  # something was changed since it was begun
        self._took_s = 0.0
        self._rest_until_s = 0.0
        self._keyed_s = -KEYED_S  # when somebody last pressed something
        self._checking: asyncio.Future[None] | None = None
        self._imported = ""  # the screen whose module was imported last
        self._terminal: int | None = None
        self._plain = [PlainText(self.glyphs)] if self.glyphs.name == "ascii" else []
        self.title = title or "zerotop"
        if source is not None:
            self.take(Opened(source, controller, self.title, play_from_ns), speed)

    def take(self, opened: Opened, speed: float = 1.0) -> None:
        """Makes it what is watched."""
        self.title = opened.title
        self._viewer = Viewer(opened.source, opened.controller, self._clock)
        self._viewer.playhead.speed = speed
        if opened.play_from_ns is not None:
            self._viewer.playhead.play(opened.play_from_ns)
        for tab in TABS:
            self.add_mode(tab.name, partial(self._made, tab.name))

    def forget(self) -> None:
        """Nothing is watched any more; its screens are for the caller to remove."""
        self._viewer = None
        self._polling = self._framing = None
        self._screens.clear()
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
    def watching(self) -> Watching:
        """The screen that is shown, or was shown last."""
        return self._made(self.shown)

    def _made(self, name: str) -> Watching:
        """The screen of that name, made when it is first asked for and kept with all that was set on it."""
        if name not in self._screens:
            screen = self._screens[name] = screen_of(name)(self.glyphs, self.viewer.source)
            screen._css_update_count = self._css_update_count  # mounting styles it; Textual would style all others too
        return self._screens[name]

    def _make_ready(self) -> None:
        """Makes one more of the screens that were not asked for yet, at a moment at which nobody presses a key."""
        lacking = [tab.name for tab in TABS if tab.name not in self._screen_stacks]
        if not (lacking and self.is_watching and self.is_running) or time.monotonic() - self._keyed_s < KEYED_S:
            return
        if self._imported == lacking[0]:
            self._init_mode(lacking[0])
        self._imported = lacking[0]
        screen_of(self._imported)  # which takes as long as all else

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our palettes' names for any other theme."""
        return DARK.variables

    def get_line_filters(self) -> Sequence[LineFilter]:
        # The themes have no ANSI colours: translating them would cost a tenth of a frame for nothing.
        used = (kind for kind in super().get_line_filters() if not isinstance(kind, ANSIToTruecolor))
        return [*used, *self._plain]

    def on_mount(self) -> None:
        self._terminal = None if self.is_headless else terminal()
        self.look_first()
        self.set_interval(FRAME_S, self.tick, name="collector")
        self.set_interval(FIRST_S, self._read, repeat=FIRST_LOOKS)
        self.set_timer(SETTLED_S, self._settle)

    def _settle(self) -> None:
        _keep_what_there_is()
        self.set_interval(READY_S, self._make_ready)

    async def on_event(self, event: Event) -> None:
        if isinstance(event, InputEvent):
            self._keyed_s = time.monotonic()
        await super().on_event(event)

    @property
    def _slice_s(self) -> float:
        return KEYED_SLICE_S if time.monotonic() - self._keyed_s < KEYED_S else SLICE_S

    def look_first(self) -> None:
        """The first frame of a recording that is there."""
        if self.is_watching:
            self.viewer.poll()
            self.viewer.check_job()
            self.draw()

    def tick(self) -> None:
        """Reads what is new and draws it. But for the first moments, the monitor's only timer."""
        self._ticks += 1
        if self._terminal is not None and hung_up(self._terminal):
            end_as_hung_up()
        if not (self.is_watching and self.is_running):  # screens go before timers do
            return
        beat = max(1, round(HEARTBEAT_S / FRAME_S))
        if self._ticks % (2 * beat) == 0:
            self._check_job()
        if gc.get_count()[0] > GARBAGE and time.monotonic() - self._keyed_s > KEYED_S:
            gc.collect(0)
        self._read()
        if isinstance(self.screen, LeaveDialog):
            self.screen.note_job(self.viewer.source.live)

    def _check_job(self) -> None:  # on a thread: of very many ranks there are files to look through
        if self._checking is None or self._checking.done():
            if self._checking is not None:
                self._checking.result()  # raises what it raised
            self._checking = asyncio.get_running_loop().run_in_executor(None, self.viewer.check_job)

    def _read(self) -> None:
        """Begins to read what is new, if that is not going on and has rested."""
        if self.is_watching and self._polling is None and time.monotonic() >= self._rest_until_s:
            self._polling, self._took_s = self.viewer.polling(), 0.0
            self._poll_on()

    def _poll_on(self) -> None:
        """Reads for a slice of time; keys have their turn before the next one."""
        if self._polling is None or not self.is_running:
            return
        if self._framing is not None:  # somebody waits for that
            self._soon(self._poll_on)
            return
        begun, cpu_s = time.monotonic(), time.thread_time()
        try:
            while time.monotonic() - begun < self._slice_s:
                next(self._polling)
        except StopIteration as end:
            self._polling = None
            if end.value or self._ticks % max(1, round(HEARTBEAT_S / FRAME_S)) == 0:
                self.draw()
        else:
            self._soon(self._poll_on)
        self._took_s += time.thread_time() - cpu_s
        self._rest_until_s = time.monotonic() + RESTS * self._took_s

    def _soon(self, work: Callable[[], None]) -> None:
        # What is called later is called without a pause in between: keys would wait in the terminal's thread.
        asyncio.get_running_loop().call_later(PAUSE_S, self.call_later, work)

    def delay_update(self, delay: float = 0.05) -> None:
        """Textual hides changes of screens for longer than a key may wait. Screens that are there need no hiding."""
        if not (self._batch_count and self.is_watching and self.watching.is_mounted):
            super().delay_update(delay)

    async def draw_later(self) -> None:
        """Draws when what was just painted is on the terminal."""
        await asyncio.sleep(PAUSE_S)
        if self.is_watching and self.is_running:
            self.draw()

    def draw(self) -> None:
        """Draws the frame of this moment.

        With very many ranks a look at another moment takes longer than keys may wait. Then it is made in slices, and until
        it is there only what tells of time is drawn anew.
        """
        self._another = self._framing is not None
        if self._framing is None:
            self._framing, self._framing_s = self.viewer.framing(), 0.0
            self._frame_on(self._at_once_s)
        present = self.viewer.present() if self._framing is not None else None
        if present is not None:
            self.watching.answer(replace(present, tabs=TABS))

    def _frame_on(self, most_s: float) -> None:
        """Makes the frame for about so long, and draws it when it is whole."""
        if self._framing is None:
            return
        begun = time.thread_time()
        try:
            next(self._framing)
            while time.thread_time() - begun < most_s:
                next(self._framing)
            self._framing_s += time.thread_time() - begun
        except StopIteration as end:
            self._framing = None
            self.watching.frame = replace(end.value, tabs=TABS)
            if self._another:
                self.draw()
        else:
            self._soon(self._frame_later)

    def _frame_later(self) -> None:
        if self.is_watching:
            self._at_once_s = AT_ONCE_S if self._framing_s < 2 * AT_ONCE_S else 0.0
            self._frame_on(self._slice_s)


def _keep_what_there_is() -> None:
    """Searches for garbage in what frames leave, seldom, and no longer in modules, styles and widgets.

    A frame makes tens of thousands of small tuples, which go without that. The searches were a fifth of its time, with very
    many ranks 40 ms each: now they are for moments at which nobody presses a key.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(25 * GARBAGE)
