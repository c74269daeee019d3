"""The anonymous memory that a process shares with no other, estimated from a sample of its pages.

A forked process shares its parent's pages until one of them writes to them; the kernel's RssAnon counts shared pages too.
``smaps_rollup`` would tell exactly, but it visits every page while the process cannot map memory.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_right
from itertools import accumulate

from zerotop_probe.outside import procfs

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Writable private mappings, in which all anonymous pages but a few lie.
_WRITABLE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .w.p ", re.MULTILINE)
_MAX_MAPS = 1 << 22
# Pages are read in runs, evenly spread over the mappings: 2 ms for a process.
_RUNS, _RUN_PAGES = 256, 8
# Bits of an entry of `/proc/PID/pagemap`: in memory, of a file or shared memory, mapped by one process only.
_PRESENT, _OF_FILE, _EXCLUSIVE = 1 << 63, 1 << 61, 1 << 56


def estimate_private_bytes(pid: int) -> int | None:
    """Return the anonymous bytes that only this process maps; None where the kernel does not tell."""
    status = re.search(rb"^RssAnon:\s+(\d+) kB", procfs.read_file(f"/proc/{pid}/status", 4096), re.MULTILINE)
    mappings = [
        (int(begin, 16) // _PAGE_BYTES, int(end, 16) // _PAGE_BYTES)
        for begin, end in _WRITABLE.findall(procfs.read_file(f"/proc/{pid}/maps", _MAX_MAPS))
    ]
    if status is None or not mappings:
        return None
    try:
        descriptor = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        entries = _read_sample(descriptor, mappings)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    anonymous = [entry for entry in entries if entry & (_PRESENT | _OF_FILE) == _PRESENT]
    if not anonymous:
        return None
    share = sum(1 for entry in anonymous if entry & _EXCLUSIVE) / len(anonymous)
    return round(share * (int(status[1]) << 10))


def _read_sample(descriptor: int, mappings: list[tuple[int, int]]) -> array[int]:
    """Return entries of pages that are evenly spread over the mappings (page numbers). Raise OSError."""
    entries = array("Q")
    ends = list(accumulate(end - begin for begin, end in mappings))
    step = max(_RUN_PAGES, ends[-1] // _RUNS)
    for position in range(0, ends[-1], step):
        index = bisect_right(ends, position)
        _, end = mappings[index]
        page = end - (ends[index] - position)
        content = os.pread(descriptor, 8 * min(_RUN_PAGES, end - page), 8 * page)
        entries.frombytes(content[: len(content) // 8 * 8])
    return entries
