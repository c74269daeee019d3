"""Looking up symbols in a 64-bit ELF file, without reading the process."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import BinaryIO, NamedTuple

_DYNAMIC_SYMBOLS, _SYMBOLS = 11, 2
_LOAD_SEGMENT = 1
_MACHINES = {62: "x86_64", 183: "aarch64"}
_SYMBOL = struct.Struct("<IBBHQQ")


class NotElf(ValueError):
    """The file is not a 64-bit little-endian ELF file."""


class _Section(NamedTuple):
    kind: int
    offset: int
    size: int
    link: int


class Symbols(NamedTuple):
    """The values of symbols: relative to the load address of file offset 0 if ``movable``, else absolute."""

    machine: str
    movable: bool
    offsets: dict[str, int]


def read_symbols(path: str, names: Collection[str]) -> Symbols:
    """Look up ``names`` among the symbols of a file; omit names that it does not define.

    Raises NotElf, OSError.
    """
    with open(path, "rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            raise NotElf(f"{path} is not a 64-bit ELF file")
        kind, machine = struct.unpack_from("<HH", head, 16)
        movable = kind == 3
        try:
            base = _find_base(file, head) if movable else 0
            values = _search_sections(file, _read_sections(file, head), names)
        except (struct.error, IndexError, ValueError, OverflowError, MemoryError) as error:
            raise NotElf(f"{path} is truncated or damaged") from error
    offsets = {name: value - base for name, value in values.items()}
    return Symbols(_MACHINES.get(machine, str(machine)), movable, offsets)


def _find_base(file: BinaryIO, head: bytes) -> int:
    """Return the address for which offset 0 of the file is linked."""
    (start,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    file.seek(start)
    table = file.read(size * count)
    for position in range(0, len(table) - size + 1, size):
        kind, _flags, offset, address = struct.unpack_from("<IIQQ", table, position)
        if kind == _LOAD_SEGMENT:
            return int(address - offset)
    raise NotElf("The file has no load segment")


def _read_sections(file: BinaryIO, head: bytes) -> list[_Section]:
    (start,) = struct.unpack_from("<Q", head, 40)
    size, count = struct.unpack_from("<HH", head, 58)
    file.seek(start)
    table = file.read(size * count)
    sections = []
    for number in range(count):
        fields = struct.unpack_from("<IIQQQQIIQQ", table, number * size)
        sections.append(_Section(fields[1], fields[4], fields[5], fields[6]))
    return sections


def _search_sections(file: BinaryIO, sections: list[_Section], names: Collection[str]) -> dict[str, int]:
    values: dict[str, int] = {}
    # Exported symbols first: they are few, and stripped files have no others.
    for kind in (_DYNAMIC_SYMBOLS, _SYMBOLS):
        for section in sections:
            if section.kind == kind and len(values) < len(names):
                values.update(_iter_symbols(file, section, sections[section.link], names))
    return values


def _iter_symbols(file: BinaryIO, section: _Section, strings: _Section, names: Collection[str]) -> Iterator[tuple[str, int]]:
    text, table = _read_content(file, strings), _read_content(file, section)
    by_position = {position: name for name in names for position in _iter_positions(text, name)}
    for fields in _SYMBOL.iter_unpack(table[: len(table) - len(table) % _SYMBOL.size]):
        name = by_position.get(fields[0])
        is_defined = fields[3] != 0 and fields[4] != 0
        if name is not None and is_defined:
            yield name, fields[4]


def _iter_positions(text: bytes, name: str) -> Iterator[int]:
    """Yield the positions of a name; linkers store a name as the tail of a longer one."""
    needle = name.encode() + b"\0"
    position = text.find(needle)
    while position >= 0:
        yield position
        position = text.find(needle, position + 1)


def _read_content(file: BinaryIO, section: _Section) -> bytes:
    file.seek(section.offset)
    return file.read(section.size)
