"""Pack a recording into one small file to keep or to send, and unpack it.

The file is a zip. ``packed.json`` lists the contents; ``session.json``, the events and the job's output are members of their
own (deflated); each table is one Parquet file (zstd) with the records of all its writers, one after the other. Unpacking
restores the files of the recording folder byte for byte, without a torn last record and with the segments of a table as one
file. Nothing is written to disk, unpickled or evaluated.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.headers import DAMAGE_ERRORS, RecordingError, check_format, parse_columns, parse_integer, read_header
from zerotop.recording.packed.parquet_pages import iter_page_sizes
from zerotop.recording.storage import Folder, read_first_line
from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.segments import parse_name
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR

if TYPE_CHECKING:
    import polars

FileChooser = Callable[[set[str]], set[str]]
"""Selects the names of the files to unpack from those of all files."""

SUFFIX = ".zerotop"
PACKED_FORMAT = 1
"""Incremented when an older zerotop can no longer read the packed file."""

_CONTENTS_FILE = "packed.json"
_ZIP_MAGIC = b"PK\x03\x04"
# Higher levels take ten times as long and save a few percent.
_ZSTD_LEVEL = 12
# A recording may unpack to this many times its size, and to these bytes in any case. Real ones unpack to 3 to 7 times.
_MAX_RATIO = 50
_FREE_BYTES = 192 << 20
_PAGE_BYTES = 1 << 10  # that a page costs beside its content
# zipfile reads the directory of an archive at once (this is 30,000 members), and members by parts.
_MAX_READ_BYTES = 4 << 20
_PART_BYTES = 1 << 20
# With other methods, a small part of a member may unpack to gigabytes.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Exceptions of reading a damaged zip. NotImplementedError is a RuntimeError.
_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, IndexError, *DAMAGE_ERRORS)


class _TableFile(NamedTuple):
    """A table's file: its header line and its complete records."""

    name: str
    table: str
    header: str
    records: NDArray[Any]


def pack_folder(folder: Folder, stream: BinaryIO) -> list[str]:
    """Write the recording in ``folder`` as one file; return the names of foreign files, which are left out.

    The same recording results in the same bytes.
    """
    names = sorted(folder.list_files(), key=_packing_order)
    own = [name for name in names if _packing_order(name)[0] < _FOREIGN_ORDER and _is_plain_file(folder, name)]
    tables: dict[tuple[str, str], list[_TableFile]] = {}
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for _, segments in groupby(own, _find_stem):
            names_of_one = list(segments)
            file = _read_table(folder, names_of_one) if names_of_one[0].endswith(".rec") else None
            if file is not None:
                tables.setdefault((file.table, str(file.records.dtype.descr)), []).append(file)
                continue
            for name in names_of_one:
                _add_member(archive, name, folder.read_bytes(name))
        entries = [_add_table(archive, f"{number}.parquet", files) for number, files in enumerate(tables.values())]
        contents = {"zerotop": [FORMAT_MAJOR, FORMAT_MINOR], "packed": PACKED_FORMAT, "tables": entries}
        _add_member(archive, _CONTENTS_FILE, json.dumps(contents).encode())
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


def _find_stem(name: str) -> str:
    """Return the common stem of a table's segments, else the name itself."""
    segment = parse_name(name)
    return name if segment is None else f"{segment[0]}.rec"


