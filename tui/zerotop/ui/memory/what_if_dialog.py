"""The what-if dialog: the recorded training at other settings, with its ledger, as ``zerotop what-if`` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import Key

from zerotop.analysis.sweeps.asked_setting import WhatIfAnswer
from zerotop.analysis.sweeps.baseline import Baseline
from zerotop.analysis.sweeps.what_if_verdict import (
    LedgerChange,
    describe_recorded,
    describe_time,
    judge_gpu,
    judge_host,
    list_ledger,
    name_steps,
)
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.base.frame_widget import RowWidget
from zerotop.ui.dialogs.dialog import Dialog
from zerotop.ui.drawing.formatting import MISSING, SizeUnit, choose_size_unit
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_height, fit_row, highlight_row
from zerotop.ui.drawing.table import Column, draw_rule, place_columns
from zerotop.ui.drawing.text import fit_text, wrap_text
from zerotop.ui.drawing.units import convert_sizes
from zerotop.ui.memory.what_if_settings import AskedSettings

_SETTINGS_WIDTH, _WIDE_SETTINGS_WIDTH, _GAP = 30, 36, 2
_WIDE = 100  # cells of the dialog
_FORMULA_WIDTH = 30
# The keys that the border names, in the longest form that fits.
_KEYS = (
    "{up}{down} choose  {left}{right} change  0-9 type a number  r as recorded  y copy the command  escape close",
    "{up}{down} choose  {left}{right} change  0-9 type  r reset  y copy  escape close",
    "{left}{right} change  escape close",
)


class WhatIfDialog(Dialog[None]):
    """Changes settings of the recorded training, and shows what they need."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("q,w,enter", "close", "what_if.close", "Close", "Back to the screen"),
        bind("up,k", "choose(-1)", "what_if.up", "Previous", "The setting above"),
        bind("down,j", "choose(1)", "what_if.down", "Next", "The setting below"),
        bind("left,h,minus", "change(-1)", "what_if.less", "Less", "The value before, or half of the number"),
        bind("right,l,plus", "change(1)", "what_if.more", "More", "The next value, or twice the number"),
        bind("r", "reset", "what_if.reset", "As recorded", "All settings as recorded"),
        bind("y", "copy", "what_if.copy", "Copy", "Copy the command that asks the same"),
    ]

    def __init__(self, base: Baseline, glyphs: Glyphs) -> None:
        steps = f", {name_steps(base.steps)}" if base.steps is not None else ""
        super().__init__(f"What if: {base.name}{steps}", glyphs)
        self.asked = AskedSettings(base)

    def compose_box(self) -> ComposeResult:
        yield WhatIfPanel(self.asked, self.glyphs, id="panel")

    def on_resize(self) -> None:
        self.call_after_refresh(self._name_keys)

    def _name_keys(self) -> None:
        box, glyphs = self.query_one("#box"), self.glyphs
        arrows = dict(zip(("up", "down", "left", "right"), glyphs.to_plain("↑↓←→"), strict=False))
        texts = [keys.format(**arrows) for keys in _KEYS]
        box.border_subtitle = next((text for text in texts if len(text) <= box.outer_size.width - 6), "")

    def action_choose(self, rows: int) -> None:
        self.asked.move(rows)
        self._show()

    def action_change(self, direction: int) -> None:
        self.asked.change(direction)
        self._show()

    def action_reset(self) -> None:
        self.asked.reset()
        self._show()

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self.asked.command)
        self.notify(f"Copied, if this terminal lets programs copy: {self.asked.command}", markup=False)

    def on_key(self, event: Key) -> None:
        """Type a number."""
        if event.key == "backspace":
            self.asked.erase_digit()
        elif not (event.character and event.character in "0123456789" and self.asked.type_digit(event.character)):
            return
        event.stop()
        self._show()

    def _show(self) -> None:
        self.query_one(WhatIfPanel).repaint()


