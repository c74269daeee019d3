"""A ledger as lines of a table: rows now and at the peak, what was expected of each, and the sums between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.memory.host_ledger import NOT_RESIDENT, PINNED_SPARE, HostLedger
from zerotop.analysis.memory.host_ledger import REST as HOST_REST
from zerotop.analysis.memory.ledger_rows import (
    ACTIVATIONS,
    ALLOCATED,
    APART,
    BEFORE,
    CUBLAS,
    DRIVER,
    FREE,
    JOB,
    LABELS,
    OTHERS,
    OUTSIDE,
    REST,
    UNALLOCATED,
    UNEXPLAINED,
    GpuLedger,
)
from zerotop.analysis.memory.tensor_inventory import AFTER_UPDATE, GRADIENTS, MOMENT_TEXTS, OPTIMIZER_STATE
from zerotop.analysis.memory.zero_model import Difference

SUM_ALLOCATED, SUM_RESERVED, SUM_JOB, SUM_DEVICE, SUM_RESIDENT = "allocated", "reserved", "job", "device", "resident"

FREED, TO_COME = "freed", "to come"

# From the innermost sum to the device; each sum holds the ones before it.
_SUMS = (
    (ALLOCATED, SUM_ALLOCATED, "allocated"),
    ((UNALLOCATED,), SUM_RESERVED, "reserved"),
    ((OUTSIDE, JOB), SUM_JOB, "this job"),
    ((OTHERS, BEFORE, DRIVER, REST, FREE, APART), SUM_DEVICE, "the device"),
)
_SHORT_LABELS = {
    ACTIVATIONS: "activations, temporaries",
    UNALLOCATED: "reserved, unallocated",
    DRIVER: "driver",
    BEFORE: "in use before the job",
    OUTSIDE: "outside PyTorch",
    JOB: "not read",
    CUBLAS: "cuBLAS workspaces",
    REST: "rest, not seen",
    PINNED_SPARE: "pinned beyond tensors",
    HOST_REST: "Python, libraries, batches",
    NOT_RESIDENT: "counted but not resident",
}


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line. Bytes; None is not known, or means nothing for it."""

    key: str  # of a row, or one of the sums
    label: str
    now_bytes: int
    peak_bytes: int | None
    expected_bytes: int | None = None
    is_sum: bool = False
    pinned_bytes: int = 0  # of a host's row
    per_parameter: float | None = None  # bytes, of a host's row
    basis: str = ""  # what it rests on, as a few words
    absence_reason: str = ""  # why what is expected is not there now: FREED until the next backward, or TO_COME

    @property
    def difference_bytes(self) -> int | None:
        """Measured less expected."""
        return None if self.expected_bytes is None else self.now_bytes - self.expected_bytes


def build_gpu_lines(now: GpuLedger, peak: GpuLedger | None, differences: Sequence[Difference]) -> tuple[MemoryLine, ...]:
    """Of one GPU: the last line is the whole device."""
    said = {each.key: each for each in differences}
    found: list[MemoryLine] = []
    so_far, so_far_peak = 0, 0
    for keys, name, label in _SUMS:
        rows = [_build_line(key, now, peak, said.get(key)) for key in keys if _is_worth_line(key, now, peak, said.get(key))]
        found += rows
        so_far += now.sum_bytes(*keys)
        so_far_peak += peak.sum_bytes(*keys) if peak is not None else 0
        if (rows and so_far) or name == SUM_DEVICE:
            found.append(MemoryLine(name, label, so_far, so_far_peak if peak is not None else None, is_sum=True))
    return tuple(_drop_repeats(found))


def _build_line(key: str, now: GpuLedger, peak: GpuLedger | None, difference: Difference | None) -> MemoryLine:
    at_peak = peak.sum_bytes(key) if peak is not None else None
    expected = difference.expected_bytes if difference is not None else None
    basis = next((row.basis for row in now.rows if row.key == key), "")
    away = _explain_absence(difference, basis)
    return MemoryLine(
        key, _SHORT_LABELS.get(key, LABELS[key]), now.sum_bytes(key), at_peak, expected, basis=basis, absence_reason=away
    )


def _explain_absence(difference: Difference | None, basis: str) -> str:
    """Gradients live from the backward to the update, and an optimizer makes its state in its first one."""
    if difference is None or 2 * difference.measured_bytes >= (difference.expected_bytes or 0):
        return ""
    if difference.note:
        return FREED
    return TO_COME if difference.key in (GRADIENTS, OPTIMIZER_STATE) and MOMENT_TEXTS[AFTER_UPDATE] not in basis else ""


def _is_worth_line(key: str, now: GpuLedger, peak: GpuLedger | None, difference: Difference | None) -> bool:
    """Nothing now, nothing then and nothing expected is no line; what is unexplained always is one."""
    known = {row.key for row in now.rows}
    if key == UNEXPLAINED and key in known:
        return True
    expected = difference is not None and difference.expected_bytes and key in known
    return bool(now.sum_bytes(key) or (peak is not None and peak.sum_bytes(key)) or expected)


def _drop_repeats(lines: Sequence[MemoryLine]) -> list[MemoryLine]:
    """Without sums that only repeat the line before."""
    return [
        line
        for place, line in enumerate(lines)
        if not (line.is_sum and line.key != SUM_DEVICE and place and lines[place - 1].is_sum)
    ]


def build_host_lines(now: HostLedger, differences: Sequence[Difference]) -> tuple[MemoryLine, ...]:
    """Of one rank's host memory: the last line is what is resident."""
    told = {each.key: each for each in differences}
    said = {key: each.expected_bytes for key, each in told.items()}
    rows = [
        MemoryLine(
            row.key,
            _SHORT_LABELS.get(row.key, row.label),
            row.bytes,
            None,
            said.get(row.key),
            absence_reason=_explain_absence(told.get(row.key), row.basis),
            pinned_bytes=row.pinned_bytes,
            per_parameter=row.per_parameter,
            basis=row.basis,
        )
        for row in now.rows
        if row.bytes or said.get(row.key)
    ]
    pinned = sum(row.pinned_bytes for row in now.rows)
    return (*rows, MemoryLine(SUM_RESIDENT, "resident", now.resident_bytes, None, is_sum=True, pinned_bytes=pinned))
