"""Output that is missing from a recording: the middle of a long one, or the part that did not fit on a full disk."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.recording.table_files import Source


def group_segments(sources: Sequence[Source]) -> list[list[int]]:
    """Return the indices of each writer's segments of output, in their order. Older recordings have one segment each."""
    writers: dict[tuple[str, str, int, int], list[int]] = {}
    for index, source in enumerate(sources):
        writers.setdefault((source.role, source.host, source.pid, _get_start(source)), []).append(index)
    return [sorted(segments, key=lambda index: _get_first_byte(sources[index])) for segments in writers.values()]


def count_missing_bytes(sources: Sequence[Source]) -> list[int]:
    """Return how many bytes of output are missing before each source."""
    missing = [0] * len(sources)
    for segments in group_segments(sources):
        end = 0
        for index in segments:
            begin, rows = _get_first_byte(sources[index]), sources[index].array
            missing[index] = max(0, begin - end)
            end = begin + (int(rows["offset"][-1]) + int(rows["length"][-1]) if len(rows) else 0)
    return missing


def format_gap(missing_bytes: int) -> str:
    """Return the line that stands in for missing output."""
    return f"[{missing_bytes:,} bytes of output left out here]"


def _get_first_byte(source: Source) -> int:
    value = source.header.get("first_byte")
    return value if isinstance(value, int) else 0


def _get_start(source: Source) -> int:
    value = source.header["writer"].get("start")
    return value if isinstance(value, int) else 0