def _read_table(folder: Folder, names: list[str]) -> _TableFile | None:
    """Read the records of a table's segments.

    Return None if the first one is damaged or has types unknown to Parquet; then they are packed as they are.
    """
    line = read_first_line(folder, names[0])
    try:
        read_header(line, names[0])
        text = line.decode()
        header = json.loads(text)
        table, dtype = str(header["table"]), parse_columns(header["dtype"])
    except DAMAGE_ERRORS:
        return None
    if not table.isidentifier():
        return None
    parts = [np.empty(0, dtype)]
    for name in names:
        data = folder.read_bytes(name)
        parts.append(np.frombuffer(data, dtype, max(0, len(data) - len(line)) // dtype.itemsize, min(len(data), len(line))))
    return _TableFile(_find_stem(names[0]), table, text, np.concatenate(parts))


def _add_member(archive: zipfile.ZipFile, name: str, data: bytes, compression: int = zipfile.ZIP_DEFLATED) -> None:
    archive.writestr(zipfile.ZipInfo(name), data, compression, 9 if compression == zipfile.ZIP_DEFLATED else None)


def _add_table(archive: zipfile.ZipFile, suffix: str, files: list[_TableFile]) -> dict[str, Any]:
    """Add the files of one table as one Parquet file; return its entry in the contents."""
    member = f"{files[0].table}-{suffix}"
    buffer = io.BytesIO()
    frame = _build_frame(np.concatenate([file.records for file in files]))
    frame.write_parquet(buffer, compression="zstd", compression_level=_ZSTD_LEVEL, statistics=False)
    _add_member(archive, member, buffer.getvalue(), zipfile.ZIP_STORED)
    entries = [{"name": file.name, "header": file.header, "records": len(file.records)} for file in files]
    return {"parquet": member, "files": entries}


def _build_frame(records: NDArray[Any]) -> polars.DataFrame:
    # Importing Polars takes long, and recording directories are read without it.
    import polars

    columns = {}
    for name in records.dtype.names or ():
        values = records[name]
        if values.dtype.kind == "S":
            columns[name] = polars.Series(name, values.tolist(), polars.Binary)
        else:
            columns[name] = polars.Series(name, np.ascontiguousarray(values))
    return polars.DataFrame(columns)


def unpack_files(path: Path, choose: FileChooser = set) -> dict[str, bytes]:
    """Return the content of a packed recording's files by name, of those that ``choose`` selects.

    Members without a chosen file are not read. Raise RecordingError, with a sentence, if it is no packed recording, damaged,
    cut short or of a newer format.
    """
    try:
        with _PackedFile(path) as file:
            if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
                raise RecordingError(
                    f"{path} is not a recording: it is neither a recording's directory nor a file that zerotop packed."
                )
            size = os.fstat(file.fileno()).st_size
            with zipfile.ZipFile(file) as archive:
                return dict(_iter_files(archive, path, choose, MemoryBudget(path, max(_FREE_BYTES, size * _MAX_RATIO))))
    except _ZIP_DAMAGE:
        raise RecordingError(f"{path} is damaged or was cut short: the packed recording cannot be read.") from None
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}.") from None


class _PackedFile(io.FileIO):
    """A file of which nobody reads megabytes at once: a directory of millions of members would fill gigabytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes, fewer at the end of the file. Raise RecordingError if they are too many."""
        if size is not None and size > _MAX_READ_BYTES:
            raise RecordingError(f"{self.name} has too many members: it is no recording that zerotop packed.")
        return super().read(size) or b""


class MemoryBudget:
    """The bytes that may still be unpacked: megabytes that were packed must not fill gigabytes."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._left = size

    def reserve(self, size: int) -> None:
        """Reserve bytes. Raise RecordingError if they are too many."""
        self._left -= size
        if self._left < 0:
            raise RecordingError(
                f"{self._path} would fill the memory if it were unpacked: it is damaged, or not to be trusted."
            )


def _iter_files(
    archive: zipfile.ZipFile, path: Path, choose: FileChooser, budget: MemoryBudget
) -> Iterator[tuple[str, bytes]]:
    def read_member(name: str) -> bytes:
        member = archive.getinfo(name)
        if member.compress_type not in _METHODS:
            raise zipfile.BadZipFile("unknown method of compression")
        budget.reserve(member.file_size)
        # Read at once, zipfile unpacks up to 2 GiB of a member before it looks at the size that the member says.
        with archive.open(member) as file:
            return b"".join(iter(lambda: file.read(_PART_BYTES), b""))

    if _CONTENTS_FILE not in archive.namelist():
        raise RecordingError(f"There is no recording at {path}: it is a zip of something else.")
    contents = json.loads(read_member(_CONTENTS_FILE))
    check_format(contents, path.name)
    if int(contents["packed"]) > PACKED_FORMAT:
        raise RecordingError(
            f"{path.name} was packed in format {int(contents['packed'])}, this zerotop reads up to {PACKED_FORMAT}:"
            " use a newer zerotop."
        )
    members = {str(table["parquet"]) for table in contents["tables"]}
    plain = set(archive.namelist()) - members - {_CONTENTS_FILE}
    records = {str(file["name"]) for table in contents["tables"] for file in table["files"]}
    chosen = choose(plain | records)
    for table in contents["tables"]:
        if not table["files"] or any(file["name"] in chosen for file in table["files"]):
            # archive.read verifies the checksum: Polars never sees damaged data.
            files = _iter_table_files(read_member(table["parquet"]), table["files"], budget)
            yield from ((name, content) for name, content in files if name in chosen)
    for name in sorted(plain & chosen):
        yield name, read_member(name)


def _iter_table_files(data: bytes, files: list[dict[str, Any]], budget: MemoryBudget) -> Iterator[tuple[str, bytes]]:
    """Iterate over the files of one table's writers. Raise ValueError if Parquet and headers do not match."""
    dtype = parse_columns(json.loads(files[0]["header"])["dtype"])
    counts = [parse_integer(file["records"]) for file in files]
    if min(counts) < 0:
        raise ValueError("a number of records is negative")
    total = sum(counts)
    budget.reserve(total * dtype.itemsize)
    for size in iter_page_sizes(data):
        budget.reserve(size + _PAGE_BYTES)
    records = _read_records(data, dtype, total)
    begin = 0
    for file, count in zip(files, counts, strict=True):
        yield str(file["name"]), str(file["header"]).encode() + records[begin : begin + count].tobytes()
        begin += count


def _read_records(data: bytes, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Return the records of a Parquet file. Raise ValueError if they are of another type, or of another number."""
    import polars

    try:
        frame = polars.read_parquet(data, columns=list(dtype.names or ()), n_rows=count + 1)
    # PanicException is not derived from Exception.
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException) as error:
        raise ValueError(str(error)) from None
    if frame.height != count:
        raise ValueError("the number of records differs from the packed one")
    records = np.empty(count, dtype)
    for column in frame:
        records[column.name] = _read_column(column, dtype[column.name])
    return records


def _read_column(column: polars.Series, dtype: np.dtype[Any]) -> Any:
    text = dtype.kind == "S" and str(column.dtype) == "Binary"
    if column.null_count() or not (text or column.to_numpy().dtype == dtype):
        raise ValueError(f"{column.name} has another type than when it was packed")
    return column.to_list() if text else column.to_numpy()
