"""An array that grows at its end."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class GrowingArray:
    """Rows of one type; adding rows takes amortised time in their number."""

    def __init__(self, dtype: DTypeLike) -> None:
        self._buffer: NDArray[Any] = np.empty(0, dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> NDArray[Any]:
        """All rows so far; a view that stays valid when more are added."""
        return self._buffer[: self._count]

    def reserve_rows(self, count: int) -> None:
        """Allocate room for ``count`` more rows."""
        end = self._count + count
        if end > len(self._buffer):
            larger = np.empty(max(end, 2 * self._count), self._buffer.dtype)
            larger[: self._count] = self.rows
            self._buffer = larger

    def add_rows(self, count: int) -> NDArray[Any]:
        """Add ``count`` uninitialised rows at the end and return them."""
        self.reserve_rows(count)
        self._count += count
        return self._buffer[self._count - count : self._count]
