"""Steps of all ranks joined into iterations: what a whole job took, step by step."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.live_view import Floats, Iterations
from zerotop.analysis.processes.ranks_and_hosts import RANKS
from zerotop.analysis.steps.growable_array import Growing
from zerotop.analysis.steps.step_table import STEP_DTYPE, Rows
from zerotop.analysis.views.restarts import Member

_PHASES = {"data": "data_s", "forward": "forward_s", "backward": "backward_s", "step": "step_s"}


class Joined:
    """The steps that every rank process has finished or was gone before, oldest first, extended by :meth:`extending`.

    A step takes as long as on its slowest rank, and is known when the last rank has finished it or is gone.
    """

    def __init__(self) -> None:
        self._rows = Growing(STEP_DTYPE)
        self._tokens = Growing(np.int64)
        self._known_ns = Growing(np.int64)
        self._attempt = 0  # the one that is being joined,
        self._done = 0  # and how many of its steps are
        self._seen: tuple[int, Iterations] | None = None

    @property
    def rows(self) -> Rows:
        """The steps as on their slowest ranks."""
        return self._rows.rows

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each step over all ranks, 0 where unknown."""
        return self._tokens.rows

    @property
    def known_ns(self) -> NDArray[np.int64]:
        """From when in unix time each step is known; never falls."""
        return self._known_ns.rows

    def extending(self, attempts: Sequence[Sequence[Member]]) -> Generator[None, None, None]:
        """Takes in what the processes have finished since, in pieces. What is known meanwhile is what was known before."""
        for number, members in enumerate(attempts[self._attempt :], self._attempt):
            if number != self._attempt:
                self._attempt, self._done = number, 0
            yield from self._joining(members)

    def _joining(self, members: Sequence[Member]) -> Generator[None, None, None]:
        end = _end(members)
        if end <= self._done:
            return
        slowest = np.empty(end - self._done, STEP_DTYPE)
        slowest["iteration_s"] = -np.inf
        tokens = np.zeros(len(slowest), np.int64)
        known_ns = np.full(len(slowest), max(self.known_ns[-1:], default=0), np.int64)
        for number, member in enumerate(members, 1):
            if not number % RANKS:
                yield
            rows = member.between(self._done, end)
            begin = min(len(slowest), max(0, member.late - self._done))
            own = slice(begin, begin + len(rows))
            slower = np.flatnonzero(rows["iteration_s"] > slowest["iteration_s"][own])
            slowest[begin + slower] = rows[slower]
            tokens[own] += np.maximum(rows["tokens"], 0)
            known_ns[own] = np.maximum(known_ns[own], rows["end_unix_ns"])
            known_ns[own.stop :] = np.maximum(known_ns[own.stop :], member.gone_ns or 0)
        self._rows.add(len(slowest))[:] = slowest
        self._tokens.add(len(tokens))[:] = tokens
        self._known_ns.add(len(known_ns))[:] = np.maximum.accumulate(known_ns)
        self._done = end

    def count_known(self, cursor_ns: int) -> int:
        """How many steps had been finished by all ranks at the cursor."""
        return int(np.searchsorted(self.known_ns, cursor_ns, "right"))

    def upto(self, count: int) -> Iterations:
        """The first ``count`` iterations; the same object as before while the count is the same."""
        if self._seen is None or self._seen[0] != count:
            self._seen = (count, _iterations(self.rows[:count]))
        return self._seen[1]


def _end(members: Sequence[Member]) -> int:
    """How many steps are finished by all that are not gone, or by any where all are."""
    waited_for = [member.count for member in members if member.gone_ns is None]
    return min(waited_for) if waited_for else max((member.count for member in members), default=0)


def _iterations(rows: Rows) -> Iterations:
    total: Floats = rows["iteration_s"]
    phases: dict[str, Floats] = {name: rows[column] for name, column in _PHASES.items()}
    phases["other"] = np.maximum(0.0, total - sum(phases.values(), np.zeros(len(rows))))
    return Iterations(rows["step"], rows["begin_unix_ns"] / 1e9, total, phases, rows["skipped"])
