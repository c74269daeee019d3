"""The post-mortem of a failed job: what happened, where, why, the numbers, the last seconds, and the likely fix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from zerotop.analysis.failures.end import ByteFigure, End
from zerotop.analysis.findings import Finding
from zerotop.analysis.reports.finding_costs import describe_earlier
from zerotop.recording.moments.host_memory import HostMemory
from zerotop.ui.base.findings import is_place
from zerotop.ui.drawing.formatting import SizeUnit, choose_size_unit, choose_time_unit, format_rough_time
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import draw_rule
from zerotop.ui.drawing.text import sanitize, wrap_text
from zerotop.ui.drawing.units import convert_sizes

_TITLES = {"memory": "Out of memory", "signal": "Killed", "error": "Failed"}
_LABEL_WIDTH = 24
_NUMBERS_WIDTH = _LABEL_WIDTH + 21
_TWO_COLUMNS_WIDTH = 110


def count_post_mortem_rows(
    failure: End, cursor_ns: int, width: int, most: int, glyphs: Glyphs, earlier: Finding | None = None
) -> int:
    """Return how many rows :func:`draw_post_mortem` would use, at most ``most``."""
    return min(most, len(_draw_rows(failure, cursor_ns, width, most, glyphs, earlier)))


def draw_post_mortem(
    failure: End, cursor_ns: int, width: int, height: int, glyphs: Glyphs, earlier: Finding | None = None
) -> list[Row]:
    """Draw the failure and the likely fix; with more room also the reason, then numbers, then the last seconds.

    ``earlier`` is an error from before it, such as ranks that hung until something ended them.
    """
    rows = _draw_rows(failure, cursor_ns, width, height, glyphs, earlier)[:height]
    return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)


def _draw_rows(failure: End, cursor_ns: int, width: int, most: int, glyphs: Glyphs, earlier: Finding | None) -> list[Row]:
    ago = max(0.0, (cursor_ns - failure.unix_ns) / 1e9)
    when = f" {format_rough_time(ago)} ago" if ago >= 1 else ""
    state = "" if failure.final else ", the job may still be running"
    title: Row = ((_TITLES[failure.kind], "alert"), (f"{when}{state}", "muted"))
    edge = 1 if width >= 60 else 0
    inner = width - 2 * edge
    is_wide = inner >= _TWO_COLUMNS_WIDTH and bool(failure.numbers)
    before = _draw_earlier(earlier, failure, inner, glyphs)
    room = most - 1 - len(before)
    sentences = _draw_sentences(failure, inner - _NUMBERS_WIDTH - 3 if is_wide else inner, room, glyphs)
    numbers = _draw_numbers(failure)
    rows = before + (_join_columns(sentences, numbers, inner, glyphs) if is_wide else [*sentences, *numbers])
    rows += _draw_last_seconds(failure, inner, most - 1 - len(rows), glyphs)
    heading = draw_rule((*title, (" ", "rule")), inner, glyphs)
    return [((" " * edge, "text"), *row) for row in (heading, *rows)]


def _draw_earlier(earlier: Finding | None, failure: End, width: int, glyphs: Glyphs) -> list[Row]:
    """Draw an error that began before the failure; nothing for one about the failure itself, or milder."""
    text = convert_sizes(describe_earlier(earlier, failure)) if earlier is not None else ""
    if not text:
        return []
    return [((line, "alert"),) for line in wrap_text(sanitize(text, glyphs), width, 2, glyphs)]


def _join_columns(sentences: Sequence[Row], numbers: Sequence[Row], width: int, glyphs: Glyphs) -> list[Row]:
    left_width, gap = width - _NUMBERS_WIDTH - 3, ("   ", "text")
    return [
        (*fit_row(left, left_width, glyphs), gap, *fit_row(right, _NUMBERS_WIDTH, glyphs))
        for left, right in zip_longest(sentences, numbers, fillvalue=())
    ]


def _draw_sentences(failure: End, width: int, most: int, glyphs: Glyphs) -> list[Row]:
    """Draw sentences about the failure, its place, its reason and the fix; the reason is cut if it does not fit."""
    what: list[Row] = [
        ((line, "alert"),) for line in wrap_text(sanitize(convert_sizes(failure.what), glyphs), width, 2, glyphs)
    ]
    advice = _draw_advice(failure, width, glyphs)
    where: list[Row] = [((line, "muted"),) for line in wrap_text(sanitize(failure.where, glyphs), width, 2, glyphs)]
    if len(what) + len(where) + len(advice) + 2 > most:
        where = []
    room = min(6, max(1, most - len(what) - len(where) - len(advice)))
    why: list[Row] = [
        ((line, "text"),) for line in wrap_text(sanitize(convert_sizes(failure.why), glyphs), width, room, glyphs)
    ]
    return [*what, *where, *why, *advice]


def find_fix(failure: End) -> str:
    """Return the fix to copy, "" if there is none."""
    return "" if is_place(failure.fix) else convert_sizes(failure.fix)


def _draw_advice(failure: End, width: int, glyphs: Glyphs) -> list[Row]:
    """Draw the advice with its setting highlighted."""
    lead = f"{glyphs.arrow} "
    rows: list[Row] = []
    for number, line in enumerate(wrap_text(sanitize(convert_sizes(failure.advice), glyphs), width - len(lead), 4, glyphs)):
        before, setting, after = line.partition(failure.setting) if failure.setting else (line, "", "")
        start = lead if not number else " " * len(lead)
        rows.append(((start, "accent"), (before, "value"), (setting, "accent"), (after, "value")))
    # "With this variable" needs the variable; advice on memory names its setting.
    fix = find_fix(failure)
    if fix and failure.memory is None and fix not in failure.advice:
        lines = wrap_text(sanitize(fix, glyphs), width - len(lead), 2, glyphs)
        rows += [((" " * len(lead), "text"), (line, "accent")) for line in lines]
    return rows


def _draw_numbers(failure: End) -> list[Row]:
    if not failure.numbers:
        return []
    unit = choose_size_unit(max(max(number.bytes, number.of_bytes or 0) for number in failure.numbers))
    return [_draw_number(number, unit) for number in failure.numbers]


def _draw_number(number: ByteFigure, unit: SizeUnit) -> Row:
    label = f"  {number.label}" if number.label.startswith("of which") else number.label
    of = f" of {unit.format_bytes(number.of_bytes).strip()}" if number.of_bytes is not None else ""
    is_request = number.label == "requested"
    figure = (unit.format_bytes(number.bytes), "alert" if is_request else "value")
    return ((label.ljust(_LABEL_WIDTH)[:_LABEL_WIDTH], "muted"), figure, (f"{of} {unit.name}", "muted"))


def _draw_last_seconds(failure: End, width: int, most: int, glyphs: Glyphs) -> list[Row]:
    rows: list[Row] = []
    if failure.spans:
        rows.append(_draw_phases(failure, width, glyphs))
    on_host = failure.memory is None or failure.memory.kind in ("host", "killed")
    if failure.host_memory and on_host:
        rows.append(draw_memory_strip(failure.host_memory, width, glyphs))
    if failure.last_words and failure.kind == "memory" and most > len(rows):
        lines = wrap_text(sanitize(failure.last_words, glyphs), width, min(3, most - len(rows)), glyphs)
        rows += [((line, "muted"),) for line in lines]
    return rows


def _draw_phases(failure: End, width: int, glyphs: Glyphs) -> Row:
    """Draw the last phases that fit, with a mark on the one that failed."""
    phases: list[Row] = []
    room = width - len("last phases")
    for span in reversed([span for span in failure.spans if not span.depth or span.failed]):
        unit, factor = choose_time_unit(span.seconds)
        text = f" {span.phase.replace('_', ' ')} {span.seconds * factor:.{0 if unit == 'ms' else 2}f} {unit}"
        mark = f"  {glyphs.find_sample(phase_style(span.phase))}"
        failed = f" {glyphs.skipped}" if span.failed else ""
        room -= len(mark) + len(text) + len(failed)
        if room < 0:
            break
        phases.append(((mark, phase_style(span.phase)), (text, "text"), (failed, "alert")))
    return (("last phases", "muted"), *(part for phase in reversed(phases) for part in phase))


def draw_memory_strip(samples: tuple[HostMemory, ...], width: int, glyphs: Glyphs) -> Row:
    """Draw the node's memory as a strip with a cell for each sample."""
    limit = max(sample.limit_bytes for sample in samples)
    unit = choose_size_unit(limit)
    last = samples[-1]
    figures = f" {unit.format_bytes(last.used_bytes).strip()} of {unit.format_bytes(limit).strip()} {unit.name} at the end"
    seconds = (last.unix_ns - samples[0].unix_ns) / 1e9
    label = f"host memory, last {seconds:.0f} s  "
    room = max(0, width - len(label) - len(figures))
    shown = samples[max(0, len(samples) - room) :] if room else ()
    levels = glyphs.levels
    # In a damaged recording the memory in use may exceed the limit.
    shares = (min(1.0, max(0.0, sample.used_bytes / max(1, limit))) for sample in shown)
    strip = "".join(levels[max(1, round(share * (len(levels) - 1)))] for share in shares)
    return ((label, "muted"), (strip, "memory-other"), (figures, "text"))
