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
from zerotop.analysis.memory.tensor_inventory import AFTER_UPDATE, GRADIENTS, OPTIMIZER_STATE, WORDS
from zerotop.analysis.memory.zero_model import Difference

SUM_ALLOCATED, SUM_RESERVED, SUM_JOB, SUM_DEVICE, SUM_RESIDENT = "allocated", "reserved", "job", "device", "resident"

FREED, TO_COME = "freed", "to come"

# From the innermost sum to the device; each sum holds the ones before it.
_PARTS = (
    (ALLOCATED, SUM_ALLOCATED, "allocated"),
    ((UNALLOCATED,), SUM_RESERVED, "reserved"),
    ((OUTSIDE, JOB), SUM_JOB, "this job"),
    ((OTHERS, BEFORE, DRIVER, REST, FREE, APART), SUM_DEVICE, "the device"),
)
_SHORT = {
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
class Line:
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
    away: str = ""  # why what is expected is not there now: FREED until the next backward, or TO_COME

    @property
    def difference_bytes(self) -> int | None:
        """Measured less expected."""
        return None if self.expected_bytes is None else self.now_bytes - self.expected_bytes


def gpu_lines(now: GpuLedger, peak: GpuLedger | None, differences: Sequence[Difference]) -> tuple[Line, ...]:
    """Of one GPU: the last line is the whole device."""
    said = {each.key: each for each in differences}
    found: list[Line] = []
    so_far, so_far_peak = 0, 0
    for keys, name, label in _PARTS:
        rows = [_row(key, now, peak, said.get(key)) for key in keys if _worth(key, now, peak, said.get(key))]
        found += rows
        so_far += now.bytes_of(*keys)
        so_far_peak += peak.bytes_of(*keys) if peak is not None else 0
        if (rows and so_far) or name == SUM_DEVICE:
            found.append(Line(name, label, so_far, so_far_peak if peak is not None else None, is_sum=True))
    return tuple(_without_repeats(found))


def _row(key: str, now: GpuLedger, peak: GpuLedger | None, said: Difference | None) -> Line:
    at_peak = peak.bytes_of(key) if peak is not None else None
    expected = said.expected_bytes if said is not None else None
    basis = next((row.basis for row in now.rows if row.key == key), "")
    away = _away(said, basis)
    return Line(key, _SHORT.get(key, LABELS[key]), now.bytes_of(key), at_peak, expected, basis=basis, away=away)


def _away(said: Difference | None, basis: str) -> str:
    """Gradients live from the backward to the update, and an optimizer makes its state in its first one."""
    if said is None or 2 * said.measured_bytes >= (said.expected_bytes or 0):
        return ""
    if said.note:
        return FREED
    return TO_COME if said.key in (GRADIENTS, OPTIMIZER_STATE) and WORDS[AFTER_UPDATE] not in basis else ""


def _worth(key: str, now: GpuLedger, peak: GpuLedger | None, said: Difference | None) -> bool:
    """Nothing now, nothing then and nothing expected is no line; what is unexplained always is one."""
    known = {row.key for row in now.rows}
    if key == UNEXPLAINED and key in known:
        return True
    expected = said is not None and said.expected_bytes and key in known
    return bool(now.bytes_of(key) or (peak is not None and peak.bytes_of(key)) or expected)


def _without_repeats(lines: Sequence[Line]) -> list[Line]:
    """Without sums that only repeat the line before."""
    return [
        line
        for place, line in enumerate(lines)
        if not (line.is_sum and line.key != SUM_DEVICE and place and lines[place - 1].is_sum)
    ]


def host_lines(now: HostLedger, differences: Sequence[Difference]) -> tuple[Line, ...]:
    """Of one rank's host memory: the last line is what is resident."""
    told = {each.key: each for each in differences}
    said = {key: each.expected_bytes for key, each in told.items()}
    rows = [
        Line(
            row.key,
            _SHORT.get(row.key, row.label),
            row.bytes,
            None,
            said.get(row.key),
            away=_away(told.get(row.key), row.basis),
            pinned_bytes=row.pinned_bytes,
            per_parameter=row.per_parameter,
            basis=row.basis,
        )
        for row in now.rows
        if row.bytes or said.get(row.key)
    ]
    pinned = sum(row.pinned_bytes for row in now.rows)
    return (*rows, Line(SUM_RESIDENT, "resident", now.resident_bytes, None, is_sum=True, pinned_bytes=pinned))
