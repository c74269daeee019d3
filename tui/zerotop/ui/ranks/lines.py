"""Which ranks get a line of the map when there are more of them than lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.ranks.matrix import Matrix, Metric
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.ranks.model import Picture

TALLEST = 3  # rows of one rank


@dataclass(frozen=True)
class Line:
    """One line of the map: a rank, or several of which the most telling value is drawn."""

    label: str
    rows: NDArray[np.intp]  # of the matrix


@dataclass(frozen=True)
class Plan:
    """The lines from the top down. ``tall``: rows of each; 0: two lines share a row."""

    lines: tuple[Line, ...]
    tall: int
    apart: bool = False  # whether a thin line is between them

    def line_at(self, row: int) -> int:
        """Which line a row belongs to; of two the upper one."""
        return row // self.tall if self.tall else 2 * row

    @property
    def height(self) -> int:
        """Rows that it takes."""
        return len(self.lines) * self.tall if self.tall else (len(self.lines) + 1) // 2


def plan(picture: Picture, room: int, glyphs: Glyphs) -> Plan:
    """Every rank, or the outliers, and what is left in nodes or other pieces."""
    count = len(picture.order)
    if count <= room:
        return Plan(_singles(picture, picture.order), _tall(count, room), True)
    if count <= 2 * room and glyphs.smooth:
        return Plan(_singles(picture, picture.order), 0)
    alone = _alone(picture, max(1, room // 2))
    rest = np.setdiff1d(np.arange(count), alone)
    lines = (*_singles(picture, alone), *_pieces(picture, rest, max(1, room - len(alone))))
    return Plan(lines, _tall(len(lines), room), True)


def _tall(lines: int, room: int) -> int:
    """Rows of each line: several where that leaves room for other metrics in one row each."""
    for tall in range(TALLEST, 1, -1):
        if tall * lines + tall * (lines + 1) <= room:
            return tall
    return 1


def _singles(picture: Picture, rows: NDArray[np.intp]) -> tuple[Line, ...]:
    return tuple(Line(str(picture.matrix.ranks[row]), np.array([row])) for row in rows)


def _alone(picture: Picture, most: int) -> NDArray[np.intp]:
    """The ranks with a line of their own: the chosen one and those that differ most."""
    different = [] if picture.by_number else [row for row in picture.order[:most] if picture.odd[row] > 0]
    if picture.chosen is not None and picture.chosen not in different:
        different = [*different[: most - 1], np.intp(picture.chosen)]
    return np.array(different, np.intp)


def _pieces(picture: Picture, rest: NDArray[np.intp], room: int) -> tuple[Line, ...]:
    """What is left in pieces by number: of whole nodes where there are many, else of a part of a node."""
    ranks, hosts = picture.matrix.ranks, picture.matrix.hosts
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
            lines.append(Line(hosts[begin] if whole else f"{ranks[begin]}-{ranks[end - 1]}", rows))
    return tuple(lines)


def values_of(lines: tuple[Line, ...], values: Matrix, metric: Metric) -> Matrix:
    """Lines x steps: of several ranks the highest value, of free memory the least."""
    worst = np.fmin if metric is Metric.FREE else np.fmax
    if not lines:
        return values[:0]
    rows = np.concatenate([line.rows for line in lines])
    begins = np.cumsum([0, *(len(line.rows) for line in lines[:-1])])
    found: Matrix = worst.reduceat(values[rows], begins, axis=0)
    return found
