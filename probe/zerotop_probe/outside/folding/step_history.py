"""The folded steps of one rank process: the file of the table FOLDED."""

from __future__ import annotations

import json
import mmap
import os
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from zerotop_probe.outside.folding.peaks import PeakSeries, find_allocator_peaks
from zerotop_probe.outside.folding.span_sums import FoldedStep, sum_steps
from zerotop_probe.outside.folding.table_files import Record, TableFiles, append_records, replace_file
from zerotop_probe.recording import segments
from zerotop_probe.recording.tables import FOLDED, GPU_PROCESSES, PROCESSES, SPANS, UNKNOWN

# The first steps differ from all others: their detail is kept.
_FIRST_STEPS = 50
# A step is compared with this many before it, and is notable if its duration or memory differs by this factor.
_STEPS_BEFORE = 32
_DURATION_FACTOR, _PEAK_FACTOR = 1.5, 1.01

SAMPLED_COLUMNS = (
    (PROCESSES.name, "rss_bytes"),
    (GPU_PROCESSES.name, "used_bytes"),
    (PROCESSES.name, "held_bytes"),
)
"""Tables sampled from outside and their columns of which each step keeps the highest value, in this order."""

_FIELD = {column.name: index for index, column in enumerate(FOLDED.fields)}
_RECORD = FOLDED.record_struct
_SIZE = _RECORD.size


