"""Asks how to leave while a job runs: detach, stop, or stay. Shows the progress of stopping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.base.interfaces import Controller, Leaving
from zerotop.ui.dialogs.dialog import Dialog
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import sanitize

Choice = tuple[str, str, str]  # id, key and title, explanation


class LeaveDialog(Dialog[Leaving]):
    """Returns how to leave, or None to stay. ``note_job`` tells it when the job has ended."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("d", "choose('detach')", "leave.detach", "Detach", "Leave; training continues"),
        bind("s", "choose('stop')", "leave.stop", "Stop", "Stop the job gracefully; again forces it"),
        bind("c", "close", "leave.cancel", "Cancel", "Back to the screen"),
        bind("l,q", "again", "leave.again", "Leave", "Leave without stopping the job"),
    ]

    def __init__(self, controller: Controller, glyphs: Glyphs, clock: Callable[[], float]) -> None:
        super().__init__("Leave", glyphs)
        self.controller = controller
        self._clock = clock
        self.stop_requests = 0  # how often the user asked the job to stop
        self._requested_s = 0.0
        self._is_over = False

    def compose_box(self) -> ComposeResult:
        yield Static(id="text", markup=False)
        yield OptionList(id="choices", markup=False)
        yield from self.compose_problem()

    def on_mount(self) -> None:
        self._update_choices()
        self.query_one(OptionList).focus()

    def note_job(self, live: bool) -> None:
        """Update for every frame while the dialog is open, and perhaps once while it closes."""
        if not self.query("#text"):
            return
        if not live and not self._is_over:
            self._is_over = True
            self._update_choices()
        elif self.stop_requests:
            self._update_sentence()

    def action_again(self) -> None:
        """Leave without stopping the job, when a key that leaves is pressed again."""
        self.dismiss(self._choose_leaving())

    def action_choose(self, choice: str) -> None:
        if choice == "stop" and not self._is_over:
            self._request_stop()
        elif choice in ("detach", "leave"):
            self.dismiss(self._choose_leaving())
        elif choice == "cancel":
            self.dismiss(None)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.action_choose(event.option_id or "cancel")

    def _choose_leaving(self) -> Leaving:
        if self._is_over:
            return Leaving.STOPPED if self.stop_requests else Leaving.QUIT
        return Leaving.DETACHED

    def _request_stop(self) -> None:
        self.stop_requests += 1
        self._requested_s = self._clock()
        self._update_choices()
        self.run_worker(self._send_stop())

    async def _send_stop(self) -> None:
        """Send the request on a thread, because unreachable nodes answer late. Leaving does not cancel it."""
        try:
            problem = await asyncio.to_thread(self.controller.stop_job)
        except OSError as error:
            problem = f"Cannot stop the job: {error}"
            self.stop_requests -= 1
            self._update_choices()
        if problem:
            self.show_problem(problem)

    def _update_choices(self) -> None:
        self._update_sentence()
        choices = self.query_one(OptionList)
        choices.clear_options()
        for identity, title, meaning in self._list_choices():
            text = Text()
            text.append(title + "\n", "bold")
            text.append("   " + self.glyphs.to_plain(meaning))
            choices.add_option(Option(text, id=identity))
        choices.highlighted = 0

    def _update_sentence(self) -> None:
        self.query_one("#text", Static).update(Text(self.glyphs.to_plain(self._describe_state())))

    def _describe_state(self) -> str:
        if self._is_over:
            return "The job has ended."
        if not self.stop_requests:
            return "The job is still running."
        seconds = int(self._clock() - self._requested_s)
        if self.stop_requests == 1:
            return f"Stopping: asked to end {seconds} s ago; the job may be saving its work …"
        return f"Killing the job's processes, {seconds} s …"

    def _list_choices(self) -> list[Choice]:
        if self._is_over:
            return [
                ("leave", "l  Leave", "The recording is kept; show it again with zerotop replay."),
                ("cancel", "c  Stay", "Look at the recording."),
            ]
        if self.stop_requests:
            return [
                ("stop", "s  Kill it now", "Kills the job. Unsaved work is lost."),
                ("detach", "d  Leave now", "Stopping continues without this screen."),
                ("cancel", "c  Back", "Watch the job end."),
            ]
        command = sanitize(self.controller.attach_command, self.glyphs)
        return [
            ("detach", "d  Detach", f"Training continues. Reattach: {command}"),
            ("stop", "s  Stop the job", sanitize(self.controller.stop_description, self.glyphs)),
            ("cancel", "c  Cancel", "Keep watching."),
        ]
