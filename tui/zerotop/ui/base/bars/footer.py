"""The bottom rows: tabs and status, the transport row with the seek bar, and the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerotop.analysis.formatting import pluralize
from zerotop.analysis.live_view import Cost, LiveView
from zerotop.ui.drawing.formatting import format_clock, format_fixed, format_grouped, format_share, is_known
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import format_ending
from zerotop.ui.drawing.rows import Row, Span, align_ends, choose_items, fit_row, join_rows, merge_spans, row_width

_NOTABLE_SHARE = 0.01  # of the time, that watching costs: coloured


@dataclass(frozen=True)
class CursorState:
    """The cursor and the playback state. Times are seconds since the recording began."""

    cursor_s: float
    end_s: float
    is_live: bool  # the recording still grows
    is_following: bool  # at the end, and moving with it
    is_playing: bool
    speed: float
    marks: tuple[tuple[float, str], ...] = ()  # (time, style) of findings, the most severe last


@dataclass(frozen=True)
class Tab:
    """A screen's entry in the tab row."""

    name: str
    title: str


def draw_tabs(
    tabs: Sequence[Tab], active: str, cost: Cost, width: int, glyphs: Glyphs
) -> tuple[Row, list[tuple[int, int, str]]]:
    """Return the row, and the clickable parts: begin, end, action. The status stands at the right if it fits."""
    titles = [tab.title for tab in tabs]
    if sum(len(title) + 4 for title in titles) > width:
        titles = [tab.title if tab.name == active else "" for tab in tabs]
    spans: list[Span] = [(" ", "text")]
    places: list[tuple[int, int, str]] = []
    for number, (tab, title) in enumerate(zip(tabs, titles, strict=True), 1):
        begin = row_width(spans)
        key, word = ("tab-active", "tab-active") if tab.name == active else ("tab-key", "tab")
        spans.extend([(f"{number}", key), (f" {title}" if title else "", word), ("  ", "text")])
        places.append((begin, row_width(spans) - 2, f"app.switch('{tab.name}')"))
    room = width - row_width(spans) - 1
    status = draw_status(cost, room) if room >= 8 else ()
    return align_ends(merge_spans(spans), status, width, glyphs), places


def draw_status(cost: Cost, width: int) -> Row:
    """Draw the probe's cost, lost records and errors, as far as they fit."""
    left: list[tuple[int, Row]] = []
    if is_known(cost.probe_share):
        style = "warn" if cost.probe_share >= _NOTABLE_SHARE else "text"
        left.append((8, (("watching costs ", "muted"), (format_share(cost.probe_share), style))))
    if is_known(cost.one_time_s) and cost.one_time_s >= 0.05:
        left.append((3, ((f"{format_fixed(cost.one_time_s, 1, 3).strip()} s", "text"), (" once", "muted"))))
    if cost.lost_records:
        left.append((9, ((f"{format_grouped(cost.lost_records)} {pluralize(cost.lost_records, 'record')} lost", "alert"),)))
    if cost.errors:
        left.append((9, ((f"{format_grouped(cost.errors)} {pluralize(cost.errors, 'probe error')}", "alert"),)))
    return (*join_rows(choose_items(left, width - 1, 3), 3), (" ", "text"))


def draw_badge(view: LiveView, moment: CursorState, glyphs: Glyphs) -> Row:
    """Draw whether this is the present: ``● LIVE``, ``−0:42``, ``REPLAY 4×``, ``PAUSED``, ``EXIT 0``."""
    if moment.is_following:
        word, style = format_ending(view.job)
        if word:
            return ((f" {word} ", style),)
        return ((f" {glyphs.dot} LIVE ", "badge-live"),) if moment.is_live else ((" END ", "badge-past"),)
    behind = f"{glyphs.minus}{format_clock(moment.end_s - moment.cursor_s)} " if moment.is_live else ""
    if moment.is_playing:
        word = "" if moment.is_live else "REPLAY "
        return ((f" {glyphs.play} {word}{behind}{format_speed(moment.speed, glyphs)} ", "badge-past"),)
    return ((f" {glyphs.pause} PAUSED {behind}", "badge-past"),)


def format_speed(speed: float, glyphs: Glyphs) -> str:
    """Format a speed: ``0.25×``, ``1×``, ``1000×``."""
    return f"{speed:g}{glyphs.times}"


def measure_track(width: int, moment: CursorState) -> tuple[int, int]:
    """Return (begin, length) of the seek bar in cells."""
    length = max(0, width - _left_width(moment) - 3 - len(format_clock(moment.end_s)))
    return _left_width(moment), length


def _left_width(moment: CursorState) -> int:
    return 13 + len(format_clock(moment.end_s))


def draw_transport(moment: CursorState, width: int, glyphs: Glyphs) -> Row:
    """Draw the playback state, speed, cursor time, seek bar and length."""
    _, length = measure_track(width, moment)
    state = glyphs.play if moment.is_playing or (moment.is_following and moment.is_live) else glyphs.pause
    end = format_clock(moment.end_s)
    left: Row = (
        (f" {state.ljust(2)} ", "accent"),
        (("" if moment.is_following else format_speed(moment.speed, glyphs)).rjust(5), "text"),
        ("  ", "text"),
        (format_clock(moment.cursor_s).rjust(len(end)), "value"),
        ("  ", "text"),
    )
    if length < 6:
        return fit_row((*left, ("/ ", "muted"), (end, "muted")), width, glyphs)
    place = find_track_cell(moment.cursor_s, moment, length)
    bar: list[Span] = [(glyphs.track, "accent")] * place + [(glyphs.rest, "rule")] * (length - place)
    for at_s, style in moment.marks:
        bar[find_track_cell(at_s, moment, length)] = (glyphs.mark, style)
    bar[place] = (glyphs.knob, "value")
    return fit_row((*left, *merge_spans(bar), ("  ", "text"), (end, "muted")), width, glyphs)


def find_track_cell(at_s: float, moment: CursorState, length: int) -> int:
    """Return the cell of the seek bar for a time."""
    return round(min(1.0, max(0.0, at_s / moment.end_s if moment.end_s > 0 else 1.0)) * (length - 1))


@dataclass(frozen=True)
class Key:
    """An entry of the footer: one key, or two that belong together."""

    id: str
    keys: tuple[str, ...]
    label: str
    importance: int
    actions: tuple[str, ...]  # one a key
    label_action: str


def draw_keys(keys: Sequence[Key], width: int, glyphs: Glyphs) -> tuple[Row, list[tuple[int, int, str]]]:
    """Return the row, and the clickable parts: begin, end, action. The least important keys are left out."""
    kept = [replace(key, keys=tuple(map(glyphs.to_plain, key.keys))) for key in keys]
    while kept and sum(len("".join(key.keys)) + len(key.label) + 3 for key in kept) > width - 1:
        kept.remove(min(reversed(kept), key=lambda key: key.importance))
    spans: list[Span] = [(" ", "keys")]
    boxes: list[tuple[int, int, str]] = []
    for key in kept:
        begin = row_width(spans)
        spans.extend([("".join(key.keys), "key"), (f" {key.label}", "keys"), ("  ", "keys")])
        if len(key.keys) > 1:
            for text, action in zip(key.keys, key.actions, strict=True):
                boxes.append((begin, begin + len(text), action))
                begin += len(text)
        boxes.append((begin, row_width(spans) - 2, key.label_action))
    return fit_row(merge_spans(spans), width, glyphs, "keys"), boxes
