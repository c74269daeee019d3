"""A value of each step, computed where it is read: every piece of a search sees all steps, and needs the last few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from zerotop.session.samples import Rows


@dataclass(frozen=True, slots=True)
class StepValues:
    """What ``compute`` returns for each of these steps; a slice or indices select some of them."""

    rows: Rows
    compute: Callable[[Rows], NDArray[Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> NDArray[Any]:
        return self.compute(self.rows[index])
