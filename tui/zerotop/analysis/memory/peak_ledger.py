"""The ledger at the highest peak: what was in a GPU's memory when one of its ranks had allocated the most."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from zerotop.analysis.keys import GpuKey
from zerotop.analysis.memory.device_rows import build_device_rows
from zerotop.analysis.memory.gpu_ledger import (
    Holder,
    build_allocated_rows,
    collect_notes,
    find_capacity,
    find_gpu_name,
    find_pids,
    read_engines,
    read_gpu_by_allocator,
)
from zerotop.analysis.memory.ledger_rows import UNALLOCATED, GpuLedger, LedgerRow
from zerotop.analysis.memory.nvml_snapshot import read_device_memory
from zerotop.analysis.memory.phase_peaks import PhasePeak, RankPeaks, read_peaks
from zerotop.analysis.memory.tensor_inventory import read_inventory
from zerotop.analysis.processes.alive_ranks import identify_process, read_events
from zerotop.session.reader import Session, Source


@dataclass(frozen=True, slots=True)
class PeakLedger:
    """A GPU at the highest allocated peak of any rank on it, up to a cursor."""

    rank: int  # whose peak it is; other ranks on the GPU are as they were read last before
    peak: PhasePeak  # which phase owns it, in which step
    ledger: GpuLedger  # its rows add up to the whole device; what is free is what the others leave
    before: PhasePeak | None  # a higher one before the rank was entered, of which no more is known than its size


def read_peak_ledgers(
    session: Session, cursor_ns: int, gpu_keys: Collection[GpuKey] | None = None
) -> tuple[PeakLedger, ...]:
    """Each GPU with an allocator, by host and index. ``of``: only these of them."""
    on: dict[GpuKey, list[Source]] = {}
    for place, key in read_gpu_by_allocator(session, cursor_ns).items():
        if gpu_keys is None or key in gpu_keys:
            on.setdefault(key, []).append(session.sources["allocator"][place])
    found = []
    for key, sources in sorted(on.items()):
        peaks = [(source, told) for source in sources if (told := read_peaks(session, source, cursor_ns)).phases]
        if peaks:
            source, told = max(peaks, key=lambda one: one[1].owning_peak.allocated_bytes)
            found.append(_build_peak_ledger(session, key, source, told, sources, cursor_ns))
    return tuple(found)


def _build_peak_ledger(
    session: Session, gpu_key: GpuKey, source: Source, peaks: RankPeaks, sources: list[Source], cursor_ns: int
) -> PeakLedger:
    peak = peaks.owning_peak
    # When the window had ended the phase was over; its peak was in it.
    held = [_find_peak_holder(session, source, peak, peak.unix_ns - 1, cursor_ns)]
    held += [_find_holder_before(session, other, peak.unix_ns) for other in _find_other_ranks(source, sources, peak.unix_ns)]
    seen = read_device_memory(
        session, gpu_key, peak.unix_ns, find_pids(session, gpu_key[0], peak.unix_ns), [holder.source for holder in held]
    )
    reserved, allocated = (sum(getattr(holder, name) for holder in held) for name in ("reserved_bytes", "allocated_bytes"))
    engines = read_engines(session, peak.unix_ns)
    total = seen.total_bytes if seen is not None else find_capacity(engines, held, reserved)
    rows = [
        *build_device_rows(seen, total, reserved),
        LedgerRow(UNALLOCATED, reserved - allocated, "PyTorch's allocator, at the peak"),
    ]
    ledger = GpuLedger(
        host=gpu_key[0],
        index=gpu_key[1],
        name=find_gpu_name(session, gpu_key, peak.unix_ns),
        ranks=tuple(sorted(holder.process.rank for holder in held)),
        total_bytes=total,
        rows=tuple(rows + build_allocated_rows(held)),
        job_bytes=None,
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        unexplained_largest=held[0].inventory.unclaimed_largest if held[0].inventory is not None else (),
        notes=collect_notes(engines, seen, held),
    )
    return PeakLedger(source.rank, peak, ledger, peaks.peak_before_entry)


def _find_other_ranks(source: Source, sources: list[Source], time_ns: int) -> list[Source]:
    """The other ranks' tables on the GPU that were being written then; of one started again the last."""
    last: dict[int, Source] = {}
    for other in sorted(sources, key=lambda one: one.created_ns):
        if other.rank != source.rank and other.count_until(time_ns) and (other.last_ns or 0) >= time_ns:
            last[other.rank] = other
    return list(last.values())


def _find_peak_holder(session: Session, source: Source, peak: PhasePeak, time_ns: int, cursor_ns: int) -> Holder:
    reserved = max(peak.reserved_bytes, peak.allocated_bytes)
    told = read_inventory(session, identify_process(source), time_ns)
    if told is None and peak.is_in_step and read_events(session, "entered", identify_process(source), time_ns):
        # Entered in mid-training: what stays was there before anybody looked.
        told = read_inventory(session, identify_process(source), cursor_ns)
    return Holder(identify_process(source), source, reserved, peak.allocated_bytes, told)


def _find_holder_before(session: Session, source: Source, time_ns: int) -> Holder:
    row = source.array[source.count_until(time_ns) - 1]
    allocated = max(0, int(row["allocated_bytes"]))
    told = read_inventory(session, identify_process(source), time_ns)
    return Holder(identify_process(source), source, max(allocated, int(row["reserved_bytes"])), allocated, told)
