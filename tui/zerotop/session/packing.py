"""A recording as one small file to keep or to send.

It is a zip: ``packed.json`` says what is inside, ``session.json``, the events and the job's output are there as they were
(deflated), and each table is one Parquet file (zstd) with the records of all its writers, one after the other. Unpacking
gives the files of the session directory again, byte for byte; only a torn last record is left out. Nothing is written to
disk, unpickled or evaluated meanwhile.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.session.headers import DAMAGE_ERRORS, SessionError, check_format, read_header
from zerotop.session.storage import Folder, read_first_line
from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR

if TYPE_CHECKING:
    import polars

FileChooser = Callable[[set[str]], set[str]]
"""Of the names of all files those that are wanted."""

SUFFIX = ".zerotop"
PACKED_FORMAT = 1
"""Raised when an older zerotop could no longer read what is packed."""

_CONTENTS_FILE = "packed.json"
_ZIP_MAGIC = b"PK\x03\x04"
# Numbers and bytes of a fixed length: what Parquet gives back exactly.
_PLAIN_TYPE = re.compile(r"<[iu][248]|<f[48]|\|[iu]1|\|?S[1-9]\d{0,3}")
# A level above this takes ten times as long for some percent.
_ZSTD_LEVEL = 12
# What reading a damaged zip can raise.
_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, IndexError, *DAMAGE_ERRORS)


class _TableFile(NamedTuple):
    """A table's file: its first line and its whole records."""

    name: str
    table: str
    header: str
    records: NDArray[Any]


def pack_folder(folder: Folder, stream: BinaryIO) -> list[str]:
    """Writes the recording in ``folder`` as one file; returns the names of what is no part of a recording, left out.

    The same recording makes the same bytes.
    """
    names = sorted(folder.list_files(), key=_packing_order)
    kept = [name for name in names if _packing_order(name)[0] < _FOREIGN_ORDER]
    tables: dict[tuple[str, str], list[_TableFile]] = {}
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in kept:
            part = _read_table(folder, name) if name.endswith(".rec") else None
            if part is None:
                _add_member(archive, name, folder.read_bytes(name))
            else:
                tables.setdefault((part.table, str(part.records.dtype.descr)), []).append(part)
        contents = [_add_table(archive, f"{number}.parquet", parts) for number, parts in enumerate(tables.values())]
        about = {"zerotop": [FORMAT_MAJOR, FORMAT_MINOR], "packed": PACKED_FORMAT, "tables": contents}
        _add_member(archive, _CONTENTS_FILE, json.dumps(about).encode())
    return [name for name in names if name not in kept]


_FOREIGN_ORDER = 3


def _packing_order(name: str) -> tuple[int, str]:
    """Of a recording that grows, events are read first and output last: nothing then points at what is not there."""
    if name == SESSION_FILE or (name.startswith("events-") and name.endswith(".jsonl")):
        return 0, name
    if name.endswith(".rec"):
        return 1, name
    return (2 if name.startswith("output-") and name.endswith(".log") else _FOREIGN_ORDER), name


def _read_table(folder: Folder, name: str) -> _TableFile | None:
    """A file's records; None for one that is damaged or of types that Parquet does not have, kept as it is."""
    line = read_first_line(folder, name)
    try:
        read_header(line, name)
        text = line.decode()
        header = json.loads(text)
        table, dtype = str(header["table"]), _parse_columns(header["dtype"])
    except DAMAGE_ERRORS:
        return None
    if not table.isidentifier():
        return None
    data = folder.read_bytes(name)
    count = (len(data) - len(line)) // dtype.itemsize
    return _TableFile(name, table, text, np.frombuffer(data, dtype, count, len(line)))


def _parse_columns(columns: Any) -> np.dtype[Any]:
    """The type of a table's records. Raises ValueError for other than plain numbers and bytes."""
    fields = [(str(name), str(code)) for name, code in columns]
    for name, code in fields:
        if not _PLAIN_TYPE.fullmatch(code):
            raise ValueError(f"{name} is of type {code}")
    if not fields:
        raise ValueError("there are no columns")
    return np.dtype(fields)


