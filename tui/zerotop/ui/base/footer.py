"""The bottom rows: what watching costs, where in time the screen looks, and the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerotop.analysis.formatting import called
from zerotop.analysis.live_view import Cost, LiveView
from zerotop.ui.drawing.formatting import clock, count, fixed, grouped, known, share
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import ending
from zerotop.ui.drawing.rows import Row, Span, both_ends, choose, filled, merged, row_width, spaced


@dataclass(frozen=True)
class Moment:
    """Where the screen looks, as the bottom row needs it. Times are seconds since the recording's begin."""

    at_s: float
    end_s: float
    live: bool  # somebody still writes
    following: bool  # at the end, and going along with it
    playing: bool
    speed: float
    marks: tuple[tuple[float, str], ...] = ()  # (when, style) of what was found, the weightiest last


@dataclass(frozen=True)
class Tab:
    """A screen among the others."""

    name: str
    title: str


def draw_tabs(
    tabs: Sequence[Tab], active: str, cost: Cost, fps: float, width: int, glyphs: Glyphs
) -> tuple[Row, list[tuple[int, int, str]]]:
    """(the row, where each tab lies: begin, end, action). What watching costs stands at the right, where there is room."""
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
    status = draw_status(cost, fps, room, glyphs) if room >= 8 else ()
    return both_ends(merged(spans), status, width, glyphs), places


def draw_status(cost: Cost, fps: float, width: int, glyphs: Glyphs) -> Row:
    """Cost of the probe, records and rate, what was lost, frames each second: what fits, at the right edge."""
    left: list[tuple[int, Row]] = []
    if known(cost.probe_us_per_step):
        probe = f"{fixed(cost.probe_us_per_step, 0, 3).strip()} {glyphs.micro}s/step"
        left.append((8, (("probe ", "muted"), (probe, "text"))))
        left.append((6, ((share(cost.probe_share), "text"), (" of the step", "muted"))))
    if cost.lost_records:
        left.append((9, ((f"{grouped(cost.lost_records)} {called(cost.lost_records, 'record')} lost", "alert"),)))
    if cost.errors:
        left.append((9, ((f"{grouped(cost.errors)} {called(cost.errors, 'probe error')}", "alert"),)))
    left.append((5, ((grouped(cost.records), "text"), (" records", "muted"))))
    if known(cost.records_per_s):
        left.append((4, ((count(cost.records_per_s).rjust(4), "text"), ("/s", "muted"))))
    right: Row = ((f"{fps:.0f}", "text"), (" fps ", "muted"))
    return spaced([*choose(left, width - row_width(right) - 3, 3), right], 3)


def draw_badge(view: LiveView, moment: Moment, glyphs: Glyphs) -> Row:
    """``● LIVE``, ``−0:42``, ``REPLAY 4×``, ``PAUSED``, ``ENDED 0``: now, or which past."""
    if moment.following:
        word, style = ending(view.job)
        if word:
            return ((f" {word} ", style),)
        return ((f" {glyphs.dot} LIVE ", "badge-live"),) if moment.live else ((" END ", "badge-past"),)
    behind = f"{glyphs.minus}{clock(moment.end_s - moment.at_s)} " if moment.live else ""
    if moment.playing:
        word = "" if moment.live else "REPLAY "
        return ((f" {glyphs.play} {word}{behind}{speed_text(moment.speed, glyphs)} ", "badge-past"),)
    return ((f" {glyphs.pause} PAUSED {behind}", "badge-past"),)


def speed_text(speed: float, glyphs: Glyphs) -> str:
    """``0.25×``, ``1×``, ``1000×``."""
    return f"{speed:g}{glyphs.times}"


def track(width: int, moment: Moment) -> tuple[int, int]:
    """(begin, length) in cells of the part of the transport row that stands for the recording's time."""
    length = max(0, width - _left_width(moment) - _right_width(moment))
    return _left_width(moment), length


def _left_width(moment: Moment) -> int:
    return 13 + len(clock(moment.end_s))


def _right_width(moment: Moment) -> int:
    return 3 + len(clock(moment.end_s))


def draw_transport(moment: Moment, width: int, glyphs: Glyphs) -> Row:
    """Play or pause, speed, time here, the track with a knob, the whole length."""
    _, length = track(width, moment)
    state = glyphs.play if moment.playing or (moment.following and moment.live) else glyphs.pause
    end = clock(moment.end_s)
    left: Row = (
        (f" {state.ljust(2)} ", "accent"),
        (("" if moment.following else speed_text(moment.speed, glyphs)).rjust(5), "text"),
        ("  ", "text"),
        (clock(moment.at_s).rjust(len(end)), "value"),
        ("  ", "text"),
    )
    if length < 6:
        return filled((*left, ("/ ", "muted"), (end, "muted")), width, glyphs)
    place = _place(moment.at_s, moment, length)
    bar: list[Span] = [(glyphs.track, "accent")] * place + [(glyphs.rest, "rule")] * (length - place)
    for at_s, style in moment.marks:
        bar[_place(at_s, moment, length)] = (glyphs.mark, style)
    bar[place] = (glyphs.knob, "value")
    return filled((*left, *merged(bar), ("  ", "text"), (end, "muted")), width, glyphs)


def _place(at_s: float, moment: Moment, length: int) -> int:
    """The cell of the track that stands for a time."""
    return round(min(1.0, max(0.0, at_s / moment.end_s if moment.end_s > 0 else 1.0)) * (length - 1))


@dataclass(frozen=True)
class Key:
    """One entry of the bottom row."""

    key: str
    word: str
    action: str
    importance: int
    pair: tuple[str, str] | None = None  # where the entry is of two keys: what each of them does


def draw_keys(keys: Sequence[Key], width: int, glyphs: Glyphs) -> tuple[Row, list[tuple[int, int, str]]]:
    """(the row, where each key lies: begin, end, action)."""
    kept = [replace(key, key=glyphs.plain(key.key)) for key in keys]
    while kept and sum(len(key.key) + len(key.word) + 3 for key in kept) > width - 1:
        kept.remove(min(reversed(kept), key=lambda key: key.importance))
    spans: list[Span] = [(" ", "keys")]
    places: list[tuple[int, int, str]] = []
    for key in kept:
        begin = row_width(spans)
        spans.extend([(key.key, "key"), (f" {key.word}", "keys"), ("  ", "keys")])
        if key.pair is not None:
            middle, end = begin + len(key.key) // 2, begin + len(key.key)
            places += [(begin, middle, key.pair[0]), (middle, end, key.pair[1])]
            begin = end
        places.append((begin, row_width(spans) - 2, key.action))
    return filled(merged(spans), width, glyphs, "keys"), places
