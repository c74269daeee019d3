"""Compute the unpacked size of a Parquet file's pages before a library unpacks them.

A page of a few kilobytes may declare two gigabytes, which Polars would allocate. The layout is that of parquet.thrift in the
Parquet format's specification, written in Thrift's compact protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

_MAGIC = b"PAR1"
_MAX_DEPTH = 12  # of structures inside each other; the format has six
# Numbers of fields in parquet.thrift.
_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3
_COMPRESSED_SIZE, _DATA_OFFSET, _DICTIONARY_OFFSET = 7, 9, 11
_PAGE_SIZE, _PAGE_COMPRESSED_SIZE = 2, 3
# Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = 1, 2, 3, (4, 5, 6), 7, 8, (9, 10), 11, 12


def iter_page_sizes(data: bytes) -> Iterator[int]:
    """Yield the unpacked size of every page, in bytes. Raise ValueError or LookupError if it is damaged."""
    if len(data) < 12 or data[-4:] != _MAGIC:
        raise ValueError("it is no Parquet file")
    (size,) = struct.unpack("<I", data[-8:-4])
    footer = _ThriftReader(data, max(0, len(data) - 8 - size)).read_struct()
    for group in footer.get(_ROW_GROUPS, ()):
        for column in group.get(_COLUMNS, ()):
            chunk = column[_META_DATA]
            position = min(offset for offset in (chunk[_DATA_OFFSET], chunk.get(_DICTIONARY_OFFSET)) if offset)
            end = position + chunk[_COMPRESSED_SIZE]
            while position < end:
                reader = _ThriftReader(data, position)
                page = reader.read_struct()
                yield max(0, page[_PAGE_SIZE])
                position = reader.position + max(0, page[_PAGE_COMPRESSED_SIZE])


class _ThriftReader:
    """Reads one structure after the other from bytes."""

    def __init__(self, data: bytes, position: int) -> None:
        if not 0 <= position < len(data):
            raise ValueError("an offset is outside of the file")
        self._data = data
        self.position = position

    def read_struct(self, depth: int = 0) -> dict[int, Any]:
        """Return a structure's values by the numbers of their fields."""
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._read_byte():
            number = number + (head >> 4) if head >> 4 else self._read_integer()
            fields[number] = self._read_value(head & 15, depth)
        return fields

    def _read_value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _BYTE:
            return self._read_byte()
        if kind in _INTEGERS:
            return self._read_integer()
        if kind in (_DOUBLE, _BINARY):
            length = 8 if kind == _DOUBLE else self._read_varint()
            self.position += length
            return None
        if kind in _LISTS:
            head = self._read_byte()
            count = head >> 4 if head >> 4 < 15 else self._read_varint()
            return [self._read_item(head & 15, depth) for _ in range(count)]
        if kind == _MAP:
            count = self._read_varint()
            kinds = self._read_byte() if count else 0
            return [(self._read_item(kinds >> 4, depth), self._read_item(kinds & 15, depth)) for _ in range(count)]
        if kind == _STRUCT:
            return self.read_struct(depth + 1)
        raise ValueError("a type is unknown")

    def _read_item(self, kind: int, depth: int) -> Any:
        # In lists a truth value takes a byte.
        return self._read_byte() if kind in (_TRUE, _FALSE) else self._read_value(kind, depth + 1)

    def _read_byte(self) -> int:
        value = self._data[self.position]
        self.position += 1
        return value

    def _read_varint(self) -> int:
        value = shift = 0
        while (byte := self._read_byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise ValueError("a number is too long")
        return value | byte << shift

    def _read_integer(self) -> int:
        value = self._read_varint()
        return value >> 1 ^ -(value & 1)
