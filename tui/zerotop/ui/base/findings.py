"""Findings as screens show them: which one is said under the header, its colour, its name, its numbers, its marks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from zerotop.analysis.annotations import Annotation, Severity
from zerotop.ui.drawing.formatting import MISSING, format_duration, format_grouped, format_number, format_significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import cell_width, sanitize, wrap_text
from zerotop.ui.drawing.units import convert_sizes, get_units

MIN_CONFIDENCE = 0.5  # findings less sure than this are only in the feed
INFO_SHOWN_S = 60.0  # what only explains is said for so long
FRESH_S = 600.0  # what was found longer ago than this stays, but no longer in colour

_STYLES = {Severity.INFO: "accent", Severity.WARNING: "warn", Severity.ERROR: "alert"}
_WEIGHTS = {Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 2}
# Where a sentence may end early, so that what is left of it is still one.
_BREAKS = (". ", "; ", ": ", ", ", " (", " while ")


def choose_style(finding: Annotation) -> str:
    """Its colour: of what it asks for."""
    return _STYLES[finding.severity]


def format_name(finding: Annotation) -> str:
    """``double spike``."""
    return finding.name.replace("_", " ")


def describe_finding(finding: Annotation) -> str:
    """What happened, in the units that were chosen."""
    return convert_sizes(finding.sentence)


def describe_with_name(finding: Annotation) -> str:
    """``double spike: The optimizer ...``."""
    return f"{format_name(finding)}: {describe_finding(finding)}"


def describe_advice(finding: Annotation) -> str:
    """What to do about it."""
    return convert_sizes(finding.advice)


def choose_finding(findings: Sequence[Annotation], cursor_ns: int) -> Annotation | None:
    """The one to say: the last failure, else the last warning, else what was explained a moment ago."""
    best: Annotation | None = None
    for finding in findings:
        passing = finding.severity is Severity.INFO and cursor_ns - finding.known_ns > INFO_SHOWN_S * 1e9
        if finding.confidence < MIN_CONFIDENCE or passing:
            continue
        if best is None or _WEIGHTS[finding.severity] >= _WEIGHTS[best.severity]:
            best = finding
    return best


def choose_sentence_style(finding: Annotation, cursor_ns: int) -> str:
    """The colour of its sentence under the header: calm for what explains, and for what is long known."""
    if finding.severity is Severity.INFO:
        return "text"
    fresh = cursor_ns - finding.known_ns <= FRESH_S * 1e9
    return choose_style(finding) if fresh or finding.severity is Severity.ERROR else "muted"


@lru_cache(maxsize=64)
def wrap_sentence(sentence: str, width: int, max_lines: int, glyphs: Glyphs) -> Sequence[str]:
    """The sentence in at most ``most`` lines; where it is longer, up to the end of a part of it."""
    text = sanitize(sentence, glyphs)
    lines = wrap_text(text, width, max_lines + 1, glyphs)
    if len(lines) <= max_lines:
        return lines
    room = width * max_lines - len(glyphs.ellipsis)
    for end in sorted((place for part in _BREAKS for place in _find_positions(text, part)), reverse=True):
        short = wrap_text(text[:end].rstrip(" ,;:.") + glyphs.ellipsis, width, max_lines + 1, glyphs)
        if room // 2 <= end <= room and len(short) <= max_lines and text[:end].count("(") == text[:end].count(")"):
            return short
    return wrap_text(text, width, max_lines, glyphs)


def _find_positions(text: str, part: str) -> list[int]:
    found, at = [], text.find(part)
    while at >= 0:
        found.append(at)
        at = text.find(part, at + 1)
    return found


def find_step_marks(findings: Iterable[Annotation]) -> dict[int, str]:
    """Step -> style of the weightiest finding that begins in it."""
    best: dict[int, Annotation] = {}
    for finding in findings:
        if finding.step is not None and finding.confidence >= MIN_CONFIDENCE:
            other = best.get(finding.step)
            if other is None or _WEIGHTS[finding.severity] > _WEIGHTS[other.severity]:
                best[finding.step] = finding
    return {step: choose_style(finding) for step, finding in best.items()}


def find_time_marks(findings: Iterable[Annotation], begin_ns: int) -> tuple[tuple[float, str], ...]:
    """(seconds since the begin, style) of each, the weightiest last, so that they are drawn over others."""
    kept = sorted((f for f in findings if f.confidence >= MIN_CONFIDENCE), key=lambda finding: _WEIGHTS[finding.severity])
    return tuple(((finding.known_ns - begin_ns) / 1e9, choose_style(finding)) for finding in kept)


def format_evidence(key: str, value: float) -> tuple[str, str]:
    """(name, value) of a piece of evidence in units for people; the key's end says what it is in."""
    end, shown = next(((end, shown) for end, shown in _FORMATS if key.endswith(end)), ("", _format_number))
    return key.removesuffix(end).replace("_", " "), shown(value) if math.isfinite(value) else MISSING


def _format_number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return format_grouped(int(value))
    return format_significant(value) if abs(value) < 1e15 else format_number(value)


def _format_size(value: float) -> str:
    _, mega, giga, _ = get_units().sizes
    unit = giga if abs(value) >= giga.bytes / 100 else mega
    return f"{value / unit.bytes:.2f} {unit.name}"


_FORMATS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_bytes_per_s", lambda value: f"{_format_size(value)}/s"),
    ("_bytes", _format_size),
    ("_percent", lambda value: f"{value:.0f} %"),
    ("_share", lambda value: f"{value * 100:.0f} %"),
    ("_ms", lambda value: f"{value:.0f} ms"),
    ("_ns", lambda value: format_duration(value / 1e9)),
    ("_s", format_duration),
)


def format_evidence_rows(finding: Annotation, width: int, glyphs: Glyphs) -> list[str]:
    """Its numbers, name and value, in as many columns as fit in ``width``."""
    pairs = [format_evidence(key, value) for key, value in finding.evidence.items()]
    if not pairs:
        return []
    names, values = (max(cell_width(pair[place]) for pair in pairs) for place in (0, 1))
    columns = max(1, (width + 3) // (names + values + 4))
    entries = [f"{sanitize(key, glyphs):<{names}} {value:>{values}}" for key, value in pairs]
    return ["   ".join(entries[at : at + columns]) for at in range(0, len(entries), columns)]
