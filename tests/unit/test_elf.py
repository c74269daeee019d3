"""Where symbols lie in a file, whatever machine it is for."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest

from zerotop_probe.outside.attaching.ptrace import elf


def make_program(kind: int, number: int) -> bytes:
    """A file with one segment at 0x400000, a symbol table and the names."""
    texts = b"\0other\0sought\0"
    symbols = struct.pack("<24xIBBHQQ", texts.index(b"sought"), 0x12, 0, 1, 0x402234, 8)
    begin = 64 + 56
    sections = begin + len(symbols) + len(texts)
    head = struct.pack("<6s10xHHIQQQIHHHHHH", b"\x7fELF\2\1", kind, number, 1, 0, 64, sections, 0, 64, 56, 1, 64, 3, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0x400000, 0x400000, 4096, 4096, 4096)
    table = bytes(64) + struct.pack("<IIQQQQIIQQ", 0, 11, 0, 0, begin, len(symbols), 2, 0, 8, 24)
    table += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, begin + len(symbols), len(texts), 0, 0, 1, 0)
    return head + segment + symbols + texts + table


@pytest.mark.parametrize(("number", "name"), [(62, "x86_64"), (183, "aarch64"), (243, "243")])
@pytest.mark.parametrize(("kind", "movable", "value"), [(3, True, 0x2234), (2, False, 0x402234)])
def test_a_symbol_of_a_file_for_any_machine(
    tmp_path: Path, number: int, name: str, kind: int, movable: bool, value: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(make_program(kind, number))
    symbols = elf.read_symbols(str(path), ["sought", "absent"])
    assert symbols == elf.Symbols(name, movable, {"sought": value})


def test_a_file_that_is_damaged_anywhere(tmp_path: Path) -> None:
    path, whole = tmp_path / "file", make_program(3, 62)
    for position in range(6, len(whole)):
        path.write_bytes(whole[:position] + b"\xff" * 8 + whole[position + 8 :])
        with contextlib.suppress(elf.NotElf, OSError):
            elf.read_symbols(str(path), ["sought"])


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"#!/bin/sh\n".ljust(64))
    with pytest.raises(elf.NotElf, match="is not a 64-bit ELF file"):
        elf.read_symbols(str(path), ["any"])
