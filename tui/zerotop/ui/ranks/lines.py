"""Assign ranks to the lines of a map, which may be fewer than the ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.ranks.matrix import Matrix, RankMetric
from zerotop.analysis.ranks.nodes import NodeRows
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.ranks.model import RankPicture

MAX_LINE_ROWS = 3


@dataclass(frozen=True)
class MapLine:
    """One line of the map: a rank, or several ranks with their worst value."""

    label: str
    matrix_rows: NDArray[np.intp]  # first the one that is chosen by this line
    host: str = ""  # if it is that of a node,
    mark: str = ""  # and whether the node is open
    is_chosen: bool = False


@dataclass(frozen=True)
class MapPlan:
    """The lines from the top down."""

    lines: tuple[MapLine, ...]
    tall: int  # rows of each line; 0 if two lines share a row
    has_gaps: bool = False  # a thin line separates the lines
    part: str = ""  # which nodes are shown, if not all

    def find_line(self, row: int) -> int:
        """Return the index of the line at a row, of two lines the upper one."""
        return row // self.tall if self.tall else 2 * row

    @property
    def height(self) -> int:
        """Rows of all lines."""
        return len(self.lines) * self.tall if self.tall else (len(self.lines) + 1) // 2


def plan_lines(picture: RankPicture, room: int, glyphs: Glyphs) -> MapPlan:
    """Plan a line for every rank, or for the outliers and for groups of the others."""
    if picture.nodes:
        return _plan_nodes(picture, room, glyphs)
    count = len(picture.order)
    if count <= room:
        return MapPlan(_build_single_lines(picture, picture.order), _choose_line_rows(count, room), True)
    if count <= 2 * room and glyphs.smooth:
        return MapPlan(_build_single_lines(picture, picture.order), 0)
    alone = _choose_single_ranks(picture, max(1, room // 2))
    rest = np.setdiff1d(np.arange(count), alone)
    lines = (*_build_single_lines(picture, alone), *_group_ranks(picture, rest, max(1, room - len(alone))))
    return MapPlan(lines, _choose_line_rows(len(lines), room), True)


def _plan_nodes(picture: RankPicture, room: int, glyphs: Glyphs) -> MapPlan:
    """Plan a line for every node, and for every rank of the open one; of too many, those around the chosen one."""
    lines: list[MapLine] = []
    for node in picture.nodes:
        is_open = node.host == picture.opened
        is_chosen = not is_open and picture.chosen in node.rows
        mark = glyphs.opened if is_open else glyphs.closed
        lines.append(MapLine(_name_node(picture, node), node.rows, node.host, mark, is_chosen))
        lines += _build_single_lines(picture, np.sort(node.rows)) if is_open else ()
    chosen = next((place for place, line in enumerate(lines) if line.is_chosen), 0)
    first = max(0, min(chosen - room // 2, len(lines) - room))
    shown = tuple(lines[first : first + room])
    places = [place for place, node in enumerate(picture.nodes, 1) if any(line.host == node.host for line in shown)]
    part = f"{places[0]}-{places[-1]} of {len(picture.nodes)}" if places and len(shown) < len(lines) else ""
    return MapPlan(shown, _choose_line_rows(len(shown), room), True, part)


def _name_node(picture: RankPicture, node: NodeRows) -> str:
    """Return ``node003 24-31``: the node and its ranks."""
    ranks = np.sort(picture.matrix.rank_numbers[node.rows])
    is_run = int(ranks[-1] - ranks[0]) + 1 == len(ranks)
    told = f"{ranks[0]}-{ranks[-1]}" if is_run and len(ranks) > 1 else f"{ranks[0]}" if is_run else f"{len(ranks)} ranks"
    return f"{node.host} {told}"


def _choose_line_rows(lines: int, room: int) -> int:
    """Return the rows of a line: several if that leaves room for other metrics with one row each."""
    for tall in range(MAX_LINE_ROWS, 1, -1):
        if tall * lines + tall * (lines + 1) <= room:
            return tall
    return 1


def _build_single_lines(picture: RankPicture, rows: NDArray[np.intp]) -> tuple[MapLine, ...]:
    ranks = picture.matrix.rank_numbers
    return tuple(MapLine(str(ranks[row]), np.array([row]), is_chosen=bool(row == picture.chosen)) for row in rows)


def _choose_single_ranks(picture: RankPicture, most: int) -> NDArray[np.intp]:
    """Return the ranks with their own line: the chosen one and those that differ most."""
    different = [] if picture.by_number else [row for row in picture.order[:most] if picture.oddness[row] > 0]
    if picture.chosen is not None and picture.chosen not in different:
        different = [*different[: most - 1], np.intp(picture.chosen)]
    return np.array(different, np.intp)


def _group_ranks(picture: RankPicture, rest: NDArray[np.intp], room: int) -> tuple[MapLine, ...]:
    """Group the remaining ranks by number into equal parts of a node or, if there are many, into whole nodes."""
    ranks, hosts = picture.matrix.rank_numbers, picture.matrix.host_names
    count = len(hosts)
    per_node = max(Counter(hosts).values())
    size = -(-count // room)
    parts = [part for part in range(size, per_node + 1) if per_node % part == 0]
    size = parts[0] if parts else -(-size // per_node) * per_node
    lines = []
    for begin in range(0, count, size):
        end = min(count, begin + size)
        rows = rest[(rest >= begin) & (rest < end)]
        is_node = size == per_node and len(set(hosts[begin:end])) == 1
        if len(rows):
            label = hosts[begin] if is_node else f"{ranks[begin]}-{ranks[end - 1]}"
            lines.append(MapLine(label, rows, hosts[begin] if is_node else ""))
    return tuple(lines)


def compute_line_values(lines: tuple[MapLine, ...], values: Matrix, metric: RankMetric, *, best: bool = False) -> Matrix:
    """Return the worst value of each line's ranks, shape (lines, steps): the highest, of free memory the lowest.

    ``best``: the other end of their range.
    """
    worst = np.fmin if (metric is RankMetric.FREE) is not best else np.fmax
    if not lines:
        return values[:0]
    rows = np.concatenate([line.matrix_rows for line in lines])
    begins = np.cumsum([0, *(len(line.matrix_rows) for line in lines[:-1])])
    line_values: Matrix = worst.reduceat(values[rows], begins, axis=0)
    return line_values
