"""Steps of all ranks joined into iterations: what a whole job took, step by step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.steps import STEP_DTYPE, Rows
from zerotop.analysis.view import Floats, Iterations

_PHASES = {"data": "data_s", "forward": "forward_s", "backward": "backward_s", "step": "step_s"}


class Joined:
    """The steps that every rank has finished, oldest first; a step takes as long as on its slowest rank."""

    def __init__(self, by_rank: dict[int, Rows]) -> None:
        self.count = min((len(rows) for rows in by_rank.values()), default=0)
        table = np.array([rows[: self.count] for rows in by_rank.values()]) if by_rank else np.empty((0, 0), STEP_DTYPE)
        ranks, count = table.shape
        slowest = table["iteration_s"].argmax(axis=0) if ranks and count else np.empty(0, np.intp)
        self.rows: Rows = table[slowest, np.arange(count)] if ranks else np.empty(0, STEP_DTYPE)
        self.tokens: NDArray[np.int64] = table["tokens"].sum(axis=0) if ranks else np.empty(0, np.int64)
        # A step is known when its last rank has finished it.
        self.known_ns: NDArray[np.int64] = (
            np.maximum.accumulate(table["end_unix_ns"].max(axis=0)) if ranks and count else np.empty(0, np.int64)
        )
        self._seen: tuple[int, Iterations] | None = None

    def count_known(self, cursor_ns: int) -> int:
        """How many steps had been finished by all ranks at the cursor."""
        return int(np.searchsorted(self.known_ns, cursor_ns, "right"))

    def upto(self, count: int) -> Iterations:
        """The first ``count`` iterations; the same object as before while the count is the same."""
        if self._seen is None or self._seen[0] != count:
            self._seen = (count, self._build(self.rows[:count]))
        return self._seen[1]

    @staticmethod
    def _build(rows: Rows) -> Iterations:
        total: Floats = rows["iteration_s"]
        phases: dict[str, Floats] = {name: rows[column] for name, column in _PHASES.items()}
        phases["other"] = np.maximum(0.0, total - sum(phases.values(), np.zeros(len(rows))))
        return Iterations(rows["step"], rows["begin_unix_s"], total, phases, rows["skipped"])
