"""Coarse samples: one record a minute, or a longer period, for each process, GPU and thread, instead of ten a second.

They are a separate table beside the fine one of the same sampler.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence

from zerotop_probe.outside.folding.table_files import (
    Record,
    TableFiles,
    append_records,
    read_last_record,
    read_records,
    replace_file,
)
from zerotop_probe.recording import segments
from zerotop_probe.recording.tables import GPU_PROCESSES, GPUS, HIGHEST, HOSTS, LOWEST, PROCESSES, THREADS, Field, Table

KEYS = {
    GPUS.name: ("gpu",),
    GPU_PROCESSES.name: ("gpu", "pid"),
    PROCESSES.name: ("pid",),
    THREADS.name: ("pid", "tid"),
    HOSTS.name: (),
}
"""The sampled tables, and the columns that say what a record is about."""

COARSE_SUFFIX = ".coarse"
_PERIOD_NS = 60_000_000_000
_MAX_THREADS = 8  # of a process, the busiest


class CoarseTable:
    """The coarse samples of one sampler's table; ``end_ns`` is the time of the last one, None without any."""

    def __init__(self, fine: TableFiles, folder: str) -> None:
        """Find the records that were folded before. Raise OSError, or ValueError for a damaged file."""
        self.table = fine.table
        self._path = os.path.join(folder, segments.make_name(f"{fine.stem}{COARSE_SUFFIX}", 0))
        self._header = {**fine.header, "period_ns": _PERIOD_NS}
        self.end_ns: int | None = None
        if os.path.exists(self._path):
            with open(self._path, "rb") as file:
                self._header = json.loads(file.readline())
            last = read_last_record(self._path, self.table, len(self._header_line))
            self.end_ns = None if last is None else last[0]

    @property
    def _header_line(self) -> bytes:
        return segments.pad_header(json.dumps(self._header).encode())

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return os.stat(self._path).st_size if os.path.exists(self._path) else 0

    def fold_samples(self, fine: TableFiles, until_ns: int) -> None:
        """Fold the samples of whole periods that end until a time. Raise OSError."""
        period_ns = int(self._header["period_ns"])
        end_ns = until_ns // period_ns * period_ns
        fresh = fold_periods(fine.iter_records(-1 if self.end_ns is None else self.end_ns, end_ns), self.table, period_ns)
        if fresh:
            append_records(self._path, self._header_line, self.table, fresh)
            self.end_ns = fresh[-1][0]

    def double_period(self) -> None:
        """Halve the number of samples. Raise OSError."""
        records = read_records(self._path, self.table, len(self._header_line))
        period_ns = 2 * int(self._header["period_ns"])
        folded = fold_periods(records, self.table, period_ns)
        self._header = {**self._header, "period_ns": period_ns}
        record_struct = self.table.record_struct
        replace_file(self._path, self._header_line + b"".join(record_struct.pack(*record) for record in folded))


def fold_periods(records: Iterable[Record], table: Table, period_ns: int) -> list[Record]:
    """Return one record for each period and subject, oldest first.

    All records of a period have the time of its last sample plus a nanosecond, so that they are a separate tick beside fine
    samples.
    """
    return [folded for ticks in _split_periods(records, period_ns) for folded in _fold_period(ticks, table)]


def _split_periods(records: Iterable[Record], period_ns: int) -> Iterator[list[Record]]:
    group: list[Record] = []
    for record in records:
        if group and (record[0] - 1) // period_ns != (group[-1][0] - 1) // period_ns:
            yield group
            group = []
        group.append(record)
    if group:
        yield group


def _fold_period(records: Sequence[Record], table: Table) -> list[Record]:
    names = [field.name for field in table.fields]
    keys = [names.index(name) for name in KEYS[table.name]]
    by_subject: dict[tuple[int, ...], list[Record]] = {}
    for record in records:
        by_subject.setdefault(tuple(record[key] for key in keys), []).append(record)
    time_ns = records[-1][0] + 1
    folded = [(time_ns, *_fold_subject(one, table)[1:]) for one in by_subject.values()]
    return _choose_busiest(folded) if table is THREADS else folded


def _fold_subject(records: list[Record], table: Table) -> Record:
    columns = zip(*records, strict=True)
    return tuple(_fold_column(field, values) for field, values in zip(table.fields, columns, strict=True))


def _fold_column(field: Field, values: tuple[object, ...]) -> object:
    if field.folds == HIGHEST:
        return max(values)  # type: ignore[type-var]
    if field.folds == LOWEST:
        return min(values)  # type: ignore[type-var]
    if field.code == "f":
        known = [value for value in values if isinstance(value, float) and not math.isnan(value)]
        return sum(known) / len(known) if known else math.nan
    return values[-1]


def _choose_busiest(threads: list[Record]) -> list[Record]:
    pid, cores = ([field.name for field in THREADS.fields].index(name) for name in ("pid", "cores_used"))
    counts: dict[int, int] = {}
    chosen = []
    for thread in sorted(threads, key=lambda record: -record[cores]):
        counts[thread[pid]] = counts.get(thread[pid], 0) + 1
        if counts[thread[pid]] <= _MAX_THREADS:
            chosen.append(thread)
    return chosen
