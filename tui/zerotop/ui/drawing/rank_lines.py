"""Which ranks get a line of the map when there are more of them than lines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.rank_matrix import Matrix, Metric
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.ranking import Picture

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

    def line_at(self, row: int) -> int:
        """Which line a row belongs to; of two the upper one."""
        return row // self.tall if self.tall else 2 * row

    @property
    def height(self) -> int:
        """Rows that it takes."""
        return len(self.lines) * self.tall if self.tall else (len(self.lines) + 1) // 2


def plan(picture: Picture, room: int, glyphs: Glyphs) -> Plan:
    """Every rank, or the outliers and nodes or pieces of what is left."""
    count = len(picture.order)
    if count <= room:
        return Plan(_singles(picture, picture.order), min(TALLEST, room // max(1, count)))
    if count <= 2 * room and glyphs.smooth:
        return Plan(_singles(picture, picture.order), 0)
    alone = _alone(picture, max(1, room // 2))
    rest = np.setdiff1d(np.arange(count), alone)
    blocks = _nodes(picture, rest, room - len(alone)) or _pieces(picture, rest, max(1, room - len(alone)))
    return Plan((*_singles(picture, alone), *blocks), 1)


def _singles(picture: Picture, rows: NDArray[np.intp]) -> tuple[Line, ...]:
    return tuple(Line(str(picture.matrix.ranks[row]), np.array([row])) for row in rows)


def _alone(picture: Picture, most: int) -> NDArray[np.intp]:
    """The ranks with a line of their own: the chosen one and those that differ most."""
    different = [] if picture.by_number else [row for row in picture.order[:most] if picture.deviation[row] > 0]
    if picture.chosen is not None and picture.chosen not in different:
        different = [*different[: most - 1], np.intp(picture.chosen)]
    return np.array(different, np.intp)


def _nodes(picture: Picture, rest: NDArray[np.intp], room: int) -> tuple[Line, ...]:
    """What is left by node; nothing where they are too many, or only one."""
    hosts = np.array(picture.matrix.hosts)[rest]
    names, first = np.unique(hosts, return_index=True)
    if not 1 < len(names) <= room:
        return ()
    return tuple(Line(str(hosts[place]), rest[hosts == hosts[place]]) for place in np.sort(first))


def _pieces(picture: Picture, rest: NDArray[np.intp], room: int) -> tuple[Line, ...]:
    """What is left in pieces of as many ranks each, by number."""
    size = -(-len(rest) // room)
    pieces = [rest[begin : begin + size] for begin in range(0, len(rest), size)]
    ranks = picture.matrix.ranks
    return tuple(Line(f"{ranks[piece[0]]}-{ranks[piece[-1]]}", piece) for piece in pieces)


def values_of(lines: tuple[Line, ...], values: Matrix, metric: Metric) -> Matrix:
    """Lines x steps: of several ranks the highest value, of free memory the least."""
    worst = np.fmin if metric is Metric.FREE else np.fmax
    if not lines:
        return values[:0]
    rows = np.concatenate([line.rows for line in lines])
    begins = np.cumsum([0, *(len(line.rows) for line in lines[:-1])])
    found: Matrix = worst.reduceat(values[rows], begins, axis=0)
    return found
