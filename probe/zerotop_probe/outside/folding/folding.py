"""Folding the recording of one node: what to fold, what to delete, and how much may remain."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from zerotop_probe.outside.folding.coarse_samples import COARSE_SUFFIX, KEYS, CoarseTable
from zerotop_probe.outside.folding.peaks import PeakSeries, read_series
from zerotop_probe.outside.folding.step_history import SAMPLED_COLUMNS, StepHistory
from zerotop_probe.outside.folding.table_files import Segment, TableFiles, find_tables
from zerotop_probe.recording.directory import FULL_DETAIL_S, MAX_BYTES, SESSION_FILE
from zerotop_probe.recording.tables import FOLDED, FOLDED_TABLES, SPANS

# Shares of a recording's size. The rest is for the job's output and for events.
# More steps than these would take longer than a second to open: a million and a quarter of all ranks.
_DETAIL_SHARE, _STEPS_SHARE, _COARSE_SHARE = 0.75, 0.06, 0.05
# Shares of the size: for recent detail, and for earlier notable steps. The rest is for records until the next folding.
_RECENT_SHARE, _NOTABLE_SHARE = 0.65, 0.20
# A file of steps that is too large is merged until it has this share of its limit, half of it in single steps.
_MERGED_SHARE = 0.5
# Steps end about when they should: after a longer pause samples are no longer kept for the step in progress.
_LONGEST_STEP_NS = 600_000_000_000

_EVENTS_FILE = re.compile(r"events-node-(\w+)-\d+(\.\d+)?\.jsonl")


class Limits(NamedTuple):
    """This node's share of a recording's size limit, and the time for which everything is kept."""

    max_bytes: float
    full_detail_ns: int


def read_limits(folder: str) -> Limits:
    """Return the limits of this node: equal shares of the recording's for all nodes. Raise OSError or ValueError."""
    with open(os.path.join(folder, SESSION_FILE), "rb") as file:
        info = json.load(file)
    hosts = {match[1] for name in os.listdir(folder) if (match := _EVENTS_FILE.fullmatch(name))}
    seconds = float(info.get("full_detail_s") or FULL_DETAIL_S)
    return Limits(float(info.get("max_bytes") or MAX_BYTES) / max(1, len(hosts)), int(seconds * 1e9))


