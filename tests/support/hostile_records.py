"""Single records of a recording that cannot be true, for tests that nothing is concluded from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.packed.packing import unpack_files
from zerotop_probe.recording import tables

Rows = NDArray[Any]
YEAR_NS = 365 * 86_400 * 10**9
DAY_NS = 86_400 * 10**9
HIGHEST, LOWEST = (1 << 63) - 1, -(1 << 63)


class Intruder(NamedTuple):
    """Records to insert after a place."""

    place: int
    rows: Rows


Change = Callable[[Rows, str], Intruder]
"""Makes impossible records from a table's records and the name of its time column."""


def _copy(place: int, shift_ns: int | None, value_ns: int, rows: Rows, column: str, *, count: int = 1) -> Intruder:
    """Copies of one record, of another time: shifted, or a value."""
    place %= len(rows)
    copies = rows[place : place + 1].repeat(count)
    copies[column] = value_ns if shift_ns is None else copies[column] + shift_ns + np.arange(count)
    return Intruder(place, copies)


def begin_earlier(earlier_ns: int, rows: Rows, column: str) -> Intruder:
    """A copy of the last record, begun earlier, if the table has begins and ends."""
    copy = rows[-1:].copy() if "begin_ns" in (rows.dtype.names or ()) and column != "begin_ns" else rows[:0]
    if len(copy):
        copy["begin_ns"] -= earlier_ns
    return Intruder(len(rows) - 1, copy)


def _fill(place: int, value: int | None, rows: Rows, column: str) -> Intruder:
    """A record whose every number of 64 bits is the same: a value, or the time five years ahead."""
    place %= len(rows)
    copy = rows[place : place + 1].copy()
    for name in copy.dtype.names or ():
        if copy.dtype[name] == np.int64:
            copy[name] = int(rows[column][place]) + 5 * YEAR_NS if value is None else value
    return Intruder(place, copy)


TIMES: dict[str, Change] = {
    "ahead at the end": partial(_copy, -1, 5 * YEAR_NS, 0),
    "ahead in the middle": partial(_copy, 2, 5 * YEAR_NS, 0),
    "a day ahead": partial(_copy, -1, DAY_NS, 0),
    "three of them": partial(_copy, -1, YEAR_NS, 0, count=3),
    "full of it": partial(_fill, -1, None),
    "in the past": partial(_copy, -1, -5 * YEAR_NS, 0),
    "a day ago": partial(_copy, -1, -DAY_NS, 0),
    "zero": partial(_copy, 1, None, 0),
    "highest": partial(_copy, -1, None, HIGHEST),
    "lowest": partial(_copy, 1, None, LOWEST),
    "full of zeros": partial(_fill, 1, 0),
    "full of ones": partial(_fill, 1, -1),
    "full of the highest": partial(_fill, -1, HIGHEST),
}


def _change_value(name: str, value: Any, rows: Rows, column: str) -> Intruder:
    copy = rows[2:3].copy() if name in (rows.dtype.names or ()) else rows[:0]  # an older recording lacks some
    if len(copy):
        copy[name] = value
    return Intruder(2, copy)


def list_values(table: tables.Table) -> Iterator[tuple[str, Change]]:
    """Yield a record for each column that measures, and each value that no machine has."""
    for field in table.fields:
        values = {"f": (float("inf"), -5.0, 3e38), "q": (HIGHEST, LOWEST, 1 << 62), "i": ((1 << 31) - 1,)}.get(
            field.code, ()
        )
        if field.name in ("address", "throttle_reasons", "temperature_c"):
            continue
        # Without a cgroup there is no value to compare with.
        if field.name.endswith("_bytes") and not field.name.startswith(("pcie", "cgroup")):
            values += (10**14,)
        if field.name == "step" and any(other.name == "engine" for other in table.fields):
            values += (900_000_000, 5_000_000)
        for value in values:
            yield f"{field.name} {value}", partial(_change_value, field.name, value)


def write_changed(packed: Path, folder: Path, choose: Callable[[tables.Table], Iterable[Change]]) -> int:
    """Write a copy of a recording with impossible records in its tables; return how many there are."""
    folder.mkdir(parents=True)
    added = 0
    for name, content in unpack_files(packed).items():
        line, _, data = content.partition(b"\n")
        if name.endswith(".rec"):
            header = json.loads(line)
            table, dtype = tables.TABLES[header["table"]], np.dtype([tuple(column) for column in header["dtype"]])
            rows = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
            if len(rows) > 3:
                intruders = [change(rows, table.time_column) for change in choose(table)]
                places = [place + 1 for place, inserted in intruders for _ in inserted]
                if intruders:
                    content = line + b"\n" + np.insert(rows, places, np.concatenate([i.rows for i in intruders])).tobytes()
                added += len(places)
        (folder / name).write_bytes(content)
    return added
