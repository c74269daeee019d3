"""Assign ranks to the lines of a map, which may be fewer than the ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.ranks.matrix import Matrix, RankMetric
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.ranks.model import RankPicture

MAX_LINE_ROWS = 3


@dataclass(frozen=True)
class MapLine:
    """One line of the map: a rank, or several ranks with their worst value."""

    label: str
    matrix_rows: NDArray[np.intp]


@dataclass(frozen=True)
class MapPlan:
    """The lines from the top down."""

    lines: tuple[MapLine, ...]
    tall: int  # rows of each line; 0 if two lines share a row
    has_gaps: bool = False  # a thin line separates the lines

    def find_line(self, row: int) -> int:
        """Return the index of the line at a row, of two lines the upper one."""
        return row // self.tall if self.tall else 2 * row

    @property
    def height(self) -> int:
        """Rows of all lines."""
        return len(self.lines) * self.tall if self.tall else (len(self.lines) + 1) // 2


def plan_lines(picture: RankPicture, room: int, glyphs: Glyphs) -> MapPlan:
    """Plan a line for every rank, or for the outliers and for groups of the others."""
    count = len(picture.order)
    if count <= room:
        return MapPlan(_build_single_lines(picture, picture.order), _choose_line_rows(count, room), True)
    if count <= 2 * room and glyphs.smooth:
        return MapPlan(_build_single_lines(picture, picture.order), 0)
    alone = _choose_single_ranks(picture, max(1, room // 2))
    rest = np.setdiff1d(np.arange(count), alone)
    lines = (*_build_single_lines(picture, alone), *_group_ranks(picture, rest, max(1, room - len(alone))))
    return MapPlan(lines, _choose_line_rows(len(lines), room), True)


def _choose_line_rows(lines: int, room: int) -> int:
    """Return the rows of a line: several if that leaves room for other metrics with one row each."""
    for tall in range(MAX_LINE_ROWS, 1, -1):
        if tall * lines + tall * (lines + 1) <= room:
            return tall
    return 1


def _build_single_lines(picture: RankPicture, rows: NDArray[np.intp]) -> tuple[MapLine, ...]:
    return tuple(MapLine(str(picture.matrix.rank_numbers[row]), np.array([row])) for row in rows)


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
            lines.append(MapLine(hosts[begin] if is_node else f"{ranks[begin]}-{ranks[end - 1]}", rows))
    return tuple(lines)


def compute_line_values(lines: tuple[MapLine, ...], values: Matrix, metric: RankMetric) -> Matrix:
    """Return the worst value of each line's ranks, shape (lines, steps): the highest, of free memory the lowest."""
    worst = np.fmin if metric is RankMetric.FREE else np.fmax
    if not lines:
        return values[:0]
    rows = np.concatenate([line.matrix_rows for line in lines])
    begins = np.cumsum([0, *(len(line.matrix_rows) for line in lines[:-1])])
    line_values: Matrix = worst.reduceat(values[rows], begins, axis=0)
    return line_values
