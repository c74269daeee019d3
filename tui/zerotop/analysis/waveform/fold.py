"""Many iterations folded onto one, as a sampling oscilloscope does: what GPUs, cores and memory do at each place of it.

A sensor that looks ten times a second, or says the mean of 200 ms, shows little of one iteration. Iterations repeat, and its
samples fall on other places of each: see :mod:`waveform_align` for how places are found, :mod:`waveform_samples` for what a
sample means in time, :mod:`waveform_unfold` for how the means are told apart again.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.steps.step_table import RankSteps
from zerotop.analysis.waveform.alignment import Aligned, Chosen, Stretch, align
from zerotop.analysis.waveform.phase_bounds import PhaseRow, phase_rows
from zerotop.analysis.waveform.signals import Folder, Late, Signal
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
    stretches: tuple[Stretch, ...]
    phases: tuple[PhaseRow, ...]
    signals: dict[str, Signal]
    cores_of: int  # processes that ``cores`` and ``resident`` are of,
    host: str  # all on this host
    host_cores: int | None

    @property
    def gpus(self) -> int:
        """How many GPUs are folded."""
        return len(self.ranks) if "utilization" in self.signals else 0


def members(processes: Sequence[RankSteps], cursor_ns: int) -> list[RankSteps]:
    """The rank processes at the cursor, by rank: of several of a rank the last, since the job was started again."""
    last = {process.source.rank: process for process in processes if process.source.born_ns <= cursor_ns}
    return [last[rank] for rank in sorted(last)]


def folding(
    session: Session, ranks: Sequence[RankSteps], rank: int | None, chosen: Chosen, cursor_ns: int, late: Late
) -> Generator[None, None, WaveformFold | None]:
    """The fold of the chosen steps of a rank or of all, in pieces of milliseconds; None where there is nothing to fold.

    Args:
        ranks: from :func:`members`. The first, or the one of the rank, leads: ``chosen`` are places among its steps.
    """
    lead = leader(ranks, rank)
    aligned = align(lead.source, lead.rows, chosen.places)
    if aligned is None:
        return None
    steps = lead.rows["step"][aligned.places]
    followers = [] if rank is not None else _spread([other for other in ranks if other is not lead], MOST_RANKS - 1)
    parts = [aligned]
    for other in followers:
        yield
        part = _follow(other, steps)
        if part is not None and _same(part, aligned):
            parts.append(part)
    yield
    reference = np.mean([part.reference for part in parts], axis=0)
    stretches = tuple(aligned.stretches(reference))
    of = Folder(session, parts, reference, cursor_ns, late)
    here = [process for process in ranks if rank is None and process.source.host == lead.source.host] or [lead]
    signals = yield from of.signals([process.source.pid for process in here])
    left_out = dict(chosen.left_out)
    if other_shape := len(chosen.places) - len(aligned.places):
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
        phases=phase_rows(session, parts, stretches, float(reference[-1])),
        signals=signals,
        cores_of=len(here),
        host=lead.source.host,
        host_cores=of.host_cores,
    )


def leader(ranks: Sequence[RankSteps], rank: int | None) -> RankSteps:
    """The one whose steps are chosen from: of the rank, where there is such a one, else the first."""
    return next((process for process in ranks if process.source.rank == rank), ranks[0])


def _spread(ranks: list[RankSteps], most: int) -> list[RankSteps]:
    if len(ranks) <= most:
        return ranks
    return [ranks[place] for place in np.linspace(0, len(ranks) - 1, most).astype(int).tolist()]


def _follow(process: RankSteps, steps: NDArray[np.int64]) -> Aligned | None:
    """The same steps of another rank."""
    rows = process.rows
    low, high = np.searchsorted(rows["step"], (steps[0], steps[-1] + 1))
    return align(process.source, rows, low + np.flatnonzero(np.isin(rows["step"][low:high], steps)))


def _same(one: Aligned, other: Aligned) -> bool:
    return np.array_equal(one.phases, other.phases) and np.array_equal(one.depths, other.depths)
