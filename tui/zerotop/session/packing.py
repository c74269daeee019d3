"""Pack a recording into one small file to keep or to send, and unpack it.

The file is a zip whose members are the files of the session directory, deflated. Unpacking writes nothing to disk.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from zerotop.session.headers import DAMAGE_ERRORS, SessionError
from zerotop.session.storage import Folder
from zerotop_probe.recording.directory import SESSION_FILE

FileChooser = Callable[[set[str]], set[str]]
"""Selects the names of the files to unpack from those of all files."""

SUFFIX = ".zerotop"

_FORMAT_1_FILE = "packed.json"  # its tables were Parquet
_ZIP_MAGIC = b"PK\x03\x04"
# A recording may unpack to this many times its size, and to these bytes in any case. Real ones unpack to 4 to 8 times.
_MAX_RATIO = 50
_FREE_BYTES = 192 << 20
# zipfile reads the directory of an archive at once (this is 30,000 members), and members by parts.
_MAX_READ_BYTES = 4 << 20
_PART_BYTES = 1 << 20
# With other methods, a small part of a member may unpack to gigabytes.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Exceptions of reading a damaged zip. NotImplementedError is a RuntimeError.
_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, IndexError, *DAMAGE_ERRORS)


def pack_folder(folder: Folder, stream: BinaryIO) -> list[str]:
    """Write the recording in ``folder`` as one file; return the names of foreign files, which are left out."""
    names = sorted(folder.list_files(), key=_packing_order)
    own = [name for name in names if _packing_order(name)[0] < _FOREIGN_ORDER and _is_plain_file(folder, name)]
    with zipfile.ZipFile(stream, "w") as archive:
        for name in own:
            # Of a fixed date: the same recording results in the same bytes.
            archive.writestr(zipfile.ZipInfo(name), folder.read_bytes(name), zipfile.ZIP_DEFLATED, 9)
    return [name for name in names if name not in own]


_FOREIGN_ORDER = 3


def _is_plain_file(folder: Folder, name: str) -> bool:
    try:
        return folder.file_size(name) >= 0
    except OSError:  # a link, a pipe or a device
        return False


def _packing_order(name: str) -> tuple[int, str]:
    """Sort events first and output last, so that in a growing recording nothing refers to missing data."""
    if name == SESSION_FILE or (name.startswith("events-") and name.endswith(".jsonl")):
        return 0, name
    if name.endswith(".rec"):
        return 1, name
    return (2 if name.startswith("output-") and name.endswith(".log") else _FOREIGN_ORDER), name


def unpack_files(path: Path, choose: FileChooser = set) -> dict[str, bytes]:
    """Return the content of a packed recording's files by name, of those that ``choose`` selects.

    The other members are not read. Raise SessionError, with a sentence, if it is no packed recording, damaged, cut short or
    of another version of the format.
    """
    try:
        with _PackedFile(path) as file:
            if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
                raise SessionError(
                    f"{path} is not a recording: it is neither a session's directory nor a file that zerotop packed."
                )
            left_bytes = max(_FREE_BYTES, os.fstat(file.fileno()).st_size * _MAX_RATIO)
            with zipfile.ZipFile(file) as archive:
                return dict(_iter_files(archive, path, choose, left_bytes))
    except _ZIP_DAMAGE:
        raise SessionError(f"{path} is damaged or was cut short: the packed recording cannot be read.") from None
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {error.strerror}.") from None


class _PackedFile(io.FileIO):
    """A file of which nobody reads megabytes at once: a directory of millions of members would fill gigabytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes, fewer at the end of the file. Raise SessionError if they are too many."""
        if size is not None and size > _MAX_READ_BYTES:
            raise SessionError(f"{self.name} has too many members: it is no recording that zerotop packed.")
        return super().read(size) or b""


def _iter_files(archive: zipfile.ZipFile, path: Path, choose: FileChooser, left_bytes: int) -> Iterator[tuple[str, bytes]]:
    names = set(archive.namelist())
    if _FORMAT_1_FILE in names:
        raise SessionError(f"{path} was packed in format 1, which this zerotop no longer reads: pack the session again.")
    if SESSION_FILE not in names:
        raise SessionError(f"There is no session at {path}: it is a zip of something else.")
    chosen = choose(names)
    for member in archive.infolist():
        if member.filename in chosen:
            left_bytes -= member.file_size
            if left_bytes < 0:
                raise SessionError(f"{path} would fill the memory if it were unpacked: it is damaged, or not to be trusted.")
            yield member.filename, _read_member(archive, member)


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return a member's content, at most its stated size. Raise BadZipFile if its checksum is another one."""
    if member.compress_type not in _METHODS:
        raise zipfile.BadZipFile("unknown method of compression")
    with archive.open(member) as file:
        return b"".join(iter(lambda: file.read(_PART_BYTES), b""))
