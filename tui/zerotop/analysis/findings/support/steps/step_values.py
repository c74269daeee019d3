"""A value of each step, computed when it is read: each search sees all steps, but needs only the last few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from zerotop.recording.samples import Rows


@dataclass(frozen=True, slots=True)
class StepValues:
    """The results of ``compute`` for each of these steps; a slice or indices select some of them."""

    rows: Rows
    compute: Callable[[Rows], NDArray[Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> NDArray[Any]:
        return self.compute(self.rows[index])