class StepHistory:
    """The folded steps of a process, oldest first; ``end_ns`` is the end of the last one, None without any."""

    def __init__(self, spans: TableFiles, folder: str) -> None:
        """Read the records that were folded before. Raise OSError."""
        self._path = os.path.join(folder, segments.make_name(FOLDED.name + spans.stem.removeprefix(SPANS.name), 0))
        header = {**spans.header, "table": FOLDED.name, "dtype": FOLDED.dtype}
        self._header_line = segments.pad_header(json.dumps(header).encode())
        self._notable: dict[int, bool] = {}  # by the index of a record
        self._map_file()
        self.end_ns: int | None = self[len(self) - 1][_FIELD["end_ns"]] if len(self) else None

    def _map_file(self) -> None:
        self._content: mmap.mmap | bytes = self._header_line
        if os.path.exists(self._path):
            with open(self._path, "rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return (len(self._content) - len(self._header_line)) // _SIZE

    def __getitem__(self, index: int) -> Record:
        return _RECORD.unpack_from(self._content, len(self._header_line) + index * _SIZE)

    def fold_spans(
        self,
        spans: TableFiles,
        allocator: TableFiles | None,
        sampled: Sequence[PeakSeries],
        until_ns: int,
    ) -> None:
        """Fold the steps that end until a time; ``sampled``: the values of SAMPLED_COLUMNS for the process."""
        after_ns = -1 if self.end_ns is None else self.end_ns
        last_step = self[len(self) - 1][_FIELD["step"]] if len(self) else 0
        steps = sum_steps(spans.iter_records(after_ns, until_ns), self.end_ns, last_step)
        if not steps:
            return
        peaks = find_allocator_peaks(allocator, steps)
        records = [
            _make_record(step, (*pair, *(values.find_highest(step) for values in sampled)))
            for step, pair in zip(steps, peaks, strict=True)
        ]
        append_records(self._path, self._header_line, FOLDED, records)
        self._map_file()
        self.end_ns = steps[-1].end_ns

    def is_notable(self, begin_ns: int, end_ns: int) -> bool:
        """Whether a step that overlaps this time differs from those before it, so that its detail should be kept."""
        first = bisect_left(range(len(self)), begin_ns, key=self._get_end)
        last = bisect_right(range(len(self)), end_ns, key=self._get_end)
        # The step in which the time ends, and one more on both sides.
        for index in range(max(0, first - 1), min(len(self), last + 2)):
            if index not in self._notable:
                before = [self[number] for number in range(max(0, index - _STEPS_BEFORE), index)]
                self._notable[index] = index < _FIRST_STEPS or is_unlike_before(self[index], before)
            if self._notable[index]:
                return True
        return False

    def _get_end(self, index: int) -> int:
        return int(self[index][0])

    def find_step(self, single: int) -> int:
        """Return the number of the first of the last ``single`` steps."""
        return int(self[max(0, len(self) - single)][_FIELD["step"]])

    def find_block(self, count: int) -> int:
        """Return the size of blocks, a power of two, that makes ``count`` blocks of all but the last ``count`` steps."""
        # Numbers begin again when a script loads an older checkpoint.
        steps = max(len(self) - count, self.find_step(count) - self.find_step(len(self)))
        return 1 << max(0, -(-steps // max(1, count)) - 1).bit_length()

    def merge_steps(self, end: int, block: int) -> None:
        """Merge the steps before the number ``end`` into blocks of ``block``. Raise OSError."""
        count = bisect_left(range(len(self)), end, key=lambda index: self[index][_FIELD["step"]])
        merged = merge_records((self[index] for index in range(count)), block)
        head = b"".join(_RECORD.pack(*record) for record in merged)
        begin, end = (len(self._header_line) + number * _SIZE for number in (count, len(self)))
        replace_file(self._path, self._header_line + head + self._content[begin:end])
        self._map_file()


def _make_record(step: FoldedStep, bytes_of: tuple[int, ...]) -> Record:
    duration_ns = step.iteration_ns if step.is_complete else UNKNOWN
    times = (step.end_ns, step.begin_ns, *step.sums_ns, step.loading_ns, duration_ns, duration_ns)
    counts = (1, int(step.skipped), step.micro_steps, int(step.counted))
    *peaks, held_bytes = bytes_of
    return (*times, step.rows, step.tokens, *peaks, step.step, *counts, 0, held_bytes)


def is_unlike_before(record: Record, before: Sequence[Record]) -> bool:
    """Whether a step differs from those before it. A block differs if one of its steps does, so that its detail stays."""
    fields = {name: record[index] for name, index in _FIELD.items()}
    if fields["steps"] > 1 or fields["skipped_steps"] or fields["eval_ns"] or fields["checkpoint_ns"]:
        return True
    usual_ns = statistics.median(other[_FIELD["longest_ns"]] for other in before)
    if not usual_ns / _DURATION_FACTOR <= fields["longest_ns"] <= usual_ns * _DURATION_FACTOR:
        return True
    highest = max(other[_FIELD["allocated_peak_bytes"]] for other in before)
    return bool(fields["allocated_peak_bytes"] > highest * _PEAK_FACTOR)


_LAST = ("end_ns", "step")
_FIRST = ("begin_ns", "loading_ns")
_LOWEST = ("shortest_ns",)
_HIGHEST = (
    "longest_ns",
    "allocated_peak_bytes",
    "reserved_peak_bytes",
    "host_rss_bytes",
    "nvml_process_bytes",
    "host_held_bytes",
)
_KNOWN = ("rows", "tokens")  # sums, or unknown


def merge_records(records: Iterable[Record], block: int) -> list[Record]:
    """Merge consecutive records whose steps have the same number divided by ``block``; incomplete steps stay single."""
    merged: list[Record] = []
    group: list[Record] = []
    for record in records:
        is_single = any(one[_FIELD["longest_ns"]] == UNKNOWN for one in (record, *group[-1:]))
        if group and (is_single or record[_FIELD["step"]] // block != group[-1][_FIELD["step"]] // block):
            merged.append(_merge_group(group))
            group = []
        group.append(record)
    if group:
        merged.append(_merge_group(group))
    return merged


def _merge_group(group: list[Record]) -> Record:
    columns = dict(zip(_FIELD, zip(*group, strict=True), strict=True))
    return tuple(_merge_values(name, values) for name, values in columns.items())


def _merge_values(name: str, values: tuple[int, ...]) -> int:
    if name in _LAST:
        return values[-1]
    if name in _FIRST:
        return values[0]
    if name in _LOWEST:
        return min(values)
    if name in _HIGHEST:
        return max(values)
    if name in _KNOWN:
        known = [value for value in values if value >= 0]
        return sum(known) if known else -1
    return sum(values)
