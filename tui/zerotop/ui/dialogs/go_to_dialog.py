"""The prompt that goes to a step or a time."""

from __future__ import annotations

import re

from textual.widgets import Input

from zerotop.ui.dialogs.dialog import Prompt
from zerotop.ui.drawing.formatting import format_clock
from zerotop.ui.drawing.glyphs import Glyphs

Destination = tuple[str, int]  # ("step", number), ("time", elapsed seconds) or ("end", 0)


_ENDS: dict[str, Destination] = {
    **dict.fromkeys(("end", "now", "last"), ("end", 0)),
    **dict.fromkeys(("begin", "start", "first"), ("time", 0)),
}


def parse_destination(text: str) -> Destination | None:
    """Parse ``13`` or ``step 13`` as a step; ``1:30``, ``1:02:03``, ``90s``, ``5m``, ``2h`` as elapsed times.

    ``begin`` and ``end`` are places, too. Returns None for any other text.
    """
    text = text.strip().lower()
    if text in _ENDS:
        return _ENDS[text]
    if match := re.fullmatch(r"(?:step\s*)?(\d{1,15})", text):
        return "step", int(match[1])
    if match := re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6}):(\d{1,2})", text):
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return "time", hours * 3600 + minutes * 60 + seconds
    if match := re.fullmatch(r"(\d{1,9})\s*([smh])", text):
        return "time", int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
    return None


class GoToDialog(Prompt[Destination]):
    """Returns where to go, or None."""

    def __init__(self, last_step: int | None, seconds: float, glyphs: Glyphs) -> None:
        """``seconds``: how long the recording is."""
        steps = "none finished" if last_step is None else f"0 to {last_step}"
        text = f"A step ({steps}) such as 12, an elapsed time such as 1:30, begin or end."
        super().__init__("Go to", text, glyphs)
        self.last_step, self.seconds = last_step, seconds

    def on_input_submitted(self, event: Input.Submitted) -> None:
        place = parse_destination(event.value)
        if place is not None and place[0] == "step" and self.last_step is not None and place[1] > self.last_step:
            self.show_problem(f"There is no step {place[1]}: the last one is {self.last_step}.")
        elif place is not None and place[0] == "time" and place[1] > self.seconds + 1:
            self.show_problem(f"There is no {format_clock(place[1])}: the recording ends at {format_clock(self.seconds)}.")
        elif place is not None:
            self.dismiss(place)
        elif event.value.strip():
            self.show_problem("Enter a step (12), a time (1:30), begin or end.")
        else:
            self.dismiss(None)
