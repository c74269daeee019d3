"""Folds many iterations onto one, as a sampling oscilloscope does, to show GPUs, cores and memory over an iteration.

A sensor that reads ten times a second, or averages over 200 ms, shows little of one iteration. But iterations repeat, and
samples fall on different positions of each: :mod:`.alignment` finds the positions, :mod:`.samples` the time that a sample
covers, :mod:`.deconvolution` the signal behind the means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.waveform import alignment
from zerotop.analysis.waveform.phase_bounds import PhaseRow, build_phase_rows
from zerotop.analysis.waveform.signals import RenewalDelays, Signal, SignalFolder
from zerotop.recording.reader import Recording
from zerotop.recording.steps.missing_steps import find_recorded
from zerotop.recording.steps.step_table import RankSteps

# Most ranks whose GPUs are folded together; of more, evenly spread ones are chosen.
MOST_RANKS = 8


@dataclass(frozen=True, eq=False)
class WaveformFold:
    """The folded iteration. Positions are seconds from its begin: the end of the optimizer step before."""

    rank: int | None  # None for all ranks
    ranks: tuple[int, ...]  # whose GPUs are folded
    world: int  # number of all ranks
    first_step: int
    last_step: int
    iterations: int  # number of the leader's folded iterations
    left_out: dict[str, int]  # others between the first and last step, by reason: see ``ChosenIterations``
    long: alignment.LongIterations | None
    skipped: bool  # the updates of the folded iterations were skipped
    iteration_s: float  # mean of the folded iterations, as of their phases
    stretches: tuple[alignment.PhaseStretch, ...]
    phases: tuple[PhaseRow, ...]
    signals: dict[str, Signal]
    process_count: int  # processes in ``cores`` and ``resident``,
    host: str  # all on this host
    host_cores: int | None

    @property
    def gpu_count(self) -> int:
        """Number of folded GPUs."""
        return len(self.ranks) if "utilization" in self.signals else 0


def find_rank_processes(processes: Sequence[RankSteps], cursor_ns: int) -> list[RankSteps]:
    """Return the rank processes at the cursor, by rank: after a restart the last one of each rank."""
    last = {process.source.rank: process for process in processes if process.source.created_ns <= cursor_ns}
    return [last[rank] for rank in sorted(last)]


def fold_iterations(
    recording: Recording,
    ranks: Sequence[RankSteps],
    rank: int | None,
    chosen: alignment.ChosenIterations,
    cursor_ns: int,
    delays: RenewalDelays,
) -> WaveformFold | None:
    """Fold the chosen steps of a rank or of all ranks; None where there is nothing to fold.

    Args:
        ranks: from :func:`find_rank_processes`.
        chosen: indices of the steps of :func:`choose_leader`'s rank.
    """
    lead = choose_leader(ranks, rank)
    aligned = alignment.align_iterations(lead.source, lead.step_rows, chosen.indices)
    if aligned is None:
        return None
    steps = lead.step_rows["step"][aligned.indices]
    followers = [] if rank is not None else _choose_spread([other for other in ranks if other is not lead], MOST_RANKS - 1)
    parts = [aligned]
    for other in followers:
        part = _align_follower(other, steps)
        if part is not None and _has_same_phases(part, aligned):
            parts.append(part)
    reference = np.average([part.mean_bounds for part in parts], axis=0, weights=[len(part.bounds) for part in parts])
    if reference[-1] <= 0:  # of damaged records: iterations without length have no shape
        return None
    stretches = tuple(aligned.build_stretches(reference))
    folder = SignalFolder(recording, parts, reference, cursor_ns, delays)
    host_ranks = [process for process in ranks if rank is None and process.source.host == lead.source.host] or [lead]
    signals = folder.fold_signals([process.source.pid for process in host_ranks])
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
        long=chosen.long,
        skipped=chosen.skipped,
        iteration_s=float(reference[-1]),
        stretches=stretches,
        phases=build_phase_rows(recording, parts, stretches, float(reference[-1])),
        signals=signals,
        process_count=len(host_ranks),
        host=lead.source.host,
        host_cores=folder.host_cores,
    )


def choose_leader(ranks: Sequence[RankSteps], rank: int | None) -> RankSteps:
    """Return the rank's process, or the first one; iterations are chosen from its steps."""
    return next((process for process in ranks if process.source.rank == rank), ranks[0])


def _choose_spread(ranks: list[RankSteps], most: int) -> list[RankSteps]:
    if len(ranks) <= most:
        return ranks
    return [ranks[index] for index in np.linspace(0, len(ranks) - 1, most).astype(int).tolist()]


def _align_follower(process: RankSteps, steps: NDArray[np.int64]) -> alignment.AlignedIterations | None:
    """Align the same steps of another rank."""
    rows = process.step_rows
    low, high = np.searchsorted(rows["step"], (steps[0], steps[-1] + 1))
    same = np.isin(rows["step"][low:high], steps) & find_recorded(rows[low:high])
    return alignment.align_iterations(process.source, rows, low + np.flatnonzero(same))


def _has_same_phases(one: alignment.AlignedIterations, other: alignment.AlignedIterations) -> bool:
    return np.array_equal(one.phases, other.phases) and np.array_equal(one.depths, other.depths)
