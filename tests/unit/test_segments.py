"""Tables of several files: read as one array while they grow, packed as one file."""

from __future__ import annotations

import io
import mmap
import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from zerotop.analysis.views.notices import describe_damage
from zerotop.recording import memory_map, storage
from zerotop.recording.packed.packing import pack_folder
from zerotop.recording.reader import Recording, RecordingError
from zerotop.recording.storage import Directory
from zerotop_probe.recording import directory, segments, tables
from zerotop_probe.recording.segments import PAGE_BYTES, count_records, make_name, parse_name
from zerotop_probe.recording.writer import Identity, RecordWriter

WHO = Identity("rank", 0, "node1", 100, 1, "")


FIRST_NS = time.monotonic_ns()


@pytest.fixture
def segmented_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a recording whose segments are as short as they can be."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    return Path(directory.create_recording(["python", "train.py"], path=str(tmp_path / "recording")))


def write_numbers(writer: RecordWriter, begin: int, end: int) -> None:
    for number in range(begin, end):
        writer.write(FIRST_NS + number, 1, 2, 0, 0, 0)


def read_numbers(recording: Recording) -> list[int]:
    (source,) = recording.sources["probe"]
    numbers: list[int] = (source.array["time_ns"] - FIRST_NS).tolist()
    assert source.count_until(10**18 + source.offset_ns) == len(numbers)
    return numbers


@pytest.mark.parametrize("table", [table for table in tables.TABLES.values() if table.name in tables.FOLDED_TABLES])
def test_segments_fill_whole_pages(table: tables.Table) -> None:
    count = count_records(table.record_struct.size)
    assert count * table.record_struct.size % PAGE_BYTES == 0
    assert 0.5 * segments.SEGMENT_BYTES < count * table.record_struct.size <= segments.SEGMENT_BYTES


def test_names() -> None:
    for stem in ("spans-rank0-node1-47", "spans-rank0-node1-47.1"):
        names = [make_name(stem, number) for number in (0, 1, 12)]
        assert names == sorted(names)
        assert [parse_name(name) for name in names] == [(stem, 0), (stem, 1), (stem, 12)]
    assert parse_name("events-node-node1-3.jsonl") is None


def test_one_array_while_it_grows(segmented_recording: Path) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    writer = RecordWriter(str(segmented_recording), tables.PROBE, WHO)
    recording = Recording.open(segmented_recording)
    first = recording.sources["probe"][0].array
    end = 0
    for more in (1, each - 1, 1, 2 * each, each - 1, 3 * each + 5):
        write_numbers(writer, end, end + more)
        end += more
        assert recording.refresh()
        assert read_numbers(recording) == list(range(end))
        assert read_numbers(Recording.open(segmented_recording)) == list(range(end))
    assert len(first) == 0
    assert not recording.refresh()
    assert writer.lost == 0
    assert len(list(segmented_recording.glob("probe-*.rec"))) == end // each + 1


