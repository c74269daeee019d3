"""Leaving while a job runs: detach, stop, or stay. Stopping shows its progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from zerotop.ui.base.interfaces import Controller, Leaving
from zerotop.ui.dialogs.dialog import Dialog
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import literal

Choice = tuple[str, str, str]  # id, key and word, explanation


class LeaveDialog(Dialog[Leaving]):
    """Returns how to leave, or None to stay. It learns from ``note_job`` when the job has ended."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "choose('detach')", "Detach", id="leave.detach", tooltip="Leave; training goes on"),
        Binding("s", "choose('stop')", "Stop", id="leave.stop", tooltip="Ask the job to end; again: kill it"),
        Binding("c", "close", "Cancel", id="leave.cancel", tooltip="Back to the screen"),
        Binding("l,q", "again", "Leave", id="leave.again", tooltip="Leave without harming the job"),
    ]

    def __init__(self, controller: Controller, glyphs: Glyphs, clock: Callable[[], float]) -> None:
        super().__init__("Leave", glyphs)
        self.controller = controller
        self._clock = clock
        self.asked = 0  # how often the job was asked to stop
        self._asked_at = 0.0
        self._over = False

    def contents(self) -> ComposeResult:
        yield Static(id="text", markup=False)
        yield OptionList(id="choices", markup=False)
        yield from self.problem()

    def on_mount(self) -> None:
        self._show()
        self.query_one(OptionList).focus()

    def note_job(self, live: bool) -> None:
        """Called for every frame while the dialog is open; one may come while it is being taken away."""
        if not self.query("#text"):
            return
        if not live and not self._over:
            self._over = True
            self._show()
        elif self.asked:
            self._explain()

    def action_again(self) -> None:
        """Leaving keys pressed once more choose what harms nothing."""
        self.dismiss(self._leaving())

    def action_choose(self, choice: str) -> None:
        if choice == "stop" and not self._over:
            self._stop()
        elif choice in ("detach", "leave"):
            self.dismiss(self._leaving())
        elif choice == "cancel":
            self.dismiss(None)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.action_choose(event.option_id or "cancel")

    def _leaving(self) -> Leaving:
        if self._over:
            return Leaving.STOPPED if self.asked else Leaving.QUIT
        return Leaving.DETACHED

    def _stop(self) -> None:
        self.asked += 1
        self._asked_at = self._clock()
        self._show()
        self.run_worker(self._ask())

    async def _ask(self) -> None:
        """Beside everything else: nodes that are not reached answer late. Who leaves meanwhile has asked all the same."""
        try:
            said = await asyncio.to_thread(self.controller.stop)
        except OSError as error:
            said = f"The job cannot be stopped: {error}"
            self.asked -= 1
            self._show()
        if said:
            self.tell(said)

    def _show(self) -> None:
        self._explain()
        choices = self.query_one(OptionList)
        choices.clear_options()
        for identity, title, meaning in self._choices():
            text = Text()
            text.append(title + "\n", "bold")
            text.append("   " + self.glyphs.plain(meaning))
            choices.add_option(Option(text, id=identity))
        choices.highlighted = 0

    def _explain(self) -> None:
        self.query_one("#text", Static).update(Text(self.glyphs.plain(self._sentence())))

    def _sentence(self) -> str:
        if self._over:
            return "The job has ended."
        if not self.asked:
            return "The job is still running."
        seconds = int(self._clock() - self._asked_at)
        if self.asked == 1:
            return f"Stopping: the job was asked to end {seconds} s ago and may be saving its work …"
        return f"Stopping hard: the job's processes are being killed, {seconds} s …"

    def _choices(self) -> list[Choice]:
        if self._over:
            return [
                ("leave", "l  Leave", "The recording stays; zerotop replay shows it again."),
                ("cancel", "c  Stay", "Look at how it went."),
            ]
        if self.asked:
            return [
                ("stop", "s  Kill it now", "Ends the job hard. What it has not saved is lost."),
                ("detach", "d  Leave now", "Stopping goes on without this screen."),
                ("cancel", "c  Back", "Watch it end."),
            ]
        back = literal(self.controller.attach_command, self.glyphs)
        return [
            ("detach", "d  Detach", f"Training goes on. Come back with: {back}"),
            ("stop", "s  Stop the job", literal(self.controller.stop_means, self.glyphs)),
            ("cancel", "c  Cancel", "Go on watching."),
        ]
