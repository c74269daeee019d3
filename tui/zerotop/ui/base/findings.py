"""The presentation of findings on screens: the one under the header, and their styles, names, numbers and marks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from zerotop.analysis.failures.end import End
from zerotop.analysis.findings import Finding, LinkedFinding, Severity, name_relation
from zerotop.analysis.formatting import format_percent
from zerotop.analysis.reports.finding_costs import FindingCost, is_about_end
from zerotop.ui.drawing.formatting import MISSING, format_duration, format_grouped, format_number, format_significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import cell_width, sanitize, wrap_text
from zerotop.ui.drawing.units import convert_sizes, get_units

MIN_CONFIDENCE = 0.5  # findings with less confidence are only in the feed
INFO_SHOWN_S = 60.0  # time that explanations stay under the header
FRESH_S = 600.0  # older warnings stay there, but in a muted style

_STYLES = {Severity.INFO: "accent", Severity.WARNING: "warn", Severity.ERROR: "alert"}
_WEIGHTS = {Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 2}
# Where a sentence may be cut and still be complete.
_BREAK = re.compile(r"(?=\. |; |: |, | \(| while )")


def choose_style(finding: Finding) -> str:
    """Return the style of its severity."""
    return _STYLES[finding.severity]


def format_name(finding: Finding) -> str:
    """Return its name as words: ``double spike``."""
    return finding.name.replace("_", " ")


def describe_finding(finding: Finding) -> str:
    """Return its headline, in the units that were chosen."""
    return convert_sizes(finding.headline)


def describe_with_name(finding: Finding) -> str:
    """Return ``double spike: GPUs idle ...``."""
    return f"{format_name(finding)}: {describe_finding(finding)}"


def is_place(fix: str) -> bool:
    """Whether a fix is only a line of a script, or nothing: it says where to look, and not what to do."""
    return re.fullmatch(r"|\S+:\d+", fix) is not None


def describe_step(finding: Finding) -> str:
    """Return ``begins in step 15``; "" if it has no step or its headline says the step."""
    is_said = re.search(rf"\bsteps? (\d+ and )?{finding.step}\b|\b{finding.step} steps?\b|\bin steps \d", finding.headline)
    return "" if finding.step is None or is_said else f"begins in step {finding.step}"


def describe_cause(effect: Finding, cause: Finding) -> str:
    """Return ``Because of: Rank 1 ...``, of the finding that explains another one."""
    return f"{name_relation(effect, cause)}: {describe_finding(cause)}"


def describe_details(finding: Finding) -> str:
    """Return the numbers behind it, in the units that were chosen."""
    return convert_sizes(finding.details)


def describe_advice(finding: Finding | End) -> str:
    """Return the advice and the text to copy, if the advice does not contain it."""
    advice, fix = convert_sizes(finding.advice), convert_sizes(finding.fix)
    if fix and fix.removeprefix("with ").removesuffix(":") in advice:
        return advice
    return f"{advice.removesuffix('.')}: {fix}" if advice and fix else advice or fix


def choose_finding(ranked: Iterable[FindingCost], cursor_ns: int, failure: End | None = None) -> Finding | None:
    """Return the finding for the line under the header: the costliest one; of equal ones the latest.

    A cause takes precedence over its effects, unless an effect is more severe. One about ``failure``, which is told there,
    comes after other errors and warnings, and before explanations.
    """
    if failure is not None:
        ranked = tuple(ranked)
        others = [
            cost for cost in ranked if cost.finding.severity is not Severity.INFO and not is_about_end(cost.finding, failure)
        ]
        ranked = others or ranked
    shown = [
        cost
        for cost in ranked
        if _is_certain(cost.finding)
        and not (cost.finding.severity is Severity.INFO and cursor_ns - cost.finding.known_ns > INFO_SHOWN_S * 1e9)
        and (cost.cause is None or _is_milder(cost.cause, cost.finding) or not _is_certain(cost.cause))
    ]
    best = min(shown, key=lambda cost: (cost.score, -cost.finding.known_ns), default=None)
    return best.finding if best is not None else None


def _is_certain(finding: Finding) -> bool:
    return finding.confidence >= MIN_CONFIDENCE


def _is_milder(finding: Finding, other: Finding) -> bool:
    return _WEIGHTS[finding.severity] < _WEIGHTS[other.severity]


def order_by_cost(findings: Sequence[LinkedFinding], ranked: Sequence[FindingCost]) -> tuple[LinkedFinding, ...]:
    """Return findings in the order of ``ranked``, each one after its cause.

    Findings that explain each other stay together, at the place of the costliest of them.
    """
    places = {(cost.finding.name, cost.finding.step): place for place, cost in enumerate(ranked)}

    def find_place(group: list[LinkedFinding]) -> int:
        return min(places.get((one.finding.name, one.finding.step), len(places)) for one in group)

    groups: list[list[LinkedFinding]] = []
    for linked in findings:
        if not linked.depth:
            groups.append([])
        groups[-1].append(linked)
    return tuple(linked for group in sorted(groups, key=find_place) for linked in group)


def choose_most_severe(findings: Iterable[Finding]) -> Finding | None:
    """Return the most severe of several findings that are marked at one place; None without any."""
    return max(filter(_is_certain, findings), key=lambda finding: _WEIGHTS[finding.severity], default=None)


def choose_sentence_style(finding: Finding, cursor_ns: int) -> str:
    """Return the style of its sentence under the header: calm for explanations and old warnings."""
    if finding.severity is Severity.INFO:
        return "text"
    fresh = cursor_ns - finding.detected_ns <= FRESH_S * 1e9
    return choose_style(finding) if fresh or finding.severity is Severity.ERROR else "muted"


@lru_cache(maxsize=64)
def wrap_sentence(sentence: str, width: int, max_lines: int, glyphs: Glyphs) -> Sequence[str]:
    """Return the sentence in at most ``max_lines`` lines; a longer one is cut at the end of a clause."""
    text = sanitize(sentence, glyphs)
    lines = wrap_text(text, width, max_lines + 1, glyphs)
    if len(lines) <= max_lines:
        return lines
    room = width * max_lines - len(glyphs.ellipsis)
    ends = {match.start() for match in _BREAK.finditer(text)}
    for end in sorted(ends, reverse=True):
        short = wrap_text(text[:end].rstrip(" ,;:.") + glyphs.ellipsis, width, max_lines + 1, glyphs)
        if room // 2 <= end <= room and len(short) <= max_lines and text[:end].count("(") == text[:end].count(")"):
            return short
    return wrap_text(text, width, max_lines, glyphs)


def find_step_marks(findings: Iterable[Finding]) -> dict[int, str]:
    """Map steps to the style of the most severe finding that begins in them."""
    best: dict[int, Finding] = {}
    for finding in findings:
        if finding.step is not None and finding.confidence >= MIN_CONFIDENCE:
            other = best.get(finding.step)
            if other is None or _WEIGHTS[finding.severity] > _WEIGHTS[other.severity]:
                best[finding.step] = finding
    return {step: choose_style(finding) for step, finding in best.items()}


def find_time_marks(findings: Iterable[Finding], begin_ns: int) -> tuple[tuple[float, str], ...]:
    """Return (seconds since the begin, style) of each finding, the most severe last, to be drawn over the others."""
    shown = sorted((f for f in findings if f.confidence >= MIN_CONFIDENCE), key=lambda finding: _WEIGHTS[finding.severity])
    return tuple(((finding.detected_ns - begin_ns) / 1e9, choose_style(finding)) for finding in shown)


def format_evidence(key: str, value: float) -> tuple[str, str]:
    """Return (name, formatted value) of a piece of evidence; the key's suffix names the unit."""
    suffix, format_value = next((entry for entry in _FORMATS if key.endswith(entry[0])), ("", _format_number))
    name = key.removesuffix(suffix).replace("_", " ") or "each step"
    return name, format_value(value) if math.isfinite(value) else MISSING


