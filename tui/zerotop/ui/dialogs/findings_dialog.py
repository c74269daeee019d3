"""The list of all findings, with details of the chosen one."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from zerotop.analysis.findings import Finding, LinkedFinding, Severity, order_by_cause
from zerotop.ui.base import findings
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.base.frame import Frame
from zerotop.ui.dialogs.dialog import Dialog
from zerotop.ui.drawing.formatting import format_clock
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import sanitize
from zerotop.ui.drawing.units import convert_sizes

_NO_FINDINGS = "No findings yet. They appear here as they are detected."
# The keys that the border names, in the longest form that fits. {order} is the other order; y is named if there is a fix.
_COPY, _COPY_SHORT = "   y copy the fix", "  y copy"
_KEYS = (
    f"enter go there   / search   o {{order}}{_COPY}   escape close",
    f"enter go  / search  o {{order}}{_COPY_SHORT}  escape close",
    "/ search  o {order}  escape close",
    "escape close",
)
_MARKS = {Severity.INFO: " ", Severity.WARNING: "!", Severity.ERROR: "!"}


def _join_texts(linked: LinkedFinding) -> str:
    """Return all texts of a finding, in lower case, for the search."""
    finding = linked.finding
    texts = (findings.describe_finding(finding), findings.describe_details(finding), finding.advice, finding.fix)
    step = "" if finding.step is None else f"step {finding.step}"
    ranks = " ".join(f"rank {rank}" for rank in finding.ranks)
    return " ".join((findings.format_name(finding), step, ranks, *texts)).lower()


class FindingsDialog(Dialog[Finding]):
    """Returns the finding to go to, or None. Findings after the cursor are listed too, muted.

    A finding is listed below the one that explains it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("q,a", "close", "feed.close", "Close", "Back to the screen"),
        # With priority it is handled before the next key is: that one belongs to the search.
        bind("slash", "search", "feed.search", "Search", "Show only findings with these words", 3, priority=True),
        bind("o", "order", "feed.order", "Order", "In order of time, or by severity and cost", 2),
        bind("escape", "back", "feed.back", "Back", "Clear the search, or close"),
        bind("y", "copy_fix", "feed.copy", "Copy the fix", "Copy the setting or command of the chosen finding", 2),
    ]

    def __init__(self, frame: Frame, begin_ns: int, glyphs: Glyphs) -> None:
        super().__init__("Findings", glyphs, page=True)
        self.all_findings = order_by_cause(frame.all_findings)
        self.by_cost = findings.order_by_cost(self.all_findings, frame.ranked)
        self.is_by_cost = frame.summary is not None  # at the end of a job that has ended
        self.shown_findings = self.by_cost if self.is_by_cost else self.all_findings  # those with the searched words
        self.begin_ns = begin_ns
        self.cursor_ns = frame.view.cursor_ns
        self.is_over = frame.view.job.state.is_over
        places = [self._format_place(linked.finding) for linked in self.all_findings]
        self._time_width, self._step_width = (max((len(place[at]) for place in places), default=0) for at in (0, 1))
        current = frame.headline or (frame.findings[-1] if frame.findings else None)
        event = current.event if current is not None else None  # which may be told again later, with newer numbers
        self.current_index = next((at for at, linked in enumerate(self.shown_findings) if linked.finding.event == event), 0)

    def compose_box(self) -> ComposeResult:
        if not self.all_findings:
            yield Static(Text("No findings." if self.is_over else _NO_FINDINGS), id="text", markup=False)
            return
        yield Input(placeholder="words", id="search")
        yield OptionList(*(Option(self._format_line(linked)) for linked in self.shown_findings), id="list", markup=False)
        with VerticalScroll(id="detail"):
            yield Static(id="text", markup=False)

    def on_mount(self) -> None:
        if self.all_findings:
            self.query_one(Input).display = False
            chosen = self.query_one(OptionList)
            chosen.focus()
            chosen.highlighted = self.current_index
        self.call_after_refresh(self._show_all)

    def on_resize(self) -> None:
        self.call_after_refresh(self._show_all)

    def _show_all(self) -> None:
        self._show_border()
        self._show_detail()

    def _show_border(self) -> None:
        """Show the order of the findings, and the keys."""
        if self.all_findings and self.is_mounted:
            box = self.query_one("#box")
            box.border_title = f"{self.heading} {'by severity and cost' if self.is_by_cost else 'in order of time'}"
            texts = [keys.format(order="by time" if self.is_by_cost else "by cost") for keys in _KEYS]
            if not self._find_fix():
                texts = [text.replace(_COPY, "").replace(_COPY_SHORT, "") for text in texts]
            # Each side of its title has a corner, a line and a space.
            box.border_subtitle = next((text for text in texts if len(text) <= box.outer_size.width - 6), "")

    def on_option_list_option_highlighted(self) -> None:
        self._show_all()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self.shown_findings[event.option_index].finding)

    def action_search(self) -> None:
        """Type words to search for."""
        if self.all_findings:
            words = self.query_one(Input)
            words.display = True
            self.set_focus(words)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Let a / in the search be a character of it."""
        return action != "search" or not isinstance(self.focused, Input)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the findings that have all words, in their texts or numbers."""
        event.stop()
        self._list_findings(0)

    def _list_findings(self, index: int) -> None:
        """List the findings with the searched words again, and highlight one of them."""
        words = self.query_one(Input).value.lower().split()
        ordered = self.by_cost if self.is_by_cost else self.all_findings
        self.shown_findings = tuple(one for one in ordered if all(word in _join_texts(one) for word in words))
        listed = self.query_one(OptionList)
        listed.clear_options()
        listed.add_options([Option(self._format_line(linked)) for linked in self.shown_findings])
        listed.highlighted = index if self.shown_findings else None
        self._show_all()

    def action_order(self) -> None:
        """Show the first finding of the other order."""
        if self.all_findings:
            self.is_by_cost = not self.is_by_cost
            self._list_findings(0)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.query_one(OptionList).focus()

    def action_back(self) -> None:
        """Clear the search; without one close the list."""
        searches = self.query(Input)
        if not searches or not searches.first().display:
            self.action_close()
            return
        searches.first().value = ""
        searches.first().display = False
        self.query_one(OptionList).focus()

    def action_copy_fix(self) -> None:
        if fix := self._find_fix():
            self.app.copy_to_clipboard(fix)
        self.notify(f"Copied, if this terminal lets programs copy: {fix}" if fix else "This finding has nothing to copy.")

    def _find_fix(self) -> str:
        """Return the fix of the highlighted finding, or an empty string."""
        index = self.query_one(OptionList).highlighted if self.shown_findings else None
        return self.shown_findings[index].finding.fix if index is not None else ""

    def _format_line(self, linked: LinkedFinding) -> Text:
        """Return a line with time, step and as much of the headline as fits, indented below its cause."""
        finding = linked.finding
        muted = finding.detected_ns > self.cursor_ns
        colour = self._find_colour("muted" if muted else findings.choose_style(finding))
        time, step = self._format_place(finding)
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"{time:>{self._time_width}}  {step:<{self._step_width}}  ", self._find_colour("muted"))
        text.append(f"{_MARKS[finding.severity]} ", colour)
        if linked.depth:
            text.append(f"{'  ' * linked.depth}{self.glyphs.corner} ", self._find_colour("muted"))
        style = self._find_colour("muted") if muted else "" if finding.severity is Severity.INFO else colour
        text.append(sanitize(findings.describe_finding(finding), self.glyphs), style)
        return text

    def _format_place(self, finding: Finding) -> tuple[str, str]:
        """Return its time and step."""
        step = "" if finding.step is None else f"step {finding.step}"
        return format_clock((finding.detected_ns - self.begin_ns) / 1e9), step

    def _find_colour(self, style: str) -> str:
        variables = self.app.theme_variables
        names = {"accent": "primary", "warn": "warning", "alert": "error"}
        return variables[names.get(style, style)]

    def _show_detail(self) -> None:
        """Show the highlighted finding."""
        if not self.all_findings or not self.is_mounted:
            return
        index, detail = self.query_one(OptionList).highlighted, self.query_one("#text", Static)
        if not self.shown_findings:
            detail.update(Text(f"No matches for {sanitize(self.query_one(Input).value, self.glyphs)}."))
        elif index is not None:
            width = self.query_one("#detail").size.width - 1
            detail.update(self._describe_finding(self.shown_findings[index], max(20, width)))

    def _describe_finding(self, linked: LinkedFinding, width: int) -> Text:
        finding, text = linked.finding, Text()
        text.append(sanitize(findings.describe_finding(finding), self.glyphs), "bold")
        if linked.cause is not None:
            text.append(f"\n{sanitize(findings.describe_cause(linked.finding, linked.cause), self.glyphs)}.")
        if finding.details:
            text.append(f"\n{sanitize(findings.describe_details(finding), self.glyphs)}")
        if finding.advice:
            text.append(f"\n\n{self.glyphs.arrow} ", self._find_colour("accent"))
            text.append(sanitize(convert_sizes(finding.advice), self.glyphs))
        if finding.fix:
            text.append(f"\n  {sanitize(finding.fix, self.glyphs)}", f"bold {self._find_colour('accent')}")
        text.append(f"\n\n{self._describe_ranks(finding)}\n", self._find_colour("muted"))
        for row in findings.format_evidence_rows(finding, width, self.glyphs):
            text.append(f"\n{row}", self._find_colour("muted"))
        return text

    def _describe_ranks(self, finding: Finding) -> str:
        ranks = ", ".join(map(str, finding.ranks[:8])) + (self.glyphs.ellipsis if len(finding.ranks) > 8 else "")
        owner = f"{'rank' if len(finding.ranks) == 1 else 'ranks'} {ranks}, " if finding.ranks else ""
        doubt = "" if finding.confidence >= 0.8 else f", cause {finding.confidence * 100:.0f} % sure"
        return f"{owner}{findings.format_name(finding)}{doubt}"
