"""The threads screen: a rank's cores and runnable threads over time, and below, over the same time, each of its threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from zerotop.analysis.formatting import format_count
from zerotop.analysis.processes.cores import Cores
from zerotop.analysis.ranks.threads import RankThreads, Thread, ThreadGroup
from zerotop.analysis.stats.medians import round_count_up
from zerotop.analysis.text_tables import format_tsv
from zerotop.analysis.views.history import PIECE_NS
from zerotop.ui.charts import AXIS_WIDTH, GrowingScales
from zerotop.ui.charts.strips import draw_strip
from zerotop.ui.drawing.formatting import format_clock, format_fixed, is_known
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import Column, PlacedColumns, draw_rule, panel_title, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.threads.chart import draw_chart, resample_columns
from zerotop.ui.threads.phase_means import has_phase_means
from zerotop_probe.recording.event_values import format_numbers

_WINDOW_PIECES = 120  # half seconds shown at least
_MIN_HEIGHT_WITH_CHART = 12  # with fewer rows there is no chart
_MIN_CHART_ROWS, _MAX_CHART_ROWS = 5, 24
_MAX_HISTORY_ROWS = 4  # of one history
_MIN_OPENED = 4  # threads per name that must fit for groups to open by themselves


@dataclass(frozen=True, slots=True)
class TableLine:
    """A row of the table: a group of threads, one of its threads, or a group of one."""

    group: ThreadGroup
    thread: Thread | None = None  # None: the whole group
    is_open: bool = False  # the threads of the group follow
    has_nodes: bool = False  # whether the host has several NUMA nodes
    history: Row = ()  # its highest row

    @property
    def item(self) -> ThreadGroup | Thread:
        return self.thread if self.thread is not None else self.group


class ListState(NamedTuple):
    """What the user has opened and scrolled to."""

    opened: Collection[str] | None = None  # names whose threads are listed; None: as many as fit
    top: int = 0  # the first visible row of the table; it becomes the last possible one if it is beyond that


class ThreadRows(NamedTuple):
    """The rows of the panel, and the threads in them."""

    rows: list[Row]
    top: int  # the first visible row of the table
    lines: dict[int, TableLine]  # by row of the panel
    chart_rows: range
    columns: range  # cells of the chart and the histories

    def describe_cell(self, threads: RankThreads, recording_begin_s: float, x: int, y: int, glyphs: Glyphs) -> str:
        """Return the values at a cell of the chart or of a history; empty beside them."""
        if x not in self.columns:
            return ""
        place = self.columns.index(x)
        at = format_clock(
            threads.begin_s + (threads.end_s - threads.begin_s) * place / len(self.columns) - recording_begin_s
        )
        if y in self.chart_rows:
            size = len(self.columns)
            used, runnable = (
                resample_columns(threads, values, size)[place] for values in (threads.cores_used, threads.runnable)
            )
            phase = f" in {phase_word(threads.phases[place], glyphs)}" if threads.phases[place] else ""
            return f"{at}: {used:.1f} cores used, {runnable:.1f} runnable{phase}" if is_known(used) else ""
        line = self.lines.get(y)
        value = float(line.item.cores_history[place]) if line is not None else math.nan
        return f"{at}: {line.item.name} {value:.1f} cores" if line is not None and is_known(value) else ""


DrawCell = Callable[[TableLine, int], Row]


def measure_history(width: int, length_ns: int, *, nodes: int, bound: bool) -> tuple[int, int]:
    """Return (cells, nanoseconds per cell) of the histories in a panel of this width.

    ``length_ns`` is for how long there is something to show; a short time fills all cells.
    """
    columns = _layout_columns(width, lambda line, size: (), lambda line, size: (), nodes=nodes, bound=bound).columns
    size = next(size for column, _, size in columns if column.grows)
    cell_ns = max(1, -(-_WINDOW_PIECES // size)) * PIECE_NS
    pieces = round_count_up(max(1, -(-length_ns // PIECE_NS)))
    return size, min(cell_ns, -(-pieces * (PIECE_NS // 10**6) // size) * 10**6)


def _layout_columns(width: int, name: DrawCell, history: DrawCell, *, nodes: int, bound: bool) -> PlacedColumns[TableLine]:
    """Return the columns. Those for nodes and affinity are there only if they say something."""
    return place_columns(
        [
            Column("", AXIS_WIDTH + (15 if width < 100 else 22 if width < 180 else 30), 9, name, left=True),
            # Where no more than this is left, the cores that threads may use and the nodes are left out.
            Column("", 8 if width < 72 else 28, 9, history, grows=True, left=True),
            Column("cores", 5, 9, _draw_cores),
            Column("runnable", 8, 7, _draw_runnable),
            Column("ran on cores", 12 if width < 110 else 16, 6, lambda line, size: _draw_core_list(line.item.ran_on, size)),
            *([Column("node", 4, 3, _draw_nodes)] if nodes > 1 else []),
            *(
                [Column("may run on", 12, 2, lambda line, size: _draw_core_list(line.item.allowed_cores, size))]
                if bound
                else []
            ),
        ],
        width,
    )


def _layout_table(threads: RankThreads, width: int, glyphs: Glyphs) -> PlacedColumns[TableLine]:
    def draw_name(line: TableLine, size: int) -> Row:
        return _draw_name(line, size, glyphs)

    bound = bool(threads.allowed_cores)
    return _layout_columns(width, draw_name, lambda line, size: line.history, nodes=threads.node_count, bound=bound)


def _draw_item(
    line: TableLine, styles: Sequence[str], placed: PlacedColumns[TableLine], tall: int, width: int, glyphs: Glyphs
) -> list[Row]:
    """Draw a line of the table. Its history is ``tall`` rows high, with name and figures beside the highest row.

    A history shows cores over time, scaled to its own maximum, but at least to one core.
    """
    (_, _, name_size), (_, _, size) = placed.columns[:2]
    values = line.item.cores_history
    highest, *below = draw_strip(values, styles, float(np.nanmax(values, initial=1.0)), size, tall, glyphs)
    lead = (" " * (name_size + 1), "text")
    rows = [fit_row((lead, *part), width, glyphs) for part in below]
    return [placed.draw_row(replace(line, history=highest), width, glyphs), *rows]


def _draw_cores(line: TableLine, size: int) -> Row:
    return ((format_fixed(line.item.cores_used, 1, size), "value" if line.item.cores_used else "muted"),)


def _draw_runnable(line: TableLine, size: int) -> Row:
    """Draw how many threads ran or waited for a core, on average; NaN where unknown."""
    item = line.item
    return ((format_fixed(item.cores_used + item.waiting_cores, 1, size), "warn" if item.waiting_cores >= 0.5 else "muted"),)


def _draw_core_list(cores: Cores, size: int) -> Row:
    """Return ``0-3,8``, or the number of cores if that is too long."""
    text = format_numbers(cores)
    return (((text if len(text) <= size else format_count(len(cores), "core")).rjust(size), "muted"),)


def _draw_nodes(line: TableLine, size: int) -> Row:
    nodes = line.item.numa_nodes if line.has_nodes else ()
    return ((",".join(map(str, nodes)).rjust(size), "warn" if len(nodes) > 1 else "muted"),)


def build_lines(threads: RankThreads, opened: Collection[str], nodes: int, most: int | None = None) -> list[TableLine]:
    """Return a line for each group and for the ``most`` busiest threads of each open group."""
    lines: list[TableLine] = []
    for group in threads.groups:
        is_open = group.name in opened and len(group.threads) > 1
        lines.append(TableLine(group, is_open=is_open, has_nodes=nodes > 1))
        if is_open:
            lines.extend(TableLine(group, thread, has_nodes=nodes > 1) for thread in group.threads[:most])
    return lines


def _choose_line_rows(room: int, count: int, glyphs: Glyphs) -> int:
    """Return the rows of each of ``count`` lines."""
    return max(1, min(_MAX_HISTORY_ROWS, room // max(1, count))) if glyphs.smooth else 1


def _count_default_threads(threads: RankThreads, room: int, tall: int) -> int:
    """Return how many threads fit below each name; 0 if too few do."""
    several = sum(len(group.threads) > 1 for group in threads.groups)
    most = (room - tall * len(threads.groups)) // max(1, several)
    return most if several and most >= _MIN_OPENED else 0


def draw_threads(
    threads: RankThreads,
    sentences: Sequence[str],
    shown: ListState,
    watched: GrowingScales,
    begin_s: float,
    size: tuple[int, int],
    glyphs: Glyphs,
) -> ThreadRows:
    """Draw the panel in ``size`` (cells, rows)."""
    (opened, top), (width, height) = shown, size
    if height <= 0 or width <= 0:
        return ThreadRows([], top, {}, range(0), range(0))
    nodes = threads.node_count
    placed = _layout_table(threads, width, glyphs)
    has_chart = height >= _MIN_HEIGHT_WITH_CHART
    figures = PlacedColumns(placed.columns[2:4] if has_phase_means(placed) else ())  # of the phases beside the chart
    rows = [draw_rule(_draw_title(threads, width), width, glyphs, figures if has_chart else placed)]
    rows += [
        fit_row((("! ", "warn"), (fit_text(text, width - 2, glyphs), "warn")), width, glyphs)
        for text in sentences[: height // 6]
    ]
    items = build_lines(threads, opened or (), nodes)
    rest = [fit_row(row, width, glyphs) for row in _draw_rest(threads, placed, glyphs)]
    room = height - len(rows) - len(rest)
    chart, above = 0, len(rows)
    (_, _, name_size), (_, _, columns) = placed.columns[:2]
    if has_chart:
        chart = max(_MIN_CHART_ROWS, room // 4, min(room - len(items), _MAX_CHART_ROWS, room * 3 // 5))
        # The chart gets the rows that lines of equal height leave over.
        left = room - chart
        chart += max(0, min(left - len(items) * _choose_line_rows(left, len(items), glyphs), _MAX_CHART_ROWS - chart))
        rows += draw_chart(threads, placed, watched, begin_s, chart - 1, width, glyphs)
        rows.append(draw_rule((("Threads", "title"),), width, glyphs, placed))
    room -= chart
    tall = _choose_line_rows(room, len(items), glyphs)
    most = _count_default_threads(threads, room, tall) if opened is None else 0
    if most:
        items = build_lines(threads, {group.name for group in threads.groups}, nodes, most)
    table: list[Row] = []
    lines: list[TableLine] = []
    styles = [phase_style(phase) for phase in threads.phases]
    for item in items:
        table += _draw_item(item, styles, placed, 1 if most and item.thread is not None else tall, width, glyphs)
        lines += [item] * (len(table) - len(lines))
    table += rest
    room += len(rest)
    top = max(0, min(top, len(table) - room))
    seen = table[top : top + room]
    if len(table) > top + room and seen:
        hidden = len(table) - top - room + 1
        seen[-1] = fit_row(((f"{glyphs.ellipsis} {format_count(hidden, 'more row')} below", "muted"),), width, glyphs)
    visible = dict(enumerate(lines[top : top + room], len(rows)))
    rows = fit_height(rows + seen, width, height, glyphs)
    return ThreadRows(rows, top, visible, range(above, above + chart - 1), range(name_size + 1, name_size + 1 + columns))


def _draw_title(threads: RankThreads, width: int) -> Row:
    rank = threads.rank
    name = f"Rank {rank.rank}" if rank.rank >= 0 else f"Process {rank.pid}"
    if not rank.alive:
        return (*panel_title(name, False), (" ended", "muted"))
    format_threads = format_count(rank.thread_count, "thread")
    text = f" {rank.cores_used:.1f} cores used, {rank.runnable_threads:.1f} runnable, {format_threads}"
    longer = f"{text} in the last second"
    shown = next((one for one in (longer, text) if width >= len(one) + 40), "")
    return (*panel_title(name, False), (shown, "title-value"))


def _draw_name(line: TableLine, size: int, glyphs: Glyphs) -> Row:
    if line.thread is not None:
        name = sanitize(line.thread.name, glyphs)
        return (("    ", "text"), (fit_text(f"{name} {line.thread.tid}", size - 4, glyphs, at_words=False), "muted"))
    count = len(line.group.threads)
    mark = " " if count == 1 else glyphs.opened if line.is_open else glyphs.closed
    number = f"{count} {glyphs.times} " if count > 1 else ""
    name = fit_text(sanitize(line.group.name, glyphs), size - 2 - len(number), glyphs, at_words=False)
    return ((f"{mark} ", "accent"), (number, "value"), (name, "text"))


def _draw_rest(threads: RankThreads, placed: PlacedColumns[TableLine], glyphs: Glyphs) -> list[Row]:
    """Return rows about what is not in the table: other threads, whose cores add up to the rank's, and other processes."""
    if not threads.is_recorded:
        return [(("  No threads recorded: zerotop run and zerotop attach record them.", "muted"),)]
    if not threads.rank.alive:
        return [(("  This process has ended; its last threads are shown.", "muted"),)]
    _, begin, size = placed.columns[2]
    named = []
    if threads.rest_threads:
        why = "only the busiest are listed" if threads.rest_cores >= 1 else "mostly idle"
        named.append((f"  {format_count(threads.rest_threads, 'other')}: {why}", threads.rest_cores))
    if threads.loader_workers:
        workers = f"{format_count(threads.loader_workers, 'loader worker')}, not this process"
        named.append((f"  {workers}", threads.loader_cores))
    return [
        (*fit_row(((text, "muted"),), begin, glyphs), (format_fixed(cores, 1, size), "muted" if cores < 1 else "value"))
        for text, cores in named
    ]


def format_threads(threads: RankThreads) -> str:
    """Return a tab-separated row for each thread, under a heading."""
    headings = ("rank", "tid", "kind", "name", "cores", "waiting", "ran_on", "numa_nodes", "may_run_on")
    lines: list[tuple[object, ...]] = [headings]
    for group in threads.groups:
        for thread in group.threads:
            figures = (f"{thread.cores_used:.3f}", f"{thread.waiting_cores:.3f}")
            ran_on, allowed = map(format_numbers, (thread.ran_on, thread.allowed_cores))
            places = (ran_on, ",".join(map(str, thread.numa_nodes)), allowed)
            lines.append((threads.rank.rank, thread.tid, thread.kind, thread.name, *figures, *places))
    return format_tsv(lines)
