"""How PyTorch's allocator fares on every rank: cache flushes and their cost, fragmentation at the peak, its configuration.

An allocation that finds no room flushes the cache (segments that are wholly free go back to the driver) and tries again.
Such a retry stops the GPU: DeepSpeed warns of it on rank 0 in stage 3 only, here it is told of every rank and stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.memory.allocator_settings import AllocatorSettings, read_settings
from zerotop.analysis.memory.phase_peaks import read_peaks
from zerotop.analysis.processes.alive_ranks import identify_process, read_events
from zerotop.session.reader import Session, Source
from zerotop_probe.recording.tables import PHASES

# The flushes that are told one by one.
_MOST_FLUSHES = 100


@dataclass(frozen=True, slots=True)
class Flush:
    """Readings between which an allocation succeeded only after the cache was flushed."""

    unix_ns: int  # when the count was read that has it
    step: int
    phase: str  # the innermost at that time
    retries: int  # how many since the reading before
    freed_bytes: int  # by how much less is reserved than before; 0 where as much was taken again
    extra_s: float | None  # by how much the step took longer than the median of steps without; None where not known


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """The allocator when it held the most. All are exact peaks of one window, but inactive_split_bytes is as at its end."""

    unix_ns: int
    step: int
    phase: str  # which phase the window belongs to, see phase_peaks
    where: str  # "in backward of step 6"
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int | None  # what tensors asked for, before rounding; None where this torch does not count it
    inactive_split_bytes: int

    @property
    def unallocated_bytes(self) -> int:
        """Reserved but not allocated."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def unallocated_share(self) -> float:
        """Of reserved, 0 to 1."""
        return self.unallocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


@dataclass(frozen=True, slots=True)
class AllocatorHealth:
    """One rank's allocator up to a cursor."""

    rank: int
    host: str
    pid: int
    retries: int
    ooms: int
    flushes: tuple[Flush, ...]  # the last hundred, oldest first
    extra_s: float | None  # of all steps with flushes; None where not known
    at_peak: Fragmentation | None
    inactive_split_bytes: int  # now
    segments: int | None  # now: pieces of device memory; None where not recorded
    settings: AllocatorSettings  # of the allocator, as the rank's environment has them


def read_allocator_health(
    session: Session, cursor_ns: int, steps: NDArray[Any] | None = None
) -> tuple[AllocatorHealth, ...]:
    """Every rank process with an allocator, gone or not, by rank.

    ``steps``: the finished steps of all ranks (``analysis.steps.step_table``), for what flushes cost.
    """
    found = [read_rank_health(session, source, cursor_ns, steps) for source in session.sources["allocator"]]
    return tuple(sorted((health for health in found if health is not None), key=lambda health: health.rank))


def read_rank_health(
    session: Session, source: Source, cursor_ns: int, steps: NDArray[Any] | None = None
) -> AllocatorHealth | None:
    """One rank's; None before its first reading."""
    count = source.count_until(cursor_ns)
    if not count:
        return None
    last = source.array[count - 1]
    hello = read_events(session, "hello", identify_process(source), cursor_ns)
    flushes = _find_flushes(source, count, steps[steps["rank"] == source.rank] if steps is not None else None)
    costs = {flush.step: flush.extra_s for flush in flushes if flush.extra_s is not None}
    return AllocatorHealth(
        rank=source.rank,
        host=source.host,
        pid=source.pid,
        retries=max(0, int(last["retries"])),
        ooms=max(0, int(last["ooms"])),
        flushes=flushes,
        extra_s=sum(costs.values()) if costs else None,
        at_peak=_read_fragmentation(session, source, cursor_ns),
        inactive_split_bytes=max(0, int(last["inactive_split_bytes"])),
        segments=_read_segments(last),
        settings=read_settings(hello[-1].facts if hello else {}),
    )


def _read_segments(row: Any) -> int | None:
    """Older recordings have no count of them, nor has an allocator of another kind."""
    count = int(row["segments"]) if "segments" in row.dtype.names else -1
    return count if count >= 0 else None


def _find_flushes(source: Source, count: int, rows: NDArray[Any] | None) -> tuple[Flush, ...]:
    retries = source.array["retries"][:count].astype(np.int64)
    places = np.flatnonzero(np.diff(retries) > 0) + 1
    if len(retries) and retries[0] > 0:
        places = np.concatenate([[0], places])
    usual = _measure_usual_seconds(source, places, rows)
    return tuple(_build_flush(source, int(place), rows, usual) for place in places[-_MOST_FLUSHES:])


def _build_flush(source: Source, index: int, rows: NDArray[Any] | None, usual_s: float | None) -> Flush:
    row, before = source.array[index], source.array[index - 1] if index else None
    code, step = int(row["phase"]), int(row["step"])
    freed = int(before["reserved_bytes"]) - int(row["reserved_bytes"]) if before is not None else 0
    took = rows["iteration_s"][rows["step"] == step].tolist() if rows is not None else []
    return Flush(
        unix_ns=int(row["time_ns"]) + source.offset_ns,
        step=step,
        phase=PHASES[code] if code < len(PHASES) else "other",
        retries=int(row["retries"]) - (int(before["retries"]) if before is not None else 0),
        freed_bytes=max(0, freed),
        extra_s=took[0] - usual_s if usual_s is not None and took else None,
    )


def _measure_usual_seconds(source: Source, indices: NDArray[np.intp], rows: NDArray[Any] | None) -> float | None:
    """The median step without a flush. The first step, which is slow for other reasons, says nothing."""
    if rows is None or not len(indices):
        return None
    quiet = rows[1:][~np.isin(rows["step"][1:], source.array["step"][indices])]
    return float(np.median(quiet["iteration_s"])) if len(quiet) else None


def _read_fragmentation(session: Session, source: Source, cursor_ns: int) -> Fragmentation | None:
    peak = read_peaks(session, source, cursor_ns).reserved
    if peak is None:
        return None
    row = source.array[peak.place]
    requested = int(row["requested_peak_bytes"])
    return Fragmentation(
        unix_ns=peak.unix_ns,
        step=peak.step,
        phase=peak.phase,
        where=peak.place_text,
        reserved_bytes=int(row["reserved_peak_bytes"]),
        allocated_bytes=int(row["allocated_peak_bytes"]),
        requested_bytes=requested if requested >= 0 else None,
        inactive_split_bytes=max(0, int(row["inactive_split_bytes"])),
    )
