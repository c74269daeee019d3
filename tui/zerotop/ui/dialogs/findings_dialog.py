"""The feed: all findings as a list, and everything about the one chosen."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from zerotop.analysis.annotations import Annotation, Severity
from zerotop.ui.base import findings
from zerotop.ui.base.frame import Frame
from zerotop.ui.dialogs.dialog import Dialog
from zerotop.ui.drawing.formatting import clock
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import literal

_NOTHING = "Nothing was found yet that would need saying. Findings appear here as they become known."
_MARKS = {Severity.INFO: " ", Severity.WARNING: "!", Severity.ERROR: "!"}


class Feed(Dialog[Annotation]):
    """Returns the finding to go to, or None. Those after the cursor are there too, muted."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,a", "close", "Close", id="feed.close", tooltip="Back to the screen"),
    ]

    def __init__(self, frame: Frame, begin_ns: int, glyphs: Glyphs) -> None:
        super().__init__("Findings", glyphs, page=True)
        self.known = frame.known
        self.begin_ns = begin_ns
        self.cursor_ns = frame.view.cursor_ns
        self.here = len(frame.findings) - 1 if frame.told is None else frame.known.index(frame.told)

    def contents(self) -> ComposeResult:
        if not self.known:
            yield Static(Text(_NOTHING), id="text", markup=False)
            return
        yield OptionList(*(Option(self._line(finding)) for finding in self.known), id="list", markup=False)
        with VerticalScroll(id="detail"):
            yield Static(id="text", markup=False)

    def on_mount(self) -> None:
        if self.known:
            chosen = self.query_one(OptionList)
            chosen.focus()
            chosen.highlighted = max(0, self.here)
        self.call_after_refresh(self._tell)

    def on_resize(self) -> None:
        self.call_after_refresh(self._tell)

    def on_option_list_option_highlighted(self) -> None:
        self._tell()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self.known[event.option_index])

    def _line(self, finding: Annotation) -> Text:
        """When, in which step, what, and the sentence as far as there is room."""
        muted = finding.known_ns > self.cursor_ns
        colour = self._colour("muted" if muted else findings.style(finding))
        step = "" if finding.step is None else f"step {finding.step}"
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"{clock((finding.known_ns - self.begin_ns) / 1e9):>8}  ", self._colour("muted"))
        text.append(f"{step:<10}  ", self._colour("muted"))
        text.append(f"{_MARKS[finding.severity]} {findings.name(finding):<18}  ", colour)
        text.append(literal(findings.sentence(finding), self.glyphs), self._colour("muted") if muted else "")
        return text

    def _colour(self, style: str) -> str:
        variables = self.app.theme_variables
        names = {"accent": "primary", "warn": "warning", "alert": "error"}
        return variables[names.get(style, style)]

    def _tell(self) -> None:
        """Shows the highlighted one."""
        if not self.known or not self.is_mounted:
            return
        place = self.query_one(OptionList).highlighted
        if place is not None:
            width = self.query_one("#detail").size.width - 1
            self.query_one("#text", Static).update(self._detail(self.known[place], max(20, width)))

    def _detail(self, finding: Annotation, width: int) -> Text:
        text = Text()
        text.append(literal(findings.sentence(finding), self.glyphs))
        if finding.advice:
            text.append(f"\n\n{self.glyphs.arrow} ", self._colour("accent"))
            text.append(literal(findings.advice(finding), self.glyphs), "bold")
        text.append(f"\n\n{self._whose(finding)}\n", self._colour("muted"))
        for row in findings.evidence_rows(finding, width, self.glyphs):
            text.append(f"\n{row}", self._colour("muted"))
        return text

    def _whose(self, finding: Annotation) -> str:
        ranks = ", ".join(map(str, finding.ranks[:8])) + (self.glyphs.ellipsis if len(finding.ranks) > 8 else "")
        whose = f"{'rank' if len(finding.ranks) == 1 else 'ranks'} {ranks}, " if finding.ranks else ""
        return f"{whose}cause {finding.confidence * 100:.0f} % sure"
