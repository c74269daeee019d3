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
from zerotop.session import memory_map, storage
from zerotop.session.packed.packing import pack_folder
from zerotop.session.reader import Session, SessionError
from zerotop.session.storage import Directory
from zerotop_probe.recording import directory, segments, tables
from zerotop_probe.recording.segments import PAGE_BYTES, count_records, make_name, parse_name
from zerotop_probe.recording.writer import Identity, RecordWriter

WHO = Identity("rank", 0, "node1", 100, 1, "")


FIRST_NS = time.monotonic_ns()


@pytest.fixture
def segmented_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a session whose segments are as short as they can be."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    return Path(directory.create_session(["python", "train.py"], path=str(tmp_path / "session")))


def write_numbers(writer: RecordWriter, begin: int, end: int) -> None:
    for number in range(begin, end):
        writer.write(FIRST_NS + number, 1, 2, 0, 0, 0)


def read_numbers(session: Session) -> list[int]:
    (source,) = session.sources["probe"]
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


def test_one_array_while_it_grows(segmented_session: Path) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    writer = RecordWriter(str(segmented_session), tables.PROBE, WHO)
    session = Session.open(segmented_session)
    first = session.sources["probe"][0].array
    end = 0
    for more in (1, each - 1, 1, 2 * each, each - 1, 3 * each + 5):
        write_numbers(writer, end, end + more)
        end += more
        assert session.refresh()
        assert read_numbers(session) == list(range(end))
        assert read_numbers(Session.open(segmented_session)) == list(range(end))
    assert len(first) == 0
    assert not session.refresh()
    assert writer.lost == 0
    assert len(list(segmented_session.glob("probe-*.rec"))) == end // each + 1


def test_opening_maps_a_table_once(segmented_session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2 * count_records(tables.PROBE.record_struct.size) + 5
    write_numbers(RecordWriter(str(segmented_session), tables.PROBE, WHO), 0, count)
    map_files = Mock(wraps=memory_map.map_files)
    monkeypatch.setattr(storage, "map_files", map_files)
    assert read_numbers(Session.open(segmented_session)) == list(range(count))
    assert map_files.call_count == 1


def test_first_segments_deleted(segmented_session: Path) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    writer = RecordWriter(str(segmented_session), tables.PROBE, WHO)
    write_numbers(writer, 0, 3 * each + 5)
    session = Session.open(segmented_session)
    for number in range(2):
        (segmented_session / make_name("probe-rank0-node1-100", number)).unlink()
    assert read_numbers(session) == list(range(3 * each + 5))  # what is mapped stays readable
    write_numbers(writer, 3 * each + 5, 4 * each + 5)
    assert session.held_bytes == 0
    assert session.refresh()
    assert session.held_bytes == 2 * segments.SEGMENT_BYTES
    assert read_numbers(session) == list(range(4 * each + 5))
    again = Session.open(segmented_session)
    assert read_numbers(again) == list(range(2 * each, 4 * each + 5))
    write_numbers(writer, 4 * each + 5, 5 * each)
    assert again.refresh()
    assert read_numbers(again) == list(range(2 * each, 5 * each))
    assert not session.is_incomplete
    assert not again.is_incomplete


def refresh_often(session: Session) -> None:
    for _ in range(100):
        session.refresh()


@pytest.mark.parametrize("lost_bytes", [1, PAGE_BYTES])
def test_a_cut_in_the_middle_is_said(segmented_session: Path, tmp_path: Path, lost_bytes: int) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    write_numbers(RecordWriter(str(segmented_session), tables.PROBE, WHO), 0, 3 * each + 5)
    (segmented_session / make_name("probe-rank0-node1-100", 0)).unlink()
    shown = Session.open(segmented_session)
    assert (shown.cut_files, describe_damage(shown)) == (0, [])
    cut = segmented_session / make_name("probe-rank0-node1-100", 1)
    os.truncate(cut, cut.stat().st_size - lost_bytes)
    with pytest.raises(SessionError, match="cut short while it was read"):
        refresh_often(shown)
    again = Session.open(segmented_session)
    lost = -(-lost_bytes // tables.PROBE.record_struct.size)
    assert read_numbers(again) == [*range(each, 2 * each - lost), *range(2 * each, 3 * each + 5)]
    assert describe_damage(again) == ["1 file was cut short: the records of some time are missing."]
    with (tmp_path / "it.zerotop").open("wb") as packed:
        pack_folder(Directory(segmented_session), packed)
    assert read_numbers(Session.open(tmp_path / "it.zerotop")) == read_numbers(again)


def test_full_file_goes_on_if_no_other_can_be_created(segmented_session: Path) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    writer = RecordWriter(str(segmented_session), tables.PROBE, WHO)
    obstacle = segmented_session / make_name("probe-rank0-node1-100", 1)
    obstacle.touch()  # no header ever comes
    write_numbers(writer, 0, 2 * each - 1)
    assert read_numbers(Session.open(segmented_session)) == list(range(2 * each - 1))
    obstacle.unlink()
    write_numbers(writer, 2 * each - 1, 3 * each)
    session = Session.open(segmented_session)
    assert read_numbers(session) == list(range(3 * each))
    assert session.cut_files == 0
    assert writer.lost == 0


def test_copied_where_pages_are_larger(segmented_session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    monkeypatch.setattr(mmap, "PAGESIZE", 16 * mmap.PAGESIZE)
    writer = RecordWriter(str(segmented_session), tables.PROBE, WHO)
    write_numbers(writer, 0, 3 * each + 5)
    session = Session.open(segmented_session)
    assert read_numbers(session) == list(range(3 * each + 5))
    write_numbers(writer, 3 * each + 5, 3 * each + 9)
    assert session.refresh()
    assert read_numbers(session) == list(range(3 * each + 9))


def test_packed_as_one_file(segmented_session: Path, tmp_path: Path) -> None:
    each = count_records(tables.PROBE.record_struct.size)
    write_numbers(RecordWriter(str(segmented_session), tables.PROBE, WHO), 0, 3 * each + 5)
    (segmented_session / make_name("probe-rank0-node1-100", 0)).unlink()
    packed = io.BytesIO()
    assert pack_folder(Directory(segmented_session), packed) == []
    file = tmp_path / "it.zerotop"
    file.write_bytes(packed.getvalue())
    session = Session.open(file)
    assert read_numbers(session) == list(range(each, 3 * each + 5))
    assert session.sources["probe"][0].path.name == "probe-rank0-node1-100.rec"
