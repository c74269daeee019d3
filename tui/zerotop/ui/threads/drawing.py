"""The threads screen: a rank's cores and busy threads over time, and under them, at the same times, each of its threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zerotop.analysis.formatting import plural
from zerotop.analysis.ranks.affinity import Cores, cores_text
from zerotop.analysis.ranks.threads import Group, RankThreads, Thread
from zerotop.analysis.views.history import PIECE_NS
from zerotop.ui.charts import AXIS_WIDTH, Watched
from zerotop.ui.charts.strips import strip
from zerotop.ui.drawing.formatting import fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, filled, to_height
from zerotop.ui.drawing.table import Column, Placed, place, rule
from zerotop.ui.drawing.text import fit, literal
from zerotop.ui.live.memory import panel_title
from zerotop.ui.threads.chart import draw_chart

_WINDOW_PIECES = 120  # half seconds that are seen at least
_WINDOWS = (15, 30, 45, 60, 75, 90)  # seconds: few, so that what grows is rescaled seldom
_CHART_FROM = 12  # rows of the panel from which there is a chart too
_LEAST_CHART, _MOST_CHART = 5, 24
_TALLEST = 4  # rows of one history
_LEAST_OPENED = 4  # threads of each name that there must be room for to show them unasked


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table: a group of threads, one of its threads, or a group of one."""

    group: Group
    thread: Thread | None = None  # None: the whole group
    open: bool = False  # its threads follow
    nodes: bool = False  # whether the host has several NUMA nodes
    history: Row = ()  # the lowest row of it

    @property
    def item(self) -> Group | Thread:
        return self.thread if self.thread is not None else self.group


Cell = Callable[[Line, int], Row]


