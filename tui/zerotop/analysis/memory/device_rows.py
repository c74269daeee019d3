"""The rows of a ledger for memory of a GPU that PyTorch does not reserve."""

from __future__ import annotations

from zerotop.analysis.formatting import Text, format_seconds
from zerotop.analysis.memory.ledger_rows import (
    APART,
    BEFORE,
    DRIVER,
    FREE,
    HOST,
    JOB,
    OTHER_RANKS,
    OTHERS,
    OUTSIDE,
    REST,
    LedgerRow,
)
from zerotop.analysis.memory.nvml_snapshot import DeviceMemory

_NVML = "NVML, its last reading"
_KERNEL = "/proc/meminfo, its last reading"
_NARROW_NOTE = "PyTorch's memory changed while NVML was read: a few blocks may be counted wrongly."
_WIDE_NOTE = "PyTorch's memory changed while NVML was read: outside PyTorch is at most this, and at least {least:bytes}."
_FEW_BLOCKS = 256 << 20
_LEFT = "the device less the other rows"
_MEANWHILE = "NVML and PyTorch samples differ in time: the rows use PyTorch's."
_NO_FIGURE = "NVML and PyTorch samples differ in time: the rest of the device cannot be divided."


def build_device_rows(
    device: DeviceMemory | None, total: int, reserved: int, *, allocators_read: bool = True
) -> list[LedgerRow]:
    """Return rows of ``total - reserved`` bytes. ``allocators_read``: whether a rank's allocator was read."""
    if device is None:
        return [LedgerRow(REST, total - reserved, _LEFT)]
    if device.host_bytes is not None:
        return _build_unified_rows(device, total, reserved, device.host_bytes)
    if not allocators_read and device.job_bytes is not None:
        return _build_unread_rows(device, total)
    rows = [LedgerRow(FREE, max(0, total - device.used_bytes), _NVML)]
    if device.job_bytes is not None:
        rows.append(LedgerRow(DRIVER, max(0, device.driver_bytes), _NVML))
        rows.append(LedgerRow(OTHERS, device.others_bytes, _NVML))
    elif device.before_bytes is not None:
        rows.append(LedgerRow(BEFORE, device.before_bytes, "NVML's first reading"))
    if device.outside_bytes is not None:
        rows += _build_outside_rows(device)
    elif device.job_bytes is None:
        rows.append(LedgerRow(OUTSIDE, max(0, device.used_bytes - reserved), "NVML's device less PyTorch's reserved"))
    return _fit_rows(rows, total, reserved)


def _build_unified_rows(device: DeviceMemory, total: int, reserved: int, host_bytes: int) -> list[LedgerRow]:
    """Return the rows of the one pool that GPU and host share."""
    outside = device.outside_bytes or 0
    rest = device.used_bytes - reserved - outside - device.others_bytes - host_bytes
    note = "" if rest >= 0 else "Less than the kernel's figure: a part of it is memory of the GPU, which is counted above."
    rows = [
        LedgerRow(FREE, total - device.used_bytes, _KERNEL),
        LedgerRow(HOST, max(0, host_bytes + min(0, rest)), "the kernel's figures of the job's processes", note),
        LedgerRow(REST, max(0, rest), _LEFT),
    ]
    if device.job_bytes is not None:
        rows += [LedgerRow(OTHERS, device.others_bytes, _NVML), *_build_outside_rows(device)]
    return _fit_rows(rows, total, reserved)


def _build_unread_rows(device: DeviceMemory, total: int) -> list[LedgerRow]:
    """Return NVML's figures alone; its older figure of other processes is limited to the memory in use now."""
    used = min(total, device.used_bytes)
    others = min(used, device.others_bytes)
    driver = min(used - others, max(0, device.driver_bytes))
    job = used - others - driver
    rows = [LedgerRow(FREE, total - used, _NVML), LedgerRow(DRIVER, driver, _NVML), LedgerRow(OTHERS, others, _NVML)]
    return [*rows, LedgerRow(JOB, job, _NVML)] if job else rows


def _fit_rows(rows: list[LedgerRow], total: int, reserved: int) -> list[LedgerRow]:
    """Return the rows changed so that they leave ``reserved``, where NVML was read at another moment than the allocators."""
    missing = total - reserved - sum(row.bytes for row in rows)
    free = rows[0].bytes + missing
    if not missing:
        return rows
    if free >= 0:
        return [LedgerRow(FREE, free, _LEFT, _MEANWHILE), *rows[1:]]
    if reserved <= total:
        return [LedgerRow(REST, total - reserved, _LEFT, _NO_FIGURE)]
    return [*rows, LedgerRow(APART, missing, _LEFT, "PyTorch reports more memory than the device has.")]


def _build_outside_rows(device: DeviceMemory) -> list[LedgerRow]:
    figure = "NVML's process" if device.job_bytes is not None else "NVML's device beyond its first reading,"
    outside, least = device.outside_bytes or 0, device.outside_least_bytes
    is_wide = not device.is_exact and outside - least > _FEW_BLOCKS
    note = "" if device.is_exact else Text(_WIDE_NOTE, {"least": least}) if is_wide else _NARROW_NOTE
    if device.outside_after_ns is not None:
        after = format_seconds(device.outside_after_ns / 1e9)
        note = f"Memory outside PyTorch is from NVML's reading {after} after this moment."
    by_others = min(outside, sum(size for _, size in device.by_other_ranks))
    basis = f"{figure} less PyTorch's reserved at that moment"
    row = LedgerRow(OUTSIDE, outside - by_others, basis, note, is_bound=is_wide)
    return [row, LedgerRow(OTHER_RANKS, by_others, "NVML's processes")] if by_others else [row]
