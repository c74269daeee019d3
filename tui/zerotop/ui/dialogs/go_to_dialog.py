"""The prompt that goes to a step or a time."""

from __future__ import annotations

import re

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import Input, Static

from zerotop.ui.dialogs.dialog import Dialog
from zerotop.ui.drawing.glyphs import Glyphs

Destination = tuple[str, int]  # ("step", number) or ("time", seconds since the begin)


def parse_destination(text: str) -> Destination | None:
    """``13`` is a step; ``1:30``, ``1:02:03``, ``90s``, ``5m``, ``2h`` are times since the begin.

    None: not understood.
    """
    text = text.strip().lower()
    if re.fullmatch(r"\d{1,15}", text):
        return "step", int(text)
    if match := re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6}):(\d{1,2})", text):
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return "time", hours * 3600 + minutes * 60 + seconds
    if match := re.fullmatch(r"(\d{1,9})\s*([smh])", text):
        return "time", int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
    return None


class GoToDialog(Dialog[Destination]):
    """Returns where to go, or None."""

    def __init__(self, last_step: int | None, glyphs: Glyphs) -> None:
        super().__init__("Go to", glyphs)
        self.last_step = last_step

    def compose_box(self) -> ComposeResult:
        steps = "no step is finished yet" if self.last_step is None else f"steps 0 to {self.last_step}"
        yield Static(Text(f"A step ({steps}), or a time since the begin such as 1:30."), id="text", markup=False)
        yield Input(id="place", select_on_focus=False)
        yield from self.compose_problem()

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        place = parse_destination(event.value)
        if place is not None:
            self.dismiss(place)
        elif event.value.strip():
            self.show_problem("Neither a step number nor a time.")
        else:
            self.dismiss(None)
