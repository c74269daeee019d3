"""A figure that the job prints, whatever its name, became NaN or infinite after it had been finite, and stays so.

Figures that are NaN now and then, or from the first line on, are left out: a score of one class, a mean of nothing.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, SearchWindow, in_job
from zerotop.analysis.findings.support.links import Kinds, broke_with_loss
from zerotop.analysis.formatting import join_words
from zerotop.analysis.steps.logged_values import list_figures, name_step
from zerotop.recording.output.tail import LineFollower, PrintedLine

_KIND = FindingKind(
    name="figures_not_finite",
    confidence=0.9,
    headline="{names} became {word}[ {onset}]: {values:.0f} lines in a row",
    details="The job prints this. {finite:.0f} lines before had finite values, the last {before}[ ({label})].",
    advice=(
        "If the weights became NaN as well, nothing is trained any more: stop the job and go back to an earlier checkpoint."
        " To find the operation that makes it, as a division by zero or a logarithm of zero:"
    ),
    fix="torch.autograd.set_detect_anomaly(True)",
    superseded_by=(Kinds(broke_with_loss, "loss_not_finite"),),
)
_NOT_FINITE = re.compile(r"(?<![\w.])[-+]?(?:nan|inf(?:inity)?)(?!\w)", re.IGNORECASE)
_FIGURES = re.compile(r"\d[\d.e+-]*|\b(?:none|null|nan|inf(?:inity)?)\b")
# What is infinite where nothing is wrong.
_OF_TIME = re.compile(r"(?:^|[\W_])(?:eta|time|left|remaining|speed|best)(?:$|[\W_])", re.IGNORECASE)
# Earlier lines that are searched, and so many finite values in those of the same kind.
_LINES, _LEAST_FINITE = 400, 5
# So many lines in a row, or fewer if several figures of a line are NaN.
_LEAST_LINES, _LEAST_TOGETHER = 5, 3
_LONGEST_LINE = 2000
_MOST_KINDS = 50


class _Run(NamedTuple):
    """Figures of one name that are not finite, in lines of one kind."""

    first: PrintedLine
    label: str | None  # of the line before, which was finite
    before: float
    finite: int  # values before, all of those that are known
    values: tuple[float, ...]


class _Figures:
    """The last lines of the output, and the figures that are not finite now."""

    def __init__(self) -> None:
        self._lines = deque[PrintedLine](maxlen=_LINES)
        self._runs: dict[str, dict[str, _Run | None]] = {}  # by kind of line and name; None: not to be told

    def add(self, line: PrintedLine) -> dict[str, _Run]:
        """Return what is to be told with a line."""
        text = line.text[:_LONGEST_LINE]
        has_broken = _NOT_FINITE.search(text) is not None
        due: dict[str, _Run] = {}
        if has_broken or self._runs:
            kind = _find_kind(text)
            if kind in self._runs or (has_broken and len(self._runs) < _MOST_KINDS):
                due = self._follow(kind, line, list_figures(text))
        self._lines.append(line)
        return due

    def _follow(self, kind: str, line: PrintedLine, figures: dict[str, float]) -> dict[str, _Run]:
        runs = self._runs.setdefault(kind, {})
        for name, value in figures.items():
            if not math.isfinite(value) and name not in runs:
                runs[name] = self._begin(kind, name, line)
            run = runs.get(name)
            if run is not None:  # one that ends is none that stays
                runs[name] = None if math.isfinite(value) else run._replace(values=(*run.values, value)[-_LEAST_LINES:])
        known = {name: run for name, run in runs.items() if run is not None and name in figures}
        together = [run for run in known.values() if len(run.values) >= _LEAST_TOGETHER]
        least = _LEAST_TOGETHER if len(together) > 1 else _LEAST_LINES
        due = {name: run for name, run in known.items() if len(run.values) >= least}
        runs.update(dict.fromkeys(due))
        return due

    def _begin(self, kind: str, name: str, line: PrintedLine) -> _Run | None:
        if _OF_TIME.search(name):
            return None
        alike = [one for one in self._lines if _find_kind(one.text[:_LONGEST_LINE]) == kind]
        values = [figures[name] for one in alike if name in (figures := list_figures(one.text[:_LONGEST_LINE]))]
        if len(values) < _LEAST_FINITE or not all(map(math.isfinite, values)):
            return None
        return _Run(line, name_step(alike[-1].text), values[-1], len(values), ())


@in_job(kinds=None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding]:
    """Report the first figures that stay not finite; a loss has a finding of its own."""
    follower, figures = window.keep(LineFollower), window.keep(_Figures)  # each line of the output is read once
    for lines in follower.read_new(window.recording.at):
        for line in lines:
            due = figures.add(line)
            if due and not window.count_reports(_KIND):
                yield _build_finding(window.recording, due, line.time_ns)


def _build_finding(recording: Evidence, due: dict[str, _Run], known_ns: int) -> Finding:
    first = next(iter(due.values()))
    group = next((one for one in reversed(recording.groups) if one.lead.source.created_ns <= first.first.time_ns), None)
    words = {"NaN" if math.isnan(value) else "infinite" for run in due.values() for value in run.values}
    label = name_step(first.first.text)
    onset = f"between {first.label} and {label}" if label and first.label else None
    evidence = {"values": len(first.values), "finite": first.finite}
    return _KIND.at(
        group,
        first.first.time_ns,
        known_ns,
        evidence,
        names=join_words([f"'{name}'" for name in due][:3]),
        word=words.pop() if len(words) == 1 else "NaN or infinite",
        onset=onset,
        label=first.label,
        before=" and ".join(f"{run.before:.4g}" for run in list(due.values())[:3]),
    )


def _find_kind(text: str) -> str:
    return re.sub(r"[^a-z]+", " ", _FIGURES.sub(" ", text.lower()))
