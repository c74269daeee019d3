"""Steps of all ranks joined into iterations of the whole job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.live_view import Floats, Iterations
from zerotop.analysis.views.restarts import AttemptMember
from zerotop.recording.record_check import join_rows
from zerotop.recording.samples import Rows
from zerotop.recording.steps.growable_array import GrowingArray
from zerotop.recording.steps.missing_steps import find_recorded
from zerotop.recording.steps.step_dtype import STEP_DTYPE

_FEW_STEPS = 64  # that are joined for all ranks at once: their rows are copied
MAIN_PHASES = {"data": "data_s", "forward": "forward_s", "backward": "backward_s", "step": "step_s"}


class IterationTable:
    """The steps that every rank has finished or exited before, oldest first; :meth:`extend` adds more.

    A step takes as long as on the slowest rank that recorded it, and is known when the last rank has finished it or exited.
    """

    def __init__(self) -> None:
        self._rows = GrowingArray(STEP_DTYPE)
        self._token_counts = GrowingArray(np.int64)
        self._known_ns = GrowingArray(np.int64)
        self._attempts: Sequence[Sequence[AttemptMember]] = ()
        self._joined_counts = [0]  # steps joined so far of each attempt; the last one is being joined
        self._last_iterations: tuple[int, Iterations] | None = None
        self._rank: int | None = None  # the rank asked for last,
        self._rank_rows = GrowingArray(STEP_DTYPE)  # and the steps as on it
        self._last_on_rank: tuple[int, Iterations] | None = None

    @property
    def rows(self) -> Rows:
        """The steps of their slowest ranks."""
        return self._rows.rows

    @property
    def token_counts(self) -> NDArray[np.int64]:
        """Tokens of each step over the ranks that recorded it, 0 where unknown, as in steps that a rank only counted."""
        return self._token_counts.rows

    @property
    def known_ns(self) -> NDArray[np.int64]:
        """Unix time at which each step became known; never decreases."""
        return self._known_ns.rows

    def extend(self, attempts: Sequence[Sequence[AttemptMember]]) -> None:
        """Add the steps finished since the last call."""
        self._attempts = attempts
        for number, members in enumerate(attempts[len(self._joined_counts) - 1 :], len(self._joined_counts) - 1):
            if number == len(self._joined_counts):
                self._joined_counts.append(0)
            self._join_members(members)

    def _join_members(self, members: Sequence[AttemptMember]) -> None:
        joined, end = self._joined_counts[-1], _find_end(members)
        if end <= joined:
            return
        is_short = end - joined <= _FEW_STEPS and len(members) > 1
        if is_short and all(one.gone_ns is None and one.missed_steps <= joined for one in members):
            self._add_joined(*_join_complete([one.read_steps(joined, end) for one in members]))
        else:
            self._add_joined(*self._join_each(members, joined, end))
        self._joined_counts[-1] = end

    def _add_joined(self, slowest: Rows, tokens: NDArray[np.int64], known_ns: NDArray[np.int64]) -> None:
        known_ns = np.maximum.accumulate(np.maximum(known_ns, max(self.known_ns[-1:], default=0)))
        self._rows.add_rows(len(slowest))[:] = slowest
        self._token_counts.add_rows(len(tokens))[:] = tokens
        self._known_ns.add_rows(len(known_ns))[:] = known_ns

    def _join_each(
        self, members: Sequence[AttemptMember], joined: int, end: int
    ) -> tuple[Rows, NDArray[np.int64], NDArray[np.int64]]:
        slowest = np.empty(end - joined, STEP_DTYPE)
        slowest["iteration_s"] = -np.inf
        tokens, counted = np.zeros(len(slowest), np.int64), np.zeros(len(slowest), np.bool_)
        known_ns = np.zeros(len(slowest), np.int64)
        for member in members:
            rows = member.read_steps(joined, end)
            begin = min(len(slowest), max(0, member.missed_steps - joined))
            own = slice(begin, begin + len(rows))
            known_s = slowest["iteration_s"][own]
            slower = np.flatnonzero(~(rows["iteration_s"] <= known_s) & (find_recorded(rows) | (known_s < 0)))
            slowest[begin + slower] = rows[slower]
            tokens[own] += np.maximum(rows["tokens"], 0)
            counted[own] |= rows["counted"]
            known_ns[own] = np.maximum(known_ns[own], rows["end_unix_ns"])
            known_ns[own.stop :] = np.maximum(known_ns[own.stop :], member.gone_ns or 0)
        return slowest, np.where(counted, 0, tokens), known_ns

    def count_until(self, cursor_ns: int) -> int:
        """Return how many steps all ranks had finished at the cursor."""
        return int(np.searchsorted(self.known_ns, cursor_ns, "right"))

    def first_iterations(self, count: int) -> Iterations:
        """Return the first ``count`` iterations; the same object for the same count."""
        if self._last_iterations is None or self._last_iterations[0] != count:
            self._last_iterations = (count, _build_iterations(self.rows[:count]))
        return self._last_iterations[1]

    def iterations_on(self, rank: int, count: int) -> Iterations:
        """Return the first ``count`` iterations as recorded on one rank; the same object as the last time."""
        if rank != self._rank:
            self._rank, self._rank_rows, self._last_on_rank = rank, GrowingArray(STEP_DTYPE), None
        if count > len(self._rank_rows):
            self._add_rank_rows(rank, count)
        if self._last_on_rank is None or self._last_on_rank[0] != count:
            self._last_on_rank = count, replace(_build_iterations(self._rank_rows.rows[:count]), rank=rank)
        return self._last_on_rank[1]

    def _add_rank_rows(self, rank: int, count: int) -> None:
        done = len(self._rank_rows)
        rows = self._rank_rows.add_rows(count - done)
        rows[:] = self.rows[done:count]
        begin = 0
        for members, joined in zip(self._attempts, self._joined_counts, strict=False):
            low, high = max(done, begin), min(count, begin + joined)
            if low < high:
                _copy_steps(members, rank, low - begin, rows[low - done : high - done])
            begin += joined


def _join_complete(steps: Sequence[Rows]) -> tuple[Rows, NDArray[np.int64], NDArray[np.int64]]:
    """Return the same for members that all have all of the steps, at once: with hundreds of ranks a join took 10 ms."""
    rows = join_rows(steps).reshape(len(steps), -1)
    seconds = np.where(np.isnan(rows["iteration_s"]), -np.inf, rows["iteration_s"])
    slowest = rows[seconds.argmax(axis=0), np.arange(rows.shape[1])]
    tokens = np.where(rows["counted"].any(axis=0), 0, np.maximum(rows["tokens"], 0).sum(axis=0))
    return slowest, tokens, rows["end_unix_ns"].max(axis=0)


def _copy_steps(members: Sequence[AttemptMember], rank: int, begin: int, rows: Rows) -> None:
    """Overwrite an attempt's steps from ``begin`` on with those that this rank recorded."""
    member = next((member for member in members if len(member.rows) and member.rows["rank"][0] == rank), None)
    if member is not None:
        own = member.read_steps(begin, begin + len(rows))
        shown = rows[max(0, member.missed_steps - begin) :][: len(own)]
        recorded = find_recorded(own) & (own["step"] == shown["step"])
        shown[recorded] = own[recorded]


def _find_end(members: Sequence[AttemptMember]) -> int:
    """Return how many steps all live members have finished, or any member where all are gone."""
    live = [member.step_count for member in members if member.gone_ns is None]
    return min(live) if live else max((member.step_count for member in members), default=0)


def _build_iterations(rows: Rows) -> Iterations:
    total: Floats = rows["iteration_s"]
    phases: dict[str, Floats] = {name: rows[column] for name, column in MAIN_PHASES.items()}
    if (stages := np.nan_to_num(rows["stages_s"])).any():
        phases["stages"] = stages
    phases["other"] = np.maximum(0.0, total - sum(phases.values(), np.zeros(len(rows))))
    if rows["counted"].any():
        phases["unknown"] = np.where(rows["counted"], total, 0.0)
    return Iterations(rows["step"], rows["begin_unix_ns"] / 1e9, total, phases, rows["skipped"])
