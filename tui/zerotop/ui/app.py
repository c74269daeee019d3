"""The program on the terminal: one timer that reads and draws, and the keys that move through time."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial

from textual.app import App, SystemCommand
from textual.dom import DOMNode
from textual.filter import ANSIToTruecolor, LineFilter
from textual.screen import Screen

from zerotop.analysis.annotations import Annotation
from zerotop.ui.bindings import APP_BINDINGS, ONLY_WATCHING
from zerotop.ui.copying import text_to_copy
from zerotop.ui.drawing.footer import Tab
from zerotop.ui.drawing.glyphs import Glyphs, choose_glyphs
from zerotop.ui.filters import PlainText
from zerotop.ui.habits import Habits
from zerotop.ui.hang_up import end_as_hung_up, hung_up, terminal
from zerotop.ui.ports import Controller, Leaving, Source
from zerotop.ui.screens.dialog import Page
from zerotop.ui.screens.feed import Feed
from zerotop.ui.screens.go_to import GoToDialog, Place
from zerotop.ui.screens.iteration import IterationScreen
from zerotop.ui.screens.leave import LeaveDialog
from zerotop.ui.screens.live import LiveScreen
from zerotop.ui.screens.memory import MemoryScreen
from zerotop.ui.screens.output import OutputScreen
from zerotop.ui.screens.pages import help_page, job_text
from zerotop.ui.screens.ranks import RanksScreen
from zerotop.ui.screens.threads import ThreadsScreen
from zerotop.ui.screens.timeline import TimelineScreen
from zerotop.ui.screens.watching import Watching
from zerotop.ui.starting import Opened
from zerotop.ui.theme import DARK, DARK_NAME, LIGHT, LIGHT_NAME
from zerotop.ui.viewer import Viewer
from zerotop.ui.widgets.panels import Output, Pressable, Transport

FRAME_S = 0.22  # between looks at the recording: what was written is on screen within this and one drawing
SETTLED_S = 2.0  # until the screen's own objects are made
# In the order of their numbers.
SCREENS: tuple[type[Watching], ...] = (
    LiveScreen,
    TimelineScreen,
    IterationScreen,
    MemoryScreen,
    RanksScreen,
    ThreadsScreen,
    OutputScreen,
)
TABS = tuple(Tab(screen.NAME, screen.TITLE) for screen in SCREENS)
SLICE_S = 0.015  # of reading in one go: with very many ranks it takes longer, and keys are answered in between
RESTS = 6.0  # so many times as long as reading and drawing took nothing is read: with very many ranks pictures are rarer
HEARTBEAT_S = 0.5  # a frame at least this often, so that times go on counting


class ZerotopApp(App[Leaving]):
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
    DEFAULT_MODE = LiveScreen.NAME

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
        self._clock = clock
        self._viewer: Viewer | None = None
        self._screens: dict[str, Watching] = {}
        self.shown = LiveScreen.NAME  # of the screen that is shown, or was shown last
        self._ticks = 0
        self._polling: Generator[None, None, bool] | None = None  # what is being read
        self._took_s = 0.0
        self._rest_until_s = 0.0
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
        for screen in SCREENS:
            self.add_mode(screen.NAME, partial(self._made, screen.NAME))

    def forget(self) -> None:
        """Nothing is watched any more; its screens are for the caller to remove."""
        self._viewer = None
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
    def _watching(self) -> Watching:
        return self._made(self.shown)

    def _made(self, name: str) -> Watching:
        """The screen of that name, made when it is first asked for and kept with all that was set on it."""
        if name not in self._screens:
            kind = next(screen for screen in SCREENS if name == screen.NAME)
            self._screens[name] = kind(self.glyphs, self.viewer.source)
        return self._screens[name]

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
        self.set_timer(SETTLED_S, _keep_what_there_is)

    def look_first(self) -> None:
        """The first frame of a recording that is there."""
        if self.is_watching:
            self.viewer.poll()
            self.viewer.check_job()
            self.draw()

    def tick(self) -> None:
        """Reads what is new and draws it. The monitor's only timer."""
        self._ticks += 1
        if self._terminal is not None and hung_up(self._terminal):
            end_as_hung_up()
        if not self.is_watching:
            return
        beat = max(1, round(HEARTBEAT_S / FRAME_S))
        if self._ticks % (2 * beat) == 0:
            self.viewer.check_job()
        if self._polling is None and time.monotonic() >= self._rest_until_s:
            self._polling, self._took_s = self.viewer.polling(), 0.0
            self._poll_on()
        if isinstance(self.screen, LeaveDialog):
            self.screen.note_job(self.viewer.source.live)

    def _poll_on(self) -> None:
        """Reads for a slice of time; keys have their turn before the next one."""
        if self._polling is None:
            return
        begun, cpu_s = time.monotonic(), time.thread_time()
        try:
            while time.monotonic() - begun < SLICE_S:
                next(self._polling)
        except StopIteration as end:
            self._polling = None
            if end.value or self._ticks % max(1, round(HEARTBEAT_S / FRAME_S)) == 0:
                self.draw()
        else:
            self.call_later(self._poll_on)
        self._took_s += time.thread_time() - cpu_s
        self._rest_until_s = time.monotonic() + RESTS * self._took_s

    def draw(self) -> None:
        """Draws the frame of this moment."""
        self._watching.frame = replace(self.viewer.frame(), tabs=TABS)

    # Screens

    def action_switch(self, name: str) -> None:
        """Shows the screen of that name. A dialog over it stays where it is: none can be open."""
        if name != self.shown:
            self.shown = name
            self.switch_mode(name)
            self.draw()

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

    # Time

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
        frame = self._watching.frame
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

    # The job and the program

    def action_leave(self) -> None:
        """Quits, or asks first while there is a job to ask about."""
        if not self.is_watching:
            self.exit(Leaving.QUIT)
        elif isinstance(self.screen, LeaveDialog):
            self.screen.action_again()
        elif self.viewer.controller is not None and self.viewer.source.live:
            self.push_screen(LeaveDialog(self.viewer.controller, self.glyphs, self._clock), self._leave)
        else:
            self.left(Leaving.QUIT)

    def _leave(self, leaving: Leaving | None) -> None:
        if leaving is not None:
            self.left(leaving)

    def left(self, leaving: Leaving) -> None:
        """The recording was left."""
        self.exit(leaving)

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
            self.notify(f"The sampler cannot be started: {error}", severity="error", markup=False)

    def action_enter(self) -> None:
        """Puts the probe into the ranks, beside everything else: those that are busy answer late."""
        controller = self.viewer.controller
        if controller is not None:
            self.notify("The ranks are asked to take the probe in.", timeout=3)
            self.run_worker(self._enter(controller), group="enter", exclusive=True)

    async def _enter(self, controller: Controller) -> None:
        try:
            said = await asyncio.to_thread(controller.enter)
        except OSError as error:
            said = f"The ranks cannot be entered: {error}"
        self.notify(said, timeout=10, markup=False)
        self.viewer.check_job()
        self.draw()

    def action_look(self) -> None:
        """Has the job record every allocation of its next step."""
        try:
            self.viewer.ask_to_look()
        except OSError as error:
            self.notify(f"The job cannot be asked: {error}", severity="error", markup=False)
        self.draw()

    def action_job(self) -> None:
        if self._watching.frame is not None:
            self.push_screen(Page("This job", job_text(self._watching.frame.view, self.glyphs), self.glyphs))

    def action_help(self) -> None:
        """The help of the screen that is seen, if it has one."""
        screen = self.screen
        bindings = [binding for _, binding, enabled, _ in screen.active_bindings.values() if enabled]
        known = [binding for binding in bindings if binding.id and binding.tooltip]
        terms = getattr(screen, "TERMS", None)
        if terms is not None:
            page = help_page(screen.HELP or "", known, terms, self.glyphs)
            self.push_screen(Page(f"Help: {getattr(screen, 'TITLE', '')}", page, self.glyphs))

    def action_switch_theme(self) -> None:
        self.theme = LIGHT_NAME if self.theme == DARK_NAME else DARK_NAME
        self.habits.set("theme", self.theme)

    def action_screenshot(self, filename: str | None = None, path: str | None = None) -> None:
        """Saves the screen as SVG and says where."""
        try:
            place = os.path.abspath(self.save_screenshot(filename, path))
        except OSError as error:
            self.notify(f"The screenshot cannot be saved: {error}", severity="error", markup=False)
        else:
            self.notify(f"Saved as {place}", title="Screenshot", markup=False)

    def action_copy(self) -> None:
        """Copies the numbers of the focused panel to the clipboard, through the terminal."""
        text = text_to_copy(self.screen)
        if text:
            self.copy_to_clipboard(text)
            lines = text.count("\n") + 1
            self.notify(f"{lines} line{'' if lines == 1 else 's'} copied, if this terminal lets programs copy.", timeout=3)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ONLY_WATCHING and not self.is_watching:
            return False
        if action == "look":
            return self.is_watching and self.viewer.steered
        if action == "enter":
            return self.viewer.enterable
        return self.viewer.sampler_missing if action == "restart_sampler" else True

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every screen, and every action of this one, by name."""
        for tab in TABS if self.is_watching else ():
            yield SystemCommand(tab.title, f"The screen {tab.title}", self._runner(f"switch('{tab.name}')", self))
        seen: set[str] = set()
        for node, binding, enabled, _ in screen.active_bindings.values():
            by_name = binding.id and binding.tooltip and not binding.action.startswith("switch_to")
            if by_name and enabled and binding.action not in seen:
                seen.add(binding.action)
                yield SystemCommand(binding.description, binding.tooltip, self._runner(binding.action, node))

    def _runner(self, action: str, node: DOMNode) -> Callable[[], None]:
        def run() -> None:
            self.call_next(self.run_action, action, node)

        return run


def _keep_what_there_is() -> None:
    """Searches for garbage in what frames leave, seldom, and no longer in modules, styles and widgets.

    A frame makes tens of thousands of small tuples, which go without that; the searches were a fifth of its time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