class WhatIfPanel(RowWidget):
    """Verdicts, settings and ledger."""

    def __init__(self, asked: AskedSettings, glyphs: Glyphs, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._asked = asked

    def paint(self, width: int, height: int) -> list[Row]:
        return draw_what_if(self._asked, width, height, self.glyphs)


def draw_what_if(asked: AskedSettings, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw the verdicts, below them the settings with the ledger to their right, and the command at the bottom."""
    answer = asked.answer()
    rows: list[Row] = []
    for sentence, style in _list_verdicts(answer):
        lines = wrap_text(convert_sizes(sentence), width, 3, glyphs)
        rows += [fit_row(((glyphs.to_plain(line), style),), width, glyphs) for line in lines]
    rows.append(fit_row((), width, glyphs))
    room = max(0, height - len(rows) - 2)
    left = _WIDE_SETTINGS_WIDTH if width >= _WIDE else _SETTINGS_WIDTH
    right = max(0, width - left - _GAP)
    settings = fit_height(_draw_settings(asked, left, glyphs), left, room, glyphs)
    table = [] if isinstance(answer, str) else _draw_ledger(answer, right, room, glyphs)
    gap = (" " * _GAP, "text")
    rows += [(*setting, gap, *one) for setting, one in zip(settings, fit_height(table, right, room, glyphs), strict=True)]
    command = fit_row(((fit_text(asked.command, width, glyphs), "muted"),), width, glyphs)
    return fit_height(
        [fit_row(row, width, glyphs) for row in rows] + [fit_row((), width, glyphs), command], width, height, glyphs
    )


def _list_verdicts(answer: WhatIfAnswer | str) -> list[tuple[str, str]]:
    """Return the sentences and their styles."""
    if isinstance(answer, str):
        return [(answer, "alert")]
    styles = {True: "good", False: "alert", None: "text"}
    return [
        (judge_gpu(answer), styles[answer.fits]),
        *((sentence, "alert") for sentence in describe_recorded(answer)),
        (judge_host(answer), "alert" if answer.fits_host is False else "text"),
        (describe_time(answer), "text" if answer.time.rows else "muted"),
    ]


def _draw_settings(asked: AskedSettings, width: int, glyphs: Glyphs) -> list[Row]:
    rows = [draw_rule((("settings", "title"),), width, glyphs)]
    for index, option in enumerate(asked.options):
        value = asked.read_value(option)
        text = f"{value:,}" if isinstance(value, int) else value.replace("_", "+")
        name = f"{option.name:<14}"
        style = "text" if value == option.recorded else "value"
        row = fit_row(((name, "muted"), (fit_text(text, width - len(name), glyphs), style)), width, glyphs)
        rows.append(highlight_row(row) if index == asked.highlighted else row)
    return rows


def _draw_ledger(answer: WhatIfAnswer, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    lines = _merge_smallest(list(list_ledger(answer)), height - 1)
    unit = choose_size_unit(round(max(line.high for line in lines)))
    placed = place_columns(_build_columns(unit, glyphs), width)
    title = f"at the {answer.memory.moments[0].name}, {unit.name}"
    rows = [draw_rule(((title, "title"),), width, glyphs, placed)]
    return rows + [placed.draw_row(line, width, glyphs) for line in lines]


def _merge_smallest(lines: Sequence[LedgerChange], most: int) -> list[LedgerChange]:
    """Return at most this many rows: the smallest of the moment in one, before the sums."""
    rows, sums = [line for line in lines if not line.is_sum], [line for line in lines if line.is_sum]
    room = max(1, most - len(sums))
    if len(rows) <= room:
        return [*rows, *sums]
    by_size = sorted(rows, key=lambda line: -line.size)
    kept, others = by_size[: room - 1], by_size[room - 1 :]
    before, after = sum(line.before or 0.0 for line in others), sum(line.after for line in others)
    other = LedgerChange(f"{len(others)} other rows", before, after, after, after, "")
    return [*(line for line in rows if line in kept), other, *sums]


def _build_columns(unit: SizeUnit, glyphs: Glyphs) -> list[Column[LedgerChange]]:
    def draw_name(line: LedgerChange, width: int) -> Row:
        return ((fit_text(line.name, width, glyphs), "sum" if line.is_sum else "text"),)

    def draw_before(line: LedgerChange, width: int) -> Row:
        text = unit.format_bytes(round(line.before)) if line.before is not None else glyphs.to_plain(MISSING)
        return ((text.rjust(width), "text"),)

    def draw_after(line: LedgerChange, width: int) -> Row:
        changed = abs(line.difference) >= unit.size * 10**-unit.decimals
        return ((unit.format_bytes(round(line.after)).rjust(width), "value" if changed else "text"),)

    def draw_ends(line: LedgerChange, width: int) -> Row:
        ends = " to ".join(unit.format_bytes(round(end)).strip() for end in (line.low, line.high))
        return ((ends.rjust(width) if line.high > line.low else "", "muted"),)

    def draw_formula(line: LedgerChange, width: int) -> Row:
        return ((fit_text(glyphs.to_plain(line.formula), width, glyphs), "muted"),)

    return [
        Column("", 20, 9, draw_name, grows=True, left=True),
        Column("recorded", 8, 8, draw_before),
        Column("then", 8, 9, draw_after),
        Column("least to most", 16, 6, draw_ends),
        Column("", _FORMULA_WIDTH, 5, draw_formula, grows=True, left=True),
    ]
