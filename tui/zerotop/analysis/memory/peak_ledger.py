"""The ledger at the highest peak: what was in a GPU's memory when one of its ranks had allocated the most."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from zerotop.analysis.memory.device_rows import device_rows
from zerotop.analysis.memory.gpu_ledger import (
    Holder,
    allocated_rows,
    capacity,
    engines_until,
    gpu_name,
    lies_on,
    notes_of,
    pids_of,
)
from zerotop.analysis.memory.ledger_rows import UNALLOCATED, GpuLedger, Row
from zerotop.analysis.memory.nvml_snapshot import Key, look
from zerotop.analysis.memory.phase_peaks import PhasePeak, RankPeaks, peaks_of
from zerotop.analysis.memory.tensor_inventory import inventory
from zerotop.analysis.processes.alive_ranks import events_of, process_of
from zerotop.session.reader import Session, Source


@dataclass(frozen=True, slots=True)
class PeakLedger:
    """A GPU at the highest allocated peak of any rank on it, up to a cursor."""

    rank: int  # whose peak it is; other ranks on the GPU are as they were read last before
    peak: PhasePeak  # which phase owns it, in which step
    ledger: GpuLedger  # its rows add up to the whole device; what is free is what the others leave
    before: PhasePeak | None  # a higher one before the rank was entered, of which no more is known than its size


def ledger_at_peak(session: Session, cursor_ns: int, of: Collection[Key] | None = None) -> tuple[PeakLedger, ...]:
    """Each GPU with an allocator, by host and index. ``of``: only these of them."""
    on: dict[Key, list[Source]] = {}
    for place, key in lies_on(session, cursor_ns).items():
        if of is None or key in of:
            on.setdefault(key, []).append(session.sources["allocator"][place])
    found = []
    for key, sources in sorted(on.items()):
        peaks = [(source, told) for source in sources if (told := peaks_of(session, source, cursor_ns)).phases]
        if peaks:
            source, told = max(peaks, key=lambda one: one[1].owner.allocated_bytes)
            found.append(_at_peak(session, key, source, told, sources, cursor_ns))
    return tuple(found)


def _at_peak(
    session: Session, key: Key, source: Source, peaks: RankPeaks, sources: list[Source], cursor_ns: int
) -> PeakLedger:
    peak = peaks.owner
    # When the window had ended the phase was over; its peak was in it.
    held = [_holder_at(session, source, peak, peak.unix_ns - 1, cursor_ns)]
    held += [_holder_before(session, other, peak.unix_ns) for other in _beside(source, sources, peak.unix_ns)]
    seen = look(session, key, peak.unix_ns, pids_of(session, key[0], peak.unix_ns), [holder.source for holder in held])
    reserved, allocated = (sum(getattr(holder, name) for holder in held) for name in ("reserved_bytes", "allocated_bytes"))
    engines = engines_until(session, peak.unix_ns)
    total = seen.total_bytes if seen is not None else capacity(engines, held, reserved)
    rows = [*device_rows(seen, total, reserved), Row(UNALLOCATED, reserved - allocated, "PyTorch's allocator, at the peak")]
    ledger = GpuLedger(
        host=key[0],
        index=key[1],
        name=gpu_name(session, key, peak.unix_ns),
        ranks=tuple(sorted(holder.process.rank for holder in held)),
        total_bytes=total,
        rows=tuple(rows + allocated_rows(held)),
        job_bytes=None,
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        unexplained_largest=held[0].inventory.unclaimed_largest if held[0].inventory is not None else (),
        notes=notes_of(engines, seen, held),
    )
    return PeakLedger(source.rank, peak, ledger, peaks.before)


def _beside(source: Source, sources: list[Source], time_ns: int) -> list[Source]:
    """The other ranks' tables on the GPU that were being written then; of one started again the last."""
    last: dict[int, Source] = {}
    for other in sorted(sources, key=lambda one: one.born_ns):
        if other.rank != source.rank and other.count_known(time_ns) and (other.last_ns or 0) >= time_ns:
            last[other.rank] = other
    return list(last.values())


def _holder_at(session: Session, source: Source, peak: PhasePeak, time_ns: int, cursor_ns: int) -> Holder:
    reserved = max(peak.reserved_bytes, peak.allocated_bytes)
    told = inventory(session, process_of(source), time_ns)
    if told is None and peak.in_a_step and events_of(session, "entered", process_of(source), time_ns):
        # Entered in mid-training: what stays was there before anybody looked.
        told = inventory(session, process_of(source), cursor_ns)
    return Holder(process_of(source), source, reserved, peak.allocated_bytes, told)


def _holder_before(session: Session, source: Source, time_ns: int) -> Holder:
    row = source.array[source.count_known(time_ns) - 1]
    allocated = max(0, int(row["allocated_bytes"]))
    told = inventory(session, process_of(source), time_ns)
    return Holder(process_of(source), source, max(allocated, int(row["reserved_bytes"])), allocated, told)