@contextlib.contextmanager
def _lock_folder(folder: str) -> Iterator[None]:
    """Let one process fold at a time. Raise BlockingIOError while another one does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def fold_recording(folder: str, now_ns: int | None = None) -> None:
    """Fold what this node has recorded and delete the files that are no longer needed. Raise OSError.

    Folded records are on disk before a file is deleted, and are found again by their times: after a crash at any moment,
    nothing is missing and nothing is counted twice.

    Args:
        folder: the recording folder.
        now_ns: CLOCK_MONOTONIC; the present if None.
    """
    with _lock_folder(folder):
        tables = find_tables(folder)
        _NodeFolder(folder, tables, read_limits(folder)).fold(time.monotonic_ns() if now_ns is None else now_ns)


class _NodeFolder:
    """The tables of this node."""

    def __init__(self, folder: str, tables: list[TableFiles], limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._detail_bytes = limits.max_bytes * _DETAIL_SHARE
        detail = [one for one in tables if one.table.name in FOLDED_TABLES and not one.stem.endswith(COARSE_SUFFIX)]
        self._by_stem = {one.stem: one for one in detail}
        self._spans = [one for one in detail if one.table is SPANS]
        self._sampled = [one for one in detail if one.table.name in KEYS]
        self._rank_tables = [one for one in detail if one.table.name not in KEYS]
        self._histories: dict[str, StepHistory] = {}  # by the stem of the spans, without the table's name

    def fold(self, now_ns: int) -> None:
        """Fold and delete."""
        until_ns = max(now_ns - self._limits.full_detail_ns, self._find_forced_end(now_ns))
        before = {one.stem: self._open_history(one).end_ns for one in self._spans}
        self._fold_steps(until_ns)
        for table in self._rank_tables:
            process = table.stem.removeprefix(table.table.name)
            history = self._histories.get(process)
            if history is not None and history.end_ns is not None:
                self._delete_folded(table, before[SPANS.name + process], min(until_ns, history.end_ns))
        for table in self._sampled:
            coarse = CoarseTable(table, self._folder)
            last_ns = coarse.end_ns
            coarse.fold_samples(table, self._find_sampled_end(until_ns))
            if coarse.end_ns is not None:
                self._delete_folded(table, last_ns, coarse.end_ns)
            if coarse.bytes > self._limits.max_bytes * _COARSE_SHARE / len(self._sampled):
                coarse.double_period()
        self._limit_detail(until_ns)
        self._limit_steps()

    def _open_history(self, spans: TableFiles) -> StepHistory:
        process = spans.stem.removeprefix(SPANS.name)
        if process not in self._histories:
            self._histories[process] = StepHistory(spans, self._folder)
        return self._histories[process]

    def _find_forced_end(self, now_ns: int) -> int:
        """Return the time until which detail must be deleted so that the newest fits; 0 if everything fits."""
        left = self._detail_bytes * _RECENT_SHARE - sum(one.segments[-1].bytes for one in self._by_stem.values())
        recent_ns = now_ns - self._limits.full_detail_ns
        closed = (segment for one in self._by_stem.values() for segment in one.closed_segments)
        for segment in sorted(closed, key=lambda segment: -segment.last_ns):
            left -= segment.bytes
            if segment.last_ns <= recent_ns:
                return 0
            if left < 0:
                return segment.last_ns
        return 0

    def _fold_steps(self, until_ns: int) -> None:
        ends = [history.end_ns or 0 for history in self._histories.values()]
        begin_ns = min(ends, default=0)
        sampled = [self._read_sampled(*column, begin_ns, until_ns) for column in SAMPLED_COLUMNS]
        none = PeakSeries([], [])
        for spans in self._spans:
            process, pid = spans.stem.removeprefix(SPANS.name), spans.writer["pid"]
            allocator = self._by_stem.get(f"allocator{process}")
            samples = [values.get(pid, none) for values in sampled]
            self._histories[process].fold_spans(spans, allocator, samples, until_ns)

    def _read_sampled(self, table: str, column: str, begin_ns: int, until_ns: int) -> dict[int, PeakSeries]:
        return read_series([one for one in self._sampled if one.table.name == table], column, begin_ns, until_ns)

    def _find_sampled_end(self, until_ns: int) -> int:
        """Return the time until which no step needs samples any more."""
        ends = [history.end_ns for history in self._histories.values() if history.end_ns is not None]
        return min([until_ns, *(end_ns for end_ns in ends if until_ns - end_ns < _LONGEST_STEP_NS)])

    def _find_spare_end(self, table: TableFiles, until_ns: int) -> int:
        """Return the time until which a table's records may be deleted if there are too many.

        That is the end of the rank's last step. The step in progress loses records only if it has taken very long.
        """
        history = self._histories.get(table.stem.removeprefix(table.table.name))
        end_ns = None if history is None else history.end_ns
        return until_ns if end_ns is None or until_ns - end_ns > _LONGEST_STEP_NS else min(until_ns, end_ns)

    def _delete_folded(self, table: TableFiles, before_ns: int | None, until_ns: int) -> None:
        """Delete the segments that became folded: those that end after ``before_ns`` and until ``until_ns``.

        Segments of notable steps stay, and for this reason earlier ones have stayed too.
        """
        for segment in list(table.closed_segments):
            is_new = before_ns is None or segment.last_ns > before_ns
            if is_new and segment.last_ns <= until_ns and not self._is_notable(segment):
                _delete_segment(table, segment)

    def _is_notable(self, segment: Segment) -> bool:
        return any(history.is_notable(segment.first_ns, segment.last_ns) for history in self._histories.values())

    def _limit_detail(self, until_ns: int) -> None:
        """Delete the oldest segments of notable steps if there are too many, those of the first steps last."""
        ends = {stem: self._find_spare_end(one, until_ns) for stem, one in self._by_stem.items()}
        old = [(one, segment) for one in self._by_stem.values() for segment in one.closed_segments]
        old = [(one, segment) for one, segment in old if segment.last_ns <= ends[one.stem]]
        left = sum(segment.bytes for _, segment in old) - self._detail_bytes * _NOTABLE_SHARE
        for table, segment in sorted(old, key=lambda pair: (pair[1].number == 0, pair[1].last_ns)):
            if left <= 0:
                return
            left -= segment.bytes
            _delete_segment(table, segment)

    def _limit_steps(self) -> None:
        """Merge steps of all processes to blocks of the same size if there are too many of any."""
        limit = self._limits.max_bytes * _STEPS_SHARE / max(1, len(self._histories)) / FOLDED.record_struct.size
        longest = max(self._histories.values(), key=len, default=None)
        if longest is None or len(longest) <= limit:
            return
        single = max(1, int(limit * _MERGED_SHARE / 2))
        block = longest.find_block(single)
        end = min(history.find_step(single) for history in self._histories.values() if len(history) > single)
        for history in self._histories.values():
            history.merge_steps(end // block * block, block)


def _delete_segment(table: TableFiles, segment: Segment) -> None:
    os.unlink(segment.path)
    table.segments.remove(segment)
