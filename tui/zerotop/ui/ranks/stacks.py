"""The stacks of stuck ranks: a block for each place, first the one that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from zerotop.analysis.formatting import format_count
from zerotop.analysis.hangs.reader import Stillness
from zerotop.analysis.hangs.sentences import describe_odd, write_advice
from zerotop.analysis.hangs.standstill import StackGroup, Standstill
from zerotop.ui.drawing.formatting import format_rough_time
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import EMPTY, Row, fit_height, fit_row
from zerotop.ui.drawing.table import draw_rule, panel_title
from zerotop.ui.drawing.text import fit_text, sanitize, wrap_text
from zerotop_probe.recording.event_values import format_numbers

_COLUMN_WIDTH = 55  # from twice that, blocks stand side by side
_GAP = 3
_MOST_ROWS = 24  # of all blocks, unless the panel is enlarged
_MOST_RANKS = 24  # cells of the list of ranks


def count_stack_rows(found: Stillness, width: int, glyphs: Glyphs, *, with_sentences: bool) -> int:
    """Return the rows that all stacks need; ``with_sentences``: and the sentences about the problem."""
    heads = len(_draw_sentences(found.standstill, width, glyphs)) if with_sentences else 0
    columns = _choose_columns(found.standstill, width)
    blocks = [2 + len(_list_lines(group)) for group in found.standstill.groups]
    rows = sum(max(blocks[first : first + columns]) for first in range(0, len(blocks), columns))
    return 1 + heads + min(_MOST_ROWS, rows)


def draw_stacks(
    found: Stillness,
    cursor_ns: int,
    width: int,
    height: int,
    glyphs: Glyphs,
    *,
    with_sentences: bool,
    focused: bool = False,
) -> list[Row]:
    """Draw the stacks, or if space is short the job's own lines; ``with_sentences``: below sentences about the problem."""
    age_s = max(0.0, (cursor_ns - found.since_ns) / 1e9)
    title: Row = (*panel_title("Stacks", focused), (f"  nothing has moved for {format_rough_time(age_s)}", "muted"))
    rows = [draw_rule(title, width, glyphs)]
    if with_sentences:
        rows += _draw_sentences(found.standstill, width, glyphs)
    columns = _choose_columns(found.standstill, width)
    groups = found.standstill.groups
    lines = [groups[first : first + columns] for first in range(0, len(groups), columns)]
    room = height - len(rows)
    for number, part in enumerate(lines):
        # Those that follow get at least their heading and line.
        share = max(3, room - 3 * (len(lines) - number - 1))
        drawn = _draw_blocks(part, found.standstill, width, min(room, share), glyphs)
        rows += drawn
        room -= len(drawn)
    return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)


def copy_stacks(standstill: Standstill) -> str:
    """Return all stacks as text: a heading for each group of ranks, then its frames, the innermost first."""
    blocks = []
    for group in standstill.groups:
        lines = [f"ranks {format_numbers(group.ranks, ', ')}: {_describe_activity(group)}"]
        blocks.append("\n".join([*lines, *(f"  {line}" for line, _ in _list_lines(group))]))
    return "\n\n".join(blocks)


def _choose_columns(standstill: Standstill, width: int) -> int:
    return max(1, min(len(standstill.groups), (width + _GAP) // (_COLUMN_WIDTH + _GAP)))


def _draw_sentences(standstill: Standstill, width: int, glyphs: Glyphs) -> list[Row]:
    room = max(1, width - 3)
    said = describe_odd(standstill, 2 * room)
    rows: list[Row] = [
        ((f" {line}", "alert"),) for line in wrap_text(sanitize(f"{said[0].upper()}{said[1:]}.", glyphs), room, 2, glyphs)
    ]
    for number, line in enumerate(wrap_text(sanitize(write_advice(standstill), glyphs), room - 2, 2, glyphs)):
        rows.append(((f" {glyphs.arrow} " if not number else "   ", "accent"), (line, "value")))
    return [*rows, EMPTY]


def _draw_blocks(groups: Sequence[StackGroup], standstill: Standstill, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw blocks side by side, with an empty row under them if there is room."""
    columns = _choose_columns(standstill, width)
    size = (width - _GAP * (columns - 1)) // columns
    blocks = [_draw_block(group, size, height, glyphs, is_odd=group is standstill.odd) for group in groups]
    joined: list[Row] = []
    for parts in zip_longest(*blocks, fillvalue=EMPTY):
        row: Row = ()
        for number, part in enumerate(parts):
            row = (*row, (" " * _GAP, "text"), *fit_row(part, size, glyphs)) if number else fit_row(part, size, glyphs)
        joined.append(row)
    return [*joined, EMPTY][:height]


def _draw_block(group: StackGroup, width: int, height: int, glyphs: Glyphs, *, is_odd: bool) -> list[Row]:
    """Draw the ranks and their activity, then frames; if not all fit, the job's own lines are kept."""
    count = format_count(len(group.ranks), "rank")
    numbers = fit_text(format_numbers(group.ranks, ", "), _MOST_RANKS, glyphs, at_words=False)
    style = "alert" if is_odd else "warn" if not group.awaits_others else "title"
    mark = glyphs.prompt if is_odd else " "
    head: Row = ((f"{mark} ", "accent"), (count, style), (f"  {numbers}  ", "muted"), (_describe_activity(group), style))
    lines = _list_lines(group)
    room = max(0, height - 1)
    if len(lines) > room:
        own = [line for line in lines if line[1]] or lines
        lines = [line for line in lines if line in own[:room]]
    rows: list[Row] = [head]
    for text, is_own in lines:
        shown = fit_text(sanitize(text, glyphs), max(1, width - 4), glyphs, at_words=False)
        rows.append((("    ", "text"), (shown, "value" if is_own else "muted")))
    return rows


def _list_lines(group: StackGroup) -> list[tuple[str, bool]]:
    """Return the stack's lines, the innermost first, and whether each is the job's own."""
    if not group.stacks:
        return [(group.place, True)] if group.place else []
    stack = group.stacks[0].training
    call = [(f"{stack.call}()", False)] if stack.call else []
    return [*call, *((frame.place, frame.own) for frame in stack.frames)]


def _describe_activity(group: StackGroup) -> str:
    one = len(group.ranks) == 1
    if group.end is not None:
        number = group.end.signal_number
        return "ended" + (f" by signal {number}" if number else "")
    if group.wait is None:
        return "no stack: in C code that keeps Python from running"
    if group.awaits_others:
        return f"{'waits' if one else 'wait'} in {group.activity}"
    return f"in {group.activity}" if group.activity else "in its own code"
