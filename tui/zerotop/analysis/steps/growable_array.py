"""An array that grows at its end."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class GrowingArray:
    """Rows of one type. Adding some costs as much as they are, however many there are already."""

    def __init__(self, dtype: DTypeLike) -> None:
        self._buffer: NDArray[Any] = np.empty(0, dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> NDArray[Any]:
        """All rows so far; stays as it is when more are added."""
        return self._buffer[: self._count]

    def reserve_rows(self, count: int) -> None:
        """Makes place for so many more, which then are not moved while they are added."""
        end = self._count + count
        if end > len(self._buffer):
            room = np.empty(max(end, 2 * self._count), self._buffer.dtype)
            room[: self._count] = self.rows
            self._buffer = room

    def add_rows(self, count: int) -> NDArray[Any]:
        """Room for so many rows at the end, of any content, to be written to."""
        self.reserve_rows(count)
        end = self._count + count
        added = self._buffer[self._count : end]
        self._count = end
        return added