def _add_member(archive: zipfile.ZipFile, name: str, data: bytes, compression: int = zipfile.ZIP_DEFLATED) -> None:
    archive.writestr(zipfile.ZipInfo(name), data, compression, 9 if compression == zipfile.ZIP_DEFLATED else None)


def _add_table(archive: zipfile.ZipFile, suffix: str, parts: list[_TableFile]) -> dict[str, Any]:
    """Adds one Parquet file; returns what there is to say about it."""
    member = f"{parts[0].table}-{suffix}"
    buffer = io.BytesIO()
    frame = _build_frame(np.concatenate([part.records for part in parts]))
    frame.write_parquet(buffer, compression="zstd", compression_level=_ZSTD_LEVEL, statistics=False)
    _add_member(archive, member, buffer.getvalue(), zipfile.ZIP_STORED)
    files = [{"name": p.name, "header": p.header, "records": len(p.records)} for p in parts]
    return {"parquet": member, "files": files}


def _build_frame(records: NDArray[Any]) -> polars.DataFrame:
    # Polars takes a while to import, and who reads session directories does not need it.
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
    """The files of a packed recording, by name; of all that there are those that ``choose`` gives back.

    What belongs to no chosen file is not read. Raises SessionError, with a sentence, when it is none, is damaged or cut
    short, or is of a newer format.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
                raise SessionError(f"There is no session at {path}: it is neither a directory nor a packed recording.")
            with zipfile.ZipFile(file) as archive:
                return dict(_iter_files(archive, path, choose))
    except _ZIP_DAMAGE:
        raise SessionError(f"{path} is damaged or was cut short: the packed recording cannot be read.") from None
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {error.strerror}.") from None


def _iter_files(archive: zipfile.ZipFile, path: Path, choose: FileChooser) -> Iterator[tuple[str, bytes]]:
    if _CONTENTS_FILE not in archive.namelist():
        raise SessionError(f"There is no session at {path}: it is a zip of something else.")
    about = json.loads(archive.read(_CONTENTS_FILE))
    check_format(about, path.name)
    if int(about["packed"]) > PACKED_FORMAT:
        raise SessionError(
            f"{path.name} was packed in format {about['packed']}, this zerotop reads up to {PACKED_FORMAT}:"
            " use a newer zerotop."
        )
    members = {str(table["parquet"]) for table in about["tables"]}
    plain = set(archive.namelist()) - members - {_CONTENTS_FILE}
    tabled = {str(file["name"]) for table in about["tables"] for file in table["files"]}
    chosen = choose(plain | tabled)
    for table in about["tables"]:
        if not table["files"] or any(file["name"] in chosen for file in table["files"]):
            # The archive's checksums are looked at here: Polars is given what was packed, or nothing.
            files = _iter_table_files(archive.read(table["parquet"]), table["files"])
            yield from ((name, content) for name, content in files if name in chosen)
    for name in archive.namelist():
        if name in plain & chosen:
            yield name, archive.read(name)


def _iter_table_files(data: bytes, files: list[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """The files of one table's writers. Raises ValueError where Parquet and headers do not fit."""
    records = _read_records(data, _parse_columns(json.loads(files[0]["header"])["dtype"]))
    if sum(int(file["records"]) for file in files) != len(records):
        raise ValueError("there are other records than were packed")
    begin = 0
    for file in files:
        end = begin + int(file["records"])
        yield str(file["name"]), file["header"].encode() + records[begin:end].tobytes()
        begin = end


def _read_records(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The records in a Parquet file. Raises ValueError where they are not of this type."""
    import polars

    try:
        frame = polars.read_parquet(data, columns=list(dtype.names or ()))
    # A panic in Polars is no Exception.
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException) as error:
        raise ValueError(str(error)) from None
    records = np.empty(frame.height, dtype)
    for column in frame:
        records[column.name] = _read_column(column, dtype[column.name])
    return records


def _read_column(column: polars.Series, dtype: np.dtype[Any]) -> Any:
    text = dtype.kind == "S" and str(column.dtype) == "Binary"
    if column.null_count() or not (text or column.to_numpy().dtype == dtype):
        raise ValueError(f"{column.name} is of another type than was packed")
    return column.to_list() if text else column.to_numpy()
