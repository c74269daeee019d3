"""Many iterations folded onto one, as a sampling oscilloscope does: what GPUs, cores and memory do at each place of it.

A sensor that looks ten times a second, or says the mean of 200 ms, shows little of one iteration. Iterations repeat, and its
samples fall on other places of each: see :mod:`waveform_align` for how places are found, :mod:`waveform_samples` for what a
sample means in time, :mod:`waveform_unfold` for how the means are told apart again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.steps.step_table import RankSteps
from zerotop.analysis.waveform.alignment import AlignedIterations, ChosenIterations, PhaseStretch, align_iterations
from zerotop.analysis.waveform.phase_bounds import PhaseRow, build_phase_rows
from zerotop.analysis.waveform.signals import RenewalDelays, Signal, SignalFolder
from zerotop.session.reader import Session

Floats = NDArray[np.float64]

# Ranks whose GPUs are folded together when all are looked at; of more, as many are taken from all over.
MOST_RANKS = 8


@dataclass(frozen=True, eq=False)
class WaveformFold:
    """The folded iteration. Places are seconds from its begin, which is the end of the optimizer step before."""

    rank: int | None  # whose; None for all ranks
    ranks: tuple[int, ...]  # whose GPUs are folded
    world: int  # ranks there are
    first_step: int
    last_step: int
    iterations: int  # how many of the lead's were folded
    left_out: dict[str, int]  # others between the first and the last, by reason: see waveform_align
    skipped: bool  # the folded iterations are ones whose update was skipped
    iteration_s: float
    stretches: tuple[PhaseStretch, ...]
    phases: tuple[PhaseRow, ...]
    signals: dict[str, Signal]
    process_count: int  # processes that ``cores`` and ``resident`` are of,
    host: str  # all on this host
    host_cores: int | None

    @property
    def gpu_count(self) -> int:
        """How many GPUs are folded."""
        return len(self.ranks) if "utilization" in self.signals else 0


def find_rank_processes(processes: Sequence[RankSteps], cursor_ns: int) -> list[RankSteps]:
    """The rank processes at the cursor, by rank: of several of a rank the last, since the job was started again."""
    last = {process.source.rank: process for process in processes if process.source.created_ns <= cursor_ns}
    return [last[rank] for rank in sorted(last)]


def fold_iterations(
    session: Session,
    ranks: Sequence[RankSteps],
    rank: int | None,
    chosen: ChosenIterations,
    cursor_ns: int,
    delays: RenewalDelays,
) -> WaveformFold | None:
    """Return the fold of the chosen steps of a rank or of all; None where there is nothing to fold.

    Args:
        ranks: from :func:`members`. The first, or the one of the rank, leads: ``chosen`` are places among its steps.
    """
    lead = choose_leader(ranks, rank)
    aligned = align_iterations(lead.source, lead.step_rows, chosen.indices)
    if aligned is None:
        return None
    steps = lead.step_rows["step"][aligned.indices]
    followers = [] if rank is not None else _choose_spread([other for other in ranks if other is not lead], MOST_RANKS - 1)
    parts = [aligned]
    for other in followers:
        part = _align_follower(other, steps)
        if part is not None and _has_same_phases(part, aligned):
            parts.append(part)
    reference = np.mean([part.median_bounds for part in parts], axis=0)
    stretches = tuple(aligned.build_stretches(reference))
    of = SignalFolder(session, parts, reference, cursor_ns, delays)
    here = [process for process in ranks if rank is None and process.source.host == lead.source.host] or [lead]
    signals = of.fold_signals([process.source.pid for process in here])
    left_out = dict(chosen.left_out)
    if other_shape := len(chosen.indices) - len(aligned.indices):
        left_out["other"] = other_shape
    return WaveformFold(
        rank=rank,
        ranks=tuple(part.source.rank for part in parts),
        world=len(ranks),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        iterations=len(steps),
        left_out=left_out,
        skipped=chosen.skipped,
        iteration_s=float(reference[-1]),
        stretches=stretches,
        phases=build_phase_rows(session, parts, stretches, float(reference[-1])),
        signals=signals,
        process_count=len(here),
        host=lead.source.host,
        host_cores=of.host_cores,
    )


def choose_leader(ranks: Sequence[RankSteps], rank: int | None) -> RankSteps:
    """The one whose steps are chosen from: of the rank, where there is such a one, else the first."""
    return next((process for process in ranks if process.source.rank == rank), ranks[0])


def _choose_spread(ranks: list[RankSteps], most: int) -> list[RankSteps]:
    if len(ranks) <= most:
        return ranks
    return [ranks[place] for place in np.linspace(0, len(ranks) - 1, most).astype(int).tolist()]


def _align_follower(process: RankSteps, steps: NDArray[np.int64]) -> AlignedIterations | None:
    """The same steps of another rank."""
    rows = process.step_rows
    low, high = np.searchsorted(rows["step"], (steps[0], steps[-1] + 1))
    return align_iterations(process.source, rows, low + np.flatnonzero(np.isin(rows["step"][low:high], steps)))


def _has_same_phases(one: AlignedIterations, other: AlignedIterations) -> bool:
    return np.array_equal(one.phases, other.phases) and np.array_equal(one.depths, other.depths)