def history_shape(width: int, length_ns: int, *, nodes: int, bound: bool) -> tuple[int, int]:
    """(cells, nanoseconds a cell) of the histories in a panel of this width; see :func:`draw_threads`.

    ``length_ns``: of the recording. One that is shorter than what is usually seen has the cells to itself.
    """
    columns = _columns_of(width, lambda line, size: (), lambda line, size: (), nodes=nodes, bound=bound).columns
    size = next(size for column, _, size in columns if column.grows)
    cell_ns = max(1, -(-_WINDOW_PIECES // size)) * PIECE_NS
    whole_ms = next((seconds * 1000 for seconds in _WINDOWS if seconds * 10**9 >= length_ns), None)
    if whole_ms is None:
        return size, cell_ns
    return size, min(cell_ns, -(-whole_ms // size) * 10**6)


def _columns_of(width: int, name: Cell, history: Cell, *, nodes: int, bound: bool) -> Placed[Line]:
    """The columns; of nodes and of what threads are bound to only where there is something to say."""
    return place(
        [
            Column((), AXIS_WIDTH + (15 if width < 100 else 19 if width < 180 else 27), 9, name, left=True),
            Column((), 8, 9, history, grows=True, left=True),
            Column((("cores", "heading"),), 5, 9, _cores),
            Column((("wait", "heading"),), 4, 7, _wait),
            Column((("ran on cores", "heading"),), 12 if width < 110 else 16, 6, _ran_on),
            *([Column((("node", "heading"),), 4, 3, _node)] if nodes > 1 else []),
            *([Column((("may run on", "heading"),), 12, 2, _allowed)] if bound else []),
        ],
        width,
    )


def _placed(threads: RankThreads, width: int, nodes: int, glyphs: Glyphs) -> Placed[Line]:
    def name(line: Line, size: int) -> Row:
        return _name(line, size, glyphs)

    return _columns_of(width, name, lambda line, size: line.history, nodes=nodes, bound=bool(threads.allowed))


def _item_rows(line: Line, styles: Sequence[str], placed: Placed[Line], tall: int, width: int, glyphs: Glyphs) -> list[Row]:
    """A line of the table; its history is ``tall`` rows high, its name and figures are beside the lowest.

    Histories are cores over time, on a scale to as many as these threads ever had at once, at least one.
    """
    (_, _, name_size), (_, _, size) = placed.columns[:2]
    values = line.item.history
    *above, lowest = strip(values, styles, float(np.nanmax(values, initial=1.0)), size, tall, glyphs)
    lead = (" " * (name_size + 1), "text")
    rows = [filled((lead, *part), width, glyphs) for part in above]
    return [*rows, placed.row(replace(line, history=lowest), width, glyphs)]


def _cores(line: Line, size: int) -> Row:
    return ((fixed(line.item.cores_used, 1, size), "value" if line.item.cores_used else "muted"),)


def _wait(line: Line, size: int) -> Row:
    return ((fixed(line.item.waiting, 1, size), "warn" if line.item.waiting >= 0.5 else "muted"),)


def _ran_on(line: Line, size: int) -> Row:
    return _core_list(line.item.ran_on, size)


def _allowed(line: Line, size: int) -> Row:
    return _core_list(line.item.allowed, size)


def _core_list(cores: Cores, size: int) -> Row:
    """``0-3,8``, or how many there are where that is too long."""
    text = cores_text(cores)
    return (((text if len(text) <= size else f"{len(cores)} cores").rjust(size), "muted"),)


def _node(line: Line, size: int) -> Row:
    nodes = line.item.nodes if line.nodes else ()
    return ((",".join(map(str, nodes)).rjust(size), "warn" if len(nodes) > 1 else "muted"),)


def lines(threads: RankThreads, opened: Collection[str], nodes: int, most: int | None = None) -> list[Line]:
    """The rows of the table: groups, and of those that are opened each thread, the busiest ``most`` of them."""
    found: list[Line] = []
    for group in threads.groups:
        is_open = group.name in opened and len(group.threads) > 1
        found.append(Line(group, open=is_open, nodes=nodes > 1))
        if is_open:
            found.extend(Line(group, thread, nodes=nodes > 1) for thread in group.threads[:most])
    return found


def _tall(room: int, count: int, glyphs: Glyphs) -> int:
    """Rows of each of so many lines."""
    return max(1, min(_TALLEST, room // max(1, count))) if glyphs.smooth else 1


def _unasked(threads: RankThreads, room: int, tall: int) -> int:
    """How many threads of each name there is room for under their names, 0 for too few to be worth it."""
    several = sum(len(group.threads) > 1 for group in threads.groups)
    most = (room - 1 - tall * len(threads.groups)) // max(1, several)
    return most if several and most >= _LEAST_OPENED else 0


def draw_threads(
    threads: RankThreads,
    told: Sequence[str],
    opened: Collection[str] | None,
    nodes: int,
    watched: Watched,
    begin_s: float,
    size: tuple[int, int],
    glyphs: Glyphs,
    *,
    top: int = 0,
) -> tuple[list[Row], int]:
    """The panel, and which row of its table is the first one seen: ``top``, or as far down as there are rows.

    ``told`` are sentences, ``nodes`` how many NUMA nodes the host has.
    ``opened``: names of which each thread is shown by itself; None where nobody chose: as many as there is room for.
    """
    width, height = size
    if height <= 0 or width <= 0:
        return [], top
    placed = _placed(threads, width, nodes, glyphs)
    rows = [rule(_title(threads, width), width, glyphs, placed)]
    rows += [filled((("! ", "warn"), (fit(text, width - 2, glyphs), "warn")), width, glyphs) for text in told[: height // 6]]
    items = lines(threads, opened or (), nodes)
    room = height - len(rows)
    chart = 0
    if height >= _CHART_FROM:
        chart = max(_LEAST_CHART, room // 4, min(room - len(items) - 1, _MOST_CHART, room * 3 // 5))
        # What a table of lines all of one height leaves is the chart's.
        left = room - chart - 1
        chart += max(0, min(left - len(items) * _tall(left, len(items), glyphs), _MOST_CHART - chart))
        (_, _, name_size), (_, _, columns) = placed.columns[:2]
        rows += draw_chart(threads, name_size + 1, columns, watched, begin_s, chart, width, glyphs)
    room -= chart
    tall = _tall(room - 1, len(items), glyphs)
    most = _unasked(threads, room, tall) if opened is None else 0
    if most:
        items = lines(threads, {group.name for group in threads.groups}, nodes, most)
    table: list[Row] = []
    styles = [phase_style(phase) for phase in threads.phases]
    for item in items:
        table += _item_rows(item, styles, placed, 1 if most and item.thread is not None else tall, width, glyphs)
    table.append(filled(_rest(threads, glyphs), width, glyphs))
    top = max(0, min(top, len(table) - room))
    shown = table[top : top + room]
    if len(table) > top + room and shown:
        hidden = len(table) - top - room + 1
        shown[-1] = filled(((f"{glyphs.ellipsis} {plural(hidden, 'more row')} below", "muted"),), width, glyphs)
    return to_height(rows + shown, width, height, glyphs), top


def _title(threads: RankThreads, width: int) -> Row:
    rank = threads.rank
    name = f"Rank {rank.rank}" if rank.rank >= 0 else f"Process {rank.pid}"
    text = f" {plural(rank.thread_count, 'thread')}, {rank.busy_threads} busy"
    return (*panel_title(name, False), (text if width >= 60 else "", "title-value"))


def _name(line: Line, size: int, glyphs: Glyphs) -> Row:
    if line.thread is not None:
        name = literal(line.thread.name, glyphs)
        return (("    ", "text"), (fit(f"{name} {line.thread.tid}", size - 4, glyphs, words=False), "muted"))
    count = len(line.group.threads)
    mark = " " if count == 1 else glyphs.opened if line.open else glyphs.closed
    number = f"{count} {glyphs.times} " if count > 1 else ""
    name = fit(literal(line.group.name, glyphs), size - 2 - len(number), glyphs, words=False)
    return ((f"{mark} ", "accent"), (number, "value"), (name, "text"))


def _rest(threads: RankThreads, glyphs: Glyphs) -> Row:
    """What is not in the table."""
    if not threads.recorded:
        return (("  No threads were recorded: zerotop run and zerotop attach record them.", "muted"),)
    if not threads.rank.alive:
        return (("  This process has ended: what it did last is shown.", "muted"),)
    if not threads.rest_threads:
        return ()
    other = f"  {plural(threads.rest_threads, 'other')}, {threads.rest_cores:.1f} cores"
    if threads.rest_cores >= 1:
        return ((f"{other}: only the busiest of a rank are recorded one by one", "muted"),)
    return ((f"{other}: hardly running", "muted"),)


def threads_text(threads: RankThreads) -> str:
    """A row for each thread, tabs between columns, a heading first: for the clipboard."""
    lines = ["\t".join(("rank", "tid", "name", "cores", "waiting", "ran_on", "numa_nodes", "may_run_on"))]
    for group in threads.groups:
        for thread in group.threads:
            figures = (f"{thread.cores_used:.3f}", f"{thread.waiting:.3f}")
            places = (cores_text(thread.ran_on), ",".join(map(str, thread.nodes)), cores_text(thread.allowed))
            lines.append("\t".join((str(threads.rank.rank), str(thread.tid), thread.name, *figures, *places)))
    return "\n".join(lines)
