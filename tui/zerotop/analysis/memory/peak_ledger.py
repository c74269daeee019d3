"""The ledger at the highest peak: a GPU's memory when one of its ranks had allocated the most."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from zerotop.analysis.memory.gpu_holders import GpuHolder, find_growth, read_holder
from zerotop.analysis.memory.gpu_ledger import build_ledger
from zerotop.analysis.memory.ledger_rows import ACTIVATIONS, GpuLedger
from zerotop.analysis.memory.phase_peaks import PhasePeak, RankPeaks, read_peaks
from zerotop.analysis.memory.tensor_inventory import OPTIMIZER_STATE, TensorInventory, read_inventory
from zerotop.recording.keys import GpuKey, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import locate_allocators
from zerotop.recording.reader import Source
from zerotop_probe.recording.events import Engine, Entered


@dataclass(frozen=True, slots=True)
class PeakLedger:
    """A GPU at the highest allocated peak of any rank on it, up to a cursor."""

    rank: int  # whose peak it is; other ranks on the GPU are as at their last reading before
    peak: PhasePeak
    ledger: GpuLedger  # its rows add up to the whole device; free memory is what the other rows leave
    before: PhasePeak | None  # a higher peak before the rank was attached to, of which only the size is known


def read_peak_ledgers(at: At, gpu_keys: Collection[GpuKey] | None = None) -> tuple[PeakLedger, ...]:
    """Return a ledger for each GPU with an allocator, by host and index; with ``gpu_keys`` only for those."""
    by_gpu: dict[GpuKey, list[Source]] = {}
    for source, key in locate_allocators(at).items():
        if gpu_keys is None or key in gpu_keys:
            by_gpu.setdefault(key, []).append(source)
    ledgers = []
    for key, sources in sorted(by_gpu.items()):
        all_peaks = [(source, peaks) for source in sources if (peaks := read_peaks(at, source)).phases]
        if all_peaks:
            source, peaks = max(all_peaks, key=lambda pair: pair[1].owning_peak.allocated_bytes)
            ledgers.append(_build_peak_ledger(at, key, source, peaks, sources))
    return tuple(ledgers)


def _build_peak_ledger(at: At, gpu_key: GpuKey, source: Source, peaks: RankPeaks, sources: list[Source]) -> PeakLedger:
    peak = peaks.owning_peak
    holders = [_build_peak_holder(at, source, peak)]
    for other in _find_other_ranks(source, sources, peak.unix_ns):
        inventory = read_inventory(at.at(peak.unix_ns), identify_process(other))
        holders.append(replace(read_holder(at.at(peak.unix_ns), other), inventory=inventory))
    engines = at.at(peak.unix_ns).events_of(Engine)
    ledger = build_ledger(at.at(peak.unix_ns), gpu_key, holders, engines, at_peak=True, until_ns=at.cursor_ns)
    if not peak.is_in_step:
        rows = [replace(row, is_initial=row.key == ACTIVATIONS) for row in ledger.rows]
        ledger = replace(ledger, rows=tuple(rows))
    return PeakLedger(source.rank, peak, ledger, peaks.peak_before_entry)


def _find_other_ranks(source: Source, sources: list[Source], time_ns: int) -> list[Source]:
    """Return the other ranks' tables on the GPU that were being written at a time; of a restarted rank the last."""
    last: dict[int, Source] = {}
    for other in sorted(sources, key=lambda table: table.created_ns):
        if other.rank != source.rank and other.count_until(time_ns) and (other.last_ns or 0) >= time_ns:
            last[other.rank] = other
    return list(last.values())


def _build_peak_holder(at: At, source: Source, peak: PhasePeak) -> GpuHolder:
    process, reserved = identify_process(source), max(peak.reserved_bytes, peak.allocated_bytes)
    # The peak's window ended with its phase: the inventory must be of the moment before.
    inventory = read_inventory(at.at(peak.unix_ns - 1), process)
    if inventory is None and peak.is_in_step and at.at(peak.unix_ns - 1).process_events(Entered, process):
        # Attached in mid-training: permanent tensors were there before the first inventory.
        inventory = read_inventory(at, process)
    if inventory is not None and peak.phase == "step" and not inventory.device.get(OPTIMIZER_STATE):
        inventory = _add_new_state(inventory, read_inventory(at, process), peak.allocated_bytes)
    growth = find_growth(source, peak.unix_ns - 1, inventory)
    return GpuHolder(process, source, reserved, peak.allocated_bytes, inventory, growth=growth)


def _add_new_state(inventory: TensorInventory, later: TensorInventory | None, peak_bytes: int) -> TensorInventory:
    """Add the optimizer state that the update of the peak has made: optimizers make it before they compute with it."""
    made = later.device.get(OPTIMIZER_STATE, 0) if later is not None else 0
    room = peak_bytes - sum(inventory.device.values()) - inventory.cublas_bytes - inventory.unclaimed_bytes
    if later is None or not 0 < made <= room:
        return inventory
    return replace(inventory, device=inventory.device | {OPTIMIZER_STATE: made}, basis=later.basis)