def test_opening_maps_a_table_once(segmented_recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2 * count_records(tables.PROBE.record_struct.size) + 5
    write_numbers(RecordWriter(str(segmented_recording), tables.PROBE, WHO), 0, count)
    map_files = Mock(wraps=memory_map.map_files)
    monkeypatch.setattr(storage, "map_files", map_files)
    assert read_numbers(Recording.open(segmented_recording)) == list(range(count))
    assert map_files.call_count == 1


def test_first_segments_deleted(segmented_recording: Path) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    writer = RecordWriter(str(segmented_recording), tables.PROBE, WHO)
    write_numbers(writer, 0, 3 * each + 5)
    recording = Recording.open(segmented_recording)
    for number in range(2):
        (segmented_recording / make_name("probe-rank0-node1-100", number)).unlink()
    assert read_numbers(recording) == list(range(3 * each + 5))  # what is mapped stays readable
    write_numbers(writer, 3 * each + 5, 4 * each + 5)
    assert recording.held_bytes == 0
    assert recording.refresh()
    assert recording.held_bytes == 2 * segments.SEGMENT_BYTES
    assert read_numbers(recording) == list(range(4 * each + 5))
    again = Recording.open(segmented_recording)
    assert read_numbers(again) == list(range(2 * each, 4 * each + 5))
    write_numbers(writer, 4 * each + 5, 5 * each)
    assert again.refresh()
    assert read_numbers(again) == list(range(2 * each, 5 * each))
    assert not recording.is_incomplete
    assert not again.is_incomplete


def refresh_often(recording: Recording) -> None:
    for _ in range(100):
        recording.refresh()


@pytest.mark.parametrize("lost_bytes", [1, PAGE_BYTES])
def test_a_cut_in_the_middle_is_reported(segmented_recording: Path, tmp_path: Path, lost_bytes: int) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    write_numbers(RecordWriter(str(segmented_recording), tables.PROBE, WHO), 0, 3 * each + 5)
    (segmented_recording / make_name("probe-rank0-node1-100", 0)).unlink()
    shown = Recording.open(segmented_recording)
    assert (shown.cut_files, describe_damage(shown)) == (0, [])
    cut = segmented_recording / make_name("probe-rank0-node1-100", 1)
    os.truncate(cut, cut.stat().st_size - lost_bytes)
    with pytest.raises(RecordingError, match="cut short while it was read"):
        refresh_often(shown)
    again = Recording.open(segmented_recording)
    lost = -(-lost_bytes // tables.PROBE.record_struct.size)
    assert read_numbers(again) == [*range(each, 2 * each - lost), *range(2 * each, 3 * each + 5)]
    assert describe_damage(again) == ["1 file was cut short: the records of some time are missing."]
    with (tmp_path / "it.zerotop").open("wb") as packed:
        pack_folder(Directory(segmented_recording), packed)
    assert read_numbers(Recording.open(tmp_path / "it.zerotop")) == read_numbers(again)


def test_full_file_goes_on_if_no_other_can_be_created(segmented_recording: Path) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    writer = RecordWriter(str(segmented_recording), tables.PROBE, WHO)
    obstacle = segmented_recording / make_name("probe-rank0-node1-100", 1)
    obstacle.touch()  # no header ever comes
    write_numbers(writer, 0, 2 * each - 1)
    assert read_numbers(Recording.open(segmented_recording)) == list(range(2 * each - 1))
    obstacle.unlink()
    write_numbers(writer, 2 * each - 1, 3 * each)
    recording = Recording.open(segmented_recording)
    assert read_numbers(recording) == list(range(3 * each))
    assert recording.cut_files == 0
    assert writer.lost == 0


def test_copied_where_pages_are_larger(segmented_recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    monkeypatch.setattr(mmap, "PAGESIZE", 16 * mmap.PAGESIZE)
    writer = RecordWriter(str(segmented_recording), tables.PROBE, WHO)
    write_numbers(writer, 0, 3 * each + 5)
    recording = Recording.open(segmented_recording)
    assert read_numbers(recording) == list(range(3 * each + 5))
    write_numbers(writer, 3 * each + 5, 3 * each + 9)
    assert recording.refresh()
    assert read_numbers(recording) == list(range(3 * each + 9))


def test_packed_as_one_file(segmented_recording: Path, tmp_path: Path) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    write_numbers(RecordWriter(str(segmented_recording), tables.PROBE, WHO), 0, 3 * each + 5)
    (segmented_recording / make_name("probe-rank0-node1-100", 0)).unlink()
    packed = io.BytesIO()
    assert pack_folder(Directory(segmented_recording), packed) == []
    file = tmp_path / "it.zerotop"
    file.write_bytes(packed.getvalue())
    recording = Recording.open(file)
    assert read_numbers(recording) == list(range(each, 3 * each + 5))
    assert recording.sources["probe"][0].path.name == "probe-rank0-node1-100.rec"
