"""The rows of a ledger for what PyTorch does not hold of a GPU."""

from __future__ import annotations

from zerotop.analysis.memory.ledger_rows import APART, BEFORE, DRIVER, FREE, JOB, OTHERS, OUTSIDE, REST, Row
from zerotop.analysis.memory.nvml_snapshot import Look

_NVML = "NVML, its last reading"
_LEFT = "what the other rows leave of the device"
_MEANWHILE = "Memory was taken or given back between NVML's reading and PyTorch's: the ledger is of PyTorch's."
_NO_FIGURE = "Memory was taken or given back between NVML's reading and PyTorch's: what else holds some cannot be told."


def device_rows(seen: Look | None, total: int, reserved: int, *, read: bool = True) -> list[Row]:
    """All of a device but what PyTorch holds: the bytes of the rows are ``total - reserved``.

    ``read``: whether a rank's allocator was.
    """
    if seen is None:
        return [Row(REST, total - reserved, _LEFT)]
    if not read and seen.job_bytes is not None:
        return _unread_rows(seen, total)
    rows = [Row(FREE, max(0, total - seen.used_bytes), _NVML)]
    if seen.job_bytes is not None:
        rows.append(Row(DRIVER, max(0, seen.driver_bytes), _NVML))
        rows.append(Row(OTHERS, seen.others_bytes, _NVML))
    elif seen.before_bytes is not None:
        rows.append(Row(BEFORE, seen.before_bytes, "NVML's first reading"))
    if seen.outside_bytes is not None:
        rows.append(_outside_row(seen))
    elif seen.job_bytes is None:
        rows.append(Row(OUTSIDE, max(0, seen.used_bytes - reserved), "NVML's device less PyTorch's reserved"))
    return _fitted(rows, total, reserved)


def _unread_rows(seen: Look, total: int) -> list[Row]:
    """NVML alone. What processes held when it was last asked for them gives way to what is in use since."""
    used = min(total, seen.used_bytes)
    others = min(used, seen.others_bytes)
    driver = min(used - others, max(0, seen.driver_bytes))
    job = used - others - driver
    rows = [Row(FREE, total - used, _NVML), Row(DRIVER, driver, _NVML), Row(OTHERS, others, _NVML)]
    return [*rows, Row(JOB, job, _NVML)] if job else rows


def _fitted(rows: list[Row], total: int, reserved: int) -> list[Row]:
    """Rows that leave ``reserved`` of the device, where NVML's were read at another moment than the allocators."""
    apart = total - reserved - sum(row.bytes for row in rows)
    free = rows[0].bytes + apart
    if not apart:
        return rows
    if free >= 0:
        return [Row(FREE, free, _LEFT, _MEANWHILE), *rows[1:]]
    if reserved <= total:
        return [Row(REST, total - reserved, _LEFT, _NO_FIGURE)]
    return [*rows, Row(APART, apart, _LEFT, "PyTorch says that it holds more than the device has.")]


def _outside_row(seen: Look) -> Row:
    what = "NVML's process" if seen.job_bytes is not None else "NVML's device beyond its first reading,"
    note = "" if seen.settled else "PyTorch took or gave back memory while NVML looked: a few blocks may be counted wrongly."
    return Row(OUTSIDE, seen.outside_bytes or 0, f"{what} less PyTorch's reserved at that moment", note)
