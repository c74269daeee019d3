"""The state of PyTorch's allocator on every rank: cache flushes and their cost, fragmentation at the peak, configuration.

An allocation that does not fit flushes the cache (wholly free segments go back to the driver) and tries again. Such a retry
stops the GPU. DeepSpeed warns of it on rank 0 in stage 3 only; here every rank and stage is covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.memory.allocator_settings import AllocatorSettings, read_settings
from zerotop.analysis.memory.phase_peaks import find_window_steps, read_peaks
from zerotop.analysis.memory.reading_places import locate_readings
from zerotop.analysis.processes.phases import UNSEEN, find_phase_name
from zerotop.recording.keys import identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.reader import Recording, Source
from zerotop.recording.steps.missing_steps import find_recorded
from zerotop.recording.steps.step_dtype import has_phases
from zerotop_probe.recording.events import Hello, OutOfMemory
from zerotop_probe.recording.tables import TICK, UNKNOWN

_MOST_FLUSHES = 100


@dataclass(frozen=True, slots=True)
class Flush:
    """Two readings between which an allocation succeeded only after a flush of the cache."""

    unix_ns: int  # of the later reading
    step: int
    phase: str  # the innermost at that time; UNSEEN_NAME in a counted step
    retries: int  # since the reading before
    freed_bytes: int  # by how much less is reserved than before; 0 where as much was reserved again
    extra_s: float | None  # by how much the step took longer than the median of steps without; None where not known


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """The allocator when it reserved the most: a window's exact peaks and inactive_split_bytes at its end, or a failure."""

    unix_ns: int
    step: int
    phase: str  # the owner of the window, see phase_peaks
    title: str  # "highest reserved in backward of step 6"
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int | None  # by tensors, before rounding; None where this torch does not count it
    inactive_split_bytes: int

    @property
    def unallocated_bytes(self) -> int:
        """Reserved but not allocated."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def unallocated_share(self) -> float:
        """Unallocated by reserved, 0 to 1."""
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
    extra_s: float | None  # over all steps with flushes; None where not known
    at_peak: Fragmentation | None
    inactive_split_bytes: int  # now
    segments: int | None  # now; None where not recorded
    settings: AllocatorSettings


def read_allocator_health(at: At, steps: NDArray[Any] | None = None) -> tuple[AllocatorHealth, ...]:
    """Return the health of every rank process with an allocator, gone or not, by rank.

    ``steps``: the finished steps of all ranks (``analysis.steps.step_table``), for the cost of flushes.
    """
    all_health = (read_rank_health(at, source, steps) for source in at.sources["allocator"])
    return tuple(sorted((health for health in all_health if health is not None), key=lambda health: health.rank))


def read_rank_health(at: At, source: Source, steps: NDArray[Any] | None = None) -> AllocatorHealth | None:
    """Return the health of one allocator's table; None before its first reading."""
    readings = source.until(at.cursor_ns)
    if not len(readings):
        return None
    last = readings[-1]
    process = identify_process(source)
    hello, errors = at.process_events(Hello, process), at.process_events(OutOfMemory, process)
    flushes = _find_flushes(
        at.recording, source, readings, steps[steps["rank"] == source.rank] if steps is not None else None
    )
    costs = {flush.step: flush.extra_s for flush in flushes if flush.extra_s is not None}
    # Older recordings have no count of segments, nor has another kind of allocator.
    segments = int(last["segments"]) if "segments" in last.dtype.names else -1
    return AllocatorHealth(
        rank=source.rank,
        host=source.host,
        pid=source.pid,
        # A failure has its own figures, which the next reading would repeat.
        retries=max([0, int(last["retries"]), *(error.retries or 0 for error in errors)]),
        ooms=max([0, int(last["ooms"]), *(error.ooms or 0 for error in errors)]),
        flushes=flushes,
        extra_s=sum(costs.values()) if costs else None,
        at_peak=_read_fragmentation(at, source, errors),
        inactive_split_bytes=max(0, int(last["inactive_split_bytes"])),
        segments=segments if segments >= 0 else None,
        settings=read_settings(hello[-1] if hello else None),
    )


def _find_flushes(
    recording: Recording, source: Source, readings: NDArray[Any], steps: NDArray[Any] | None
) -> tuple[Flush, ...]:
    retries = readings["retries"].astype(np.int64)
    indices = np.flatnonzero(np.diff(retries, prepend=min(0, retries[0])) > 0)
    usual_s = _measure_usual_seconds(readings["step"][indices], steps)
    return tuple(_build_flush(recording, source, index, steps, usual_s) for index in indices[-_MOST_FLUSHES:].tolist())


def _build_flush(
    recording: Recording, source: Source, index: int, steps: NDArray[Any] | None, usual_s: float | None
) -> Flush:
    row, before = source.array[index], source.array[index - 1] if index else None
    window = find_window_steps(recording, source, index)
    step = int(row["step"]) if row["edge"] != TICK else window.last + window.is_open
    (phase,) = locate_readings(recording, source, index, index + 1).phase.tolist()
    freed = int(before["reserved_bytes"]) - int(row["reserved_bytes"]) if before is not None else 0
    # A flush in one of several counted steps is read after the last of them.
    seconds = steps["iteration_s"][(steps["step"] == step) & has_phases(steps)].tolist() if steps is not None else []
    return Flush(
        unix_ns=int(row["time_ns"]) + source.offset_ns,
        step=step,
        phase=find_phase_name(phase if phase != UNKNOWN else UNSEEN),
        retries=int(row["retries"]) - (int(before["retries"]) if before is not None else 0),
        freed_bytes=max(0, freed),
        extra_s=seconds[0] - usual_s if usual_s is not None and seconds else None,
    )


def _measure_usual_seconds(flushed_steps: NDArray[Any], steps: NDArray[Any] | None) -> float | None:
    """Return the median duration of steps without a flush; the first step is slow for other reasons."""
    if steps is None or not len(flushed_steps):
        return None
    quiet = steps[1:][~np.isin(steps["step"][1:], flushed_steps) & find_recorded(steps[1:])]
    return float(np.median(quiet["iteration_s"])) if len(quiet) else None


def _read_fragmentation(at: At, source: Source, errors: Sequence[OutOfMemory]) -> Fragmentation | None:
    known = [_read_failed(error) for error in errors if error.reserved_bytes and error.allocated_bytes is not None]
    if (peak := read_peaks(at, source).reserved) is not None:
        row = source.array[peak.place]
        requested = int(row["requested_peak_bytes"])
        known.append(
            Fragmentation(
                unix_ns=peak.unix_ns,
                step=peak.step,
                phase=peak.phase,
                title=f"highest reserved {peak.place_text}",
                reserved_bytes=int(row["reserved_peak_bytes"]),
                allocated_bytes=int(row["allocated_peak_bytes"]),
                requested_bytes=requested if requested >= 0 else None,
                inactive_split_bytes=max(0, int(row["inactive_split_bytes"])),
            )
        )
    return max(known, key=lambda one: one.reserved_bytes, default=None)


def _read_failed(error: OutOfMemory) -> Fragmentation:
    """Return the allocator at a failed allocation: the window in which it failed has no peaks."""
    return Fragmentation(
        unix_ns=error.unix_ns,
        step=error.step if error.step is not None else -1,
        phase=error.phase or "",
        title="reserved at the failure",
        reserved_bytes=error.reserved_bytes or 0,
        allocated_bytes=error.allocated_bytes or 0,
        requested_bytes=None,
        inactive_split_bytes=max(0, error.inactive_split_bytes or 0),
    )