def _format_number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return format_grouped(int(value))
    return format_significant(value) if abs(value) < 1e15 else format_number(value)


def _format_size(value: float) -> str:
    _, mega, giga, _ = get_units().sizes
    unit = giga if abs(value) >= giga.bytes / 100 else mega
    return f"{value / unit.bytes:.2f} {unit.name}"


_FORMATS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("bytes_per_step", _format_size),
    ("_bytes_per_s", lambda value: f"{_format_size(value)}/s"),
    ("_bytes", _format_size),
    ("_percent", lambda value: f"{value:.0f} %"),
    ("_share", format_percent),
    ("_ms", lambda value: f"{value:.0f} ms"),
    ("_ns", lambda value: format_duration(value / 1e9)),
    ("_s", format_duration),
)


def format_evidence_rows(finding: Finding, width: int, glyphs: Glyphs) -> list[str]:
    """Return its numbers, name and value, in as many columns as fit in ``width``."""
    pairs = [format_evidence(key, value) for key, value in finding.evidence.items()]
    if not pairs:
        return []
    name_width, value_width = (max(cell_width(pair[part]) for pair in pairs) for part in (0, 1))
    columns = max(1, (width + 3) // (name_width + value_width + 4))
    entries = [f"{sanitize(key, glyphs):<{name_width}} {value:>{value_width}}" for key, value in pairs]
    return ["   ".join(entries[index : index + columns]) for index in range(0, len(entries), columns)]
