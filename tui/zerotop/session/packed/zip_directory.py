"""Read how large the directory of a zip archive is, before a library reads all of it into memory."""

from __future__ import annotations

import struct
from typing import BinaryIO

# The records at the end of an archive, see APPNOTE.TXT of PKWARE: the end, and for large archives its 64-bit form.
_END = struct.Struct("<4s4H2LH")
_LOCATOR_64 = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_MAX_COMMENT = (1 << 16) - 1


def read_directory_size(file: BinaryIO, size: int) -> int:
    """Return the bytes of the directory of an archive with ``size`` bytes; 0 if it has no end, as one that was cut short."""
    begin = max(0, size - _END.size - _MAX_COMMENT)
    file.seek(begin)
    tail = file.read(_END.size + _MAX_COMMENT)
    end = _find_end(tail)
    if end < 0:
        return 0
    directory_bytes = int(_END.unpack_from(tail, end)[5])
    if end >= _LOCATOR_64.size:
        magic, _, offset, _ = _LOCATOR_64.unpack_from(tail, end - _LOCATOR_64.size)
        if magic == b"PK\x06\x07" and offset + _END_64.size <= size:
            file.seek(begin + end - _LOCATOR_64.size - _END_64.size)
            record = file.read(_END_64.size)
            if len(record) == _END_64.size and record[:4] == b"PK\x06\x06":
                directory_bytes = max(directory_bytes, int(_END_64.unpack(record)[8]))
    return directory_bytes


def _find_end(tail: bytes) -> int:
    """Return where the end record begins, as :mod:`zipfile` finds it: without a comment, else the last one."""
    begin = len(tail) - _END.size
    if begin >= 0 and tail.startswith(b"PK\x05\x06", begin) and tail.endswith(b"\0\0"):
        return begin
    last = tail.rfind(b"PK\x05\x06")
    return last if last <= begin else -1
