"""Which ranks get a line of the map when there are more of them than lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.ranks.matrix import Matrix, Metric
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.ranks.model import RankPicture

MAX_LINE_ROWS = 3  # rows of one rank


@dataclass(frozen=True)
class MapLine:
    """One line of the map: a rank, or several of which the most telling value is drawn."""

    label: str
    matrix_rows: NDArray[np.intp]  # of the matrix


@dataclass(frozen=True)
class MapPlan:
    """The lines from the top down. ``tall``: rows of each; 0: two lines share a row."""

    lines: tuple[MapLine, ...]
    tall: int
    has_gaps: bool = False  # whether a thin line is between them

    def find_line(self, row: int) -> int:
        """Which line a row belongs to; of two the upper one."""
        return row // self.tall if self.tall else 2 * row

    @property
    def height(self) -> int:
        """Rows that it takes."""
        return len(self.lines) * self.tall if self.tall else (len(self.lines) + 1) // 2


def plan_lines(picture: RankPicture, room: int, glyphs: Glyphs) -> MapPlan:
    """Every rank, or the outliers, and what is left in nodes or other pieces."""
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
    """Rows of each line: several where that leaves room for other metrics in one row each."""
    for tall in range(MAX_LINE_ROWS, 1, -1):
        if tall * lines + tall * (lines + 1) <= room:
            return tall
    return 1


def _build_single_lines(picture: RankPicture, rows: NDArray[np.intp]) -> tuple[MapLine, ...]:
    return tuple(MapLine(str(picture.matrix.rank_numbers[row]), np.array([row])) for row in rows)


def _choose_single_ranks(picture: RankPicture, most: int) -> NDArray[np.intp]:
    """The ranks with a line of their own: the chosen one and those that differ most."""
    different = [] if picture.by_number else [row for row in picture.order[:most] if picture.oddness[row] > 0]
    if picture.chosen is not None and picture.chosen not in different:
        different = [*different[: most - 1], np.intp(picture.chosen)]
    return np.array(different, np.intp)


def _group_ranks(picture: RankPicture, rest: NDArray[np.intp], room: int) -> tuple[MapLine, ...]:
    """What is left in pieces by number: of whole nodes where there are many, else of a part of a node."""
    ranks, hosts = picture.matrix.rank_numbers, picture.matrix.host_names
    count = len(hosts)
    on_a_node = max(Counter(hosts).values())
    size = -(-count // room)
    parts = [part for part in range(size, on_a_node + 1) if on_a_node % part == 0]
    size = parts[0] if parts else -(-size // on_a_node) * on_a_node
    lines = []
    for begin in range(0, count, size):
        end = min(count, begin + size)
        rows = rest[(rest >= begin) & (rest < end)]
        whole = size == on_a_node and len(set(hosts[begin:end])) == 1
        if len(rows):
            lines.append(MapLine(hosts[begin] if whole else f"{ranks[begin]}-{ranks[end - 1]}", rows))
    return tuple(lines)


def compute_line_values(lines: tuple[MapLine, ...], values: Matrix, metric: Metric) -> Matrix:
    """Lines x steps: of several ranks the highest value, of free memory the least."""
    worst = np.fmin if metric is Metric.FREE else np.fmax
    if not lines:
        return values[:0]
    rows = np.concatenate([line.matrix_rows for line in lines])
    begins = np.cumsum([0, *(len(line.matrix_rows) for line in lines[:-1])])
    found: Matrix = worst.reduceat(values[rows], begins, axis=0)
    return found
