"""A ledger as lines of a table: each row now, at the peak and as expected, and sums between rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerotop.analysis.formatting import BINARY, ByteUnits
from zerotop.analysis.memory import ledger_rows
from zerotop.analysis.memory.expected.zero_model import Difference
from zerotop.analysis.memory.host_ledger import LABELS as HOST_LABELS
from zerotop.analysis.memory.host_ledger import WORKERS, WORKERS_BASIS, HostLedger
from zerotop.analysis.memory.tensor_inventory import GRADIENTS, OPTIMIZER_STATE, is_after_update

SUM_ALLOCATED, SUM_RESERVED, SUM_JOB, SUM_DEVICE, SUM_RESIDENT = "allocated", "reserved", "job", "device", "resident"

FREED, TO_COME, OUTDATED = "freed", "to come", "outdated"

# From the innermost sum to the device; each sum holds the ones before it.
_SUMS = (
    (ledger_rows.ALLOCATED, SUM_ALLOCATED, "allocated"),
    ((ledger_rows.UNALLOCATED, ledger_rows.OTHER_STREAMS, ledger_rows.PRIVATE), SUM_RESERVED, "reserved"),
    ((ledger_rows.OUTSIDE, ledger_rows.OTHER_RANKS, ledger_rows.JOB), SUM_JOB, "this job"),
    (
        (ledger_rows.OTHERS, ledger_rows.BEFORE, ledger_rows.DRIVER, ledger_rows.REST, ledger_rows.FREE, ledger_rows.APART),
        SUM_DEVICE,
        "total",
    ),
)


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line. Bytes; None is not known, or has no meaning for the line."""

    key: str  # of a row, or one of the sums
    label: str
    now_bytes: int
    peak_bytes: int | None
    expected_bytes: int | None = None
    is_sum: bool = False
    pinned_bytes: int = 0  # of a host's row
    per_parameter: float | None = None  # bytes, of a host's row
    basis: str = ""  # the source of the figure, in a few words
    row: ledger_rows.LedgerRow | None = None  # of a GPU now
    # Why the difference says nothing: FREED until the next backward, TO_COME, or OUTDATED by a change since the count.
    absence_reason: str = ""

    def describe(self, units: ByteUnits = BINARY) -> str:
        """Return the line's name for readers."""
        return self.row.describe(units) if self.row is not None else self.label

    @property
    def difference_bytes(self) -> int | None:
        """Measured less expected."""
        return None if self.expected_bytes is None else self.now_bytes - self.expected_bytes


def build_gpu_lines(
    now: ledger_rows.GpuLedger, peak: ledger_rows.GpuLedger | None, differences: Sequence[Difference]
) -> tuple[MemoryLine, ...]:
    """Return the lines of one GPU; the last is the whole device."""
    by_key = {difference.key: difference for difference in differences}
    rows_now = {row.key: row for row in now.rows}
    lines: list[MemoryLine] = []
    total, total_at_peak = 0, 0
    for keys, name, label in _SUMS:
        built = (_build_line(key, now, peak, by_key.get(key), rows_now.get(key)) for key in keys)
        rows = [row for row in built if row is not None]
        total += now.sum_bytes(*keys)
        total_at_peak += peak.sum_bytes(*keys) if peak is not None else 0
        lines += rows
        is_device = name == SUM_DEVICE
        # A sum right after another one would only repeat it.
        if is_device or (rows and total):
            lines.append(MemoryLine(name, label, total, total_at_peak if peak is not None else None, is_sum=True))
    return tuple(lines)


def _build_line(
    key: str,
    now: ledger_rows.GpuLedger,
    peak: ledger_rows.GpuLedger | None,
    difference: Difference | None,
    row: ledger_rows.LedgerRow | None,
) -> MemoryLine | None:
    """Return a row's line; None if it is zero now, at the peak and as expected. UNEXPLAINED always has one."""
    size, at_peak = now.sum_bytes(key), peak.sum_bytes(key) if peak is not None else None
    expected = difference.expected_bytes if difference is not None else None
    if not size and not at_peak and not (row is not None and (expected or key == ledger_rows.UNEXPLAINED)):
        return None
    basis = row.basis if row is not None else ""
    line = MemoryLine(key, ledger_rows.LABELS[key], size, at_peak, expected, basis=basis, row=row)
    is_outdated = row is not None and row.is_outdated and expected is not None
    return replace(line, absence_reason=OUTDATED if is_outdated else _explain_absence(difference, basis))


def _explain_absence(difference: Difference | None, basis: str) -> str:
    """Return why bytes are missing: gradients exist until the update, optimizer state from the first update on."""
    if difference is None or 2 * difference.measured_bytes >= (difference.expected_bytes or 0):
        return ""
    if difference.note:
        return FREED
    return TO_COME if difference.key in (GRADIENTS, OPTIMIZER_STATE) and not is_after_update(basis) else ""


def build_host_lines(now: HostLedger, differences: Sequence[Difference]) -> tuple[MemoryLine, ...]:
    """Return the lines of one rank's host memory: rows, their sum, and the memory of DataLoader workers beyond it."""
    by_key = {difference.key: difference for difference in differences}
    expected = {key: difference.expected_bytes for key, difference in by_key.items()}
    lines = [
        MemoryLine(
            row.key,
            row.label,
            row.bytes,
            None,
            expected.get(row.key),
            absence_reason=_explain_absence(by_key.get(row.key), row.basis),
            pinned_bytes=row.pinned_bytes,
            per_parameter=row.per_parameter,
            basis=row.basis,
        )
        for row in now.rows
        if row.bytes or expected.get(row.key)
    ]
    pinned = sum(row.pinned_bytes for row in now.rows)
    lines.append(MemoryLine(SUM_RESIDENT, "resident", now.resident_bytes, None, is_sum=True, pinned_bytes=pinned))
    if now.worker_bytes is not None:
        lines.append(MemoryLine(WORKERS, HOST_LABELS[WORKERS], now.worker_bytes, None, basis=WORKERS_BASIS))
    return tuple(lines)
