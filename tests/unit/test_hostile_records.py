"""Impossible records are left out and counted: everything said about a recording stays the same, in the same time."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import recordings
from fuzzing import visit_screens
from hostile_records import DAY_NS, TIMES, YEAR_NS, Change, Rows, begin_earlier, list_values, write_changed
from small_recording import BEGIN_NS, S, make_identity, make_record, read_recording, write_table
from zerotop.cli import main
from zerotop.recording import memory_map, table_files
from zerotop.recording.reader import Recording
from zerotop.recording.record_check import RecordCheck
from zerotop_probe.recording import tables
from zerotop_probe.recording.writer import RecordWriter

NAMES = ("cpu-slow", "z2-oom", "x2-zero3", "held-long")
SLACK_S = 3.0
MOST_BYTES = 100 << 20
RANKS = 10


def choose_times(table: tables.Table) -> Iterable[Change]:
    return TIMES.values()


def choose_values(table: tables.Table) -> Iterable[Change]:
    return [change for _, change in list_values(table)]


def say_everything(path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], float]:
    """Return the lines of all reports on a recording, and the seconds of processor time."""
    page, table = folder / "page.html", folder / "table.csv"
    begin_s = time.process_time()
    said = []
    for arguments in (
        ["findings", str(path), "--json"],
        ["memory", str(path)],
        ["report", str(path), "-o", str(page), "--force"],
        ["export", str(path), "--table", "steps", "-o", str(table), "--force"],
    ):
        assert main(arguments) == 0, arguments
        said.append(capsys.readouterr().out)
    said += [re.sub(r"<script.*?</script>|<[^>]+>", "\n", page.read_text(), flags=re.DOTALL), table.read_text()]
    seconds = time.process_time() - begin_s
    lines = [line.strip() for text in said for line in text.splitlines() if line.strip()]
    # Its size on disk is another, and what is left out is said.
    return [line for line in lines if not re.search(r"damaged record|^[\d.]+ [KM]i?B\b|^Recording [\d.]+", line)], seconds


@pytest.mark.parametrize("choose", [choose_times, choose_values])
@pytest.mark.parametrize("name", NAMES)
def test_impossible_records_change_nothing_that_is_printed(
    name: str, choose: Callable[[tables.Table], Iterable[Change]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = recordings.find_packed_file(name)
    whole, changed = tmp_path / "whole" / name, tmp_path / "changed" / name
    write_changed(packed, whole, lambda table: ())
    added = write_changed(packed, changed, choose)
    assert added > 50
    say_everything(whole, tmp_path, capsys)  # imports modules
    expected, usual_s = say_everything(whole, tmp_path, capsys)
    used_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said, seconds = say_everything(changed, tmp_path, capsys)
    assert said == expected
    assert seconds < 3 * usual_s + SLACK_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used_before) << 10 < MOST_BYTES
    folders = [Recording.open(path) for path in (whole, changed)]
    counts = [
        sum(len(source.array) for sources in recording.sources.values() for source in sources) for recording in folders
    ]
    # One value of a host may be possible where it was not known before.
    kept = counts[1] - counts[0]
    assert kept <= (choose is choose_values)
    assert folders[1].damaged_records == added - kept
    assert folders[0].last_written_ns == folders[1].last_written_ns


def read_in_pieces(folder: Path, table: tables.Table, pieces: Iterable[list[Rows]]) -> Recording:
    """Read tables of many ranks, each of which gets a piece after the other."""
    folder.mkdir()
    writers = [write_table(folder, table, make_identity(rank)) for rank in range(RANKS)]
    recording = read_recording(folder)
    for piece in pieces:
        for writer, rows in zip(writers, piece, strict=True):
            for row in rows.tolist():
                writer.write(*row)
        recording.refresh()
    for writer in writers:
        writer.close()
    return recording


@pytest.mark.parametrize("name", [*tables.TABLES])
def test_records_that_are_checked_together_are_found_as_one_by_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tables.TABLES[name]
    dtype = np.dtype([tuple(field) for field in table.dtype])
    times = {"begin_ns": S - 1, table.time_column: S}
    fields: dict[str, Any] = {key: value for key, value in times.items() if key in (dtype.names or ())}
    row = make_record(table, **fields)
    whole = np.array([row] * 8, dtype)
    for column in times.keys() & set(dtype.names or ()):
        whole[column] += np.arange(8) * S // 10
    changes: list[Change] = [*TIMES.values(), *(change for _, change in list_values(table)), partial(begin_earlier, DAY_NS)]
    for number, change in enumerate(changes):
        place, added = change(whole[4:], table.time_column)
        damaged = np.insert(whole[4:], [place + 1] * len(added), added)
        pieces = [[whole[:4]] * RANKS, [*[whole[4:]] * (RANKS - 1), damaged]]
        find_damaged: Any = mock.create_autospec(RecordCheck.find_damaged, side_effect=RecordCheck.find_damaged)
        monkeypatch.setattr(RecordCheck, "find_damaged", find_damaged)
        together = read_in_pieces(tmp_path / f"{number}-together", table, pieces)
        # the first ones, and the damaged
        assert find_damaged.call_count <= 3 * RANKS // 2 or table is tables.OUTPUT
        monkeypatch.setattr(table_files, "_MANY_TABLES", RANKS + 1)
        alone = read_in_pieces(tmp_path / f"{number}-alone", table, pieces)
        monkeypatch.undo()
        arrays = [[source.array.tobytes() for source in one.sources[name]] for one in (together, alone)]
        assert arrays[0] == arrays[1]
        assert together.damaged_records == alone.damaged_records
        assert together.last_written_ns == alone.last_written_ns


@pytest.mark.parametrize("room", [0, 1 << 16])
def test_tables_that_grow_beyond_their_mapping_are_checked_together(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_map, "_ROOM", room)
    find_damaged: Any = mock.create_autospec(RecordCheck.find_damaged, side_effect=RecordCheck.find_damaged)
    monkeypatch.setattr(RecordCheck, "find_damaged", find_damaged)
    rows = np.array([make_record(tables.GPUS, time_ns=S + tick) for tick in range(1500)], [*map(tuple, tables.GPUS.dtype)])
    recording = read_in_pieces(tmp_path / "one", tables.GPUS, [[part] * RANKS for part in np.split(rows, 3)])
    assert [source.array.tobytes() for source in recording.sources["gpus"]] == [rows.tobytes()] * RANKS
    assert find_damaged.call_count == RANKS  # of the first ones


async def test_screens_of_a_recording_with_impossible_records(tmp_path: Path) -> None:
    path = tmp_path / "changed"
    write_changed(recordings.find_packed_file("z2-oom"), path, lambda table: [*choose_times(table), *choose_values(table)])
    await visit_screens(path)


def write_times(folder: Path, table: tables.Table, *times: int) -> RecordWriter:
    records = (make_record(table, time_ns=when) for when in times)
    return write_table(folder, table, make_identity(-1), *records)


@pytest.mark.parametrize("name", NAMES)
def test_a_phase_that_began_a_day_before_the_others_is_left_out(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    added = write_changed(recordings.find_packed_file(name), folder, lambda table: [partial(begin_earlier, DAY_NS)])
    recording = Recording.open(folder)
    assert added > 0
    assert sum(len(source.array) for source in recording.sources["spans"]) > 0
    assert recording.damaged_records == added


def test_a_long_pause_of_the_whole_job_is_no_damage(tmp_path: Path) -> None:
    """A suspended machine: the tables go on days later, first with one record each."""
    writers = [write_times(tmp_path, table, S, 2 * S) for table in (tables.HOSTS, tables.PROCESSES)]
    recording = read_recording(tmp_path)
    resumed = 3 * DAY_NS
    for tick in range(30):
        for writer, table in zip(writers, (tables.HOSTS, tables.PROCESSES), strict=True):
            writer.write(*make_record(table, time_ns=resumed + tick * S // 10))
        recording.refresh()
    assert recording.damaged_records == 0
    assert [len(recording.sources[table.name][0].array) for table in (tables.HOSTS, tables.PROCESSES)] == [32, 32]
    assert read_recording(tmp_path).damaged_records == 0
    for writer in writers:
        writer.close()


def test_one_table_alone_does_not_go_on(tmp_path: Path) -> None:
    """A table whose end was shifted by years, beside one that ends in time."""
    shifted = [YEAR_NS + tick * S for tick in range(50)]
    write_times(tmp_path, tables.HOSTS, S, 2 * S, *shifted).close()
    write_times(tmp_path, tables.PROCESSES, S, 2 * S, 3 * S).close()
    recording = read_recording(tmp_path)
    assert recording.damaged_records == 50
    assert recording.last_written_ns == BEGIN_NS + 3 * S


def test_a_late_record_waits_until_another_table_is_as_late(tmp_path: Path) -> None:
    writer = write_times(tmp_path, tables.HOSTS, S, 2 * S, YEAR_NS)
    recording = read_recording(tmp_path)
    source = recording.sources["hosts"][0]
    assert (len(source.array), recording.damaged_records, recording.last_written_ns) == (2, 1, BEGIN_NS + 2 * S)
    write_times(tmp_path, tables.PROCESSES, YEAR_NS + 5).close()
    recording.refresh()
    assert (len(source.array), recording.damaged_records) == (2, 2)  # each is alone
    for when in (3 * S, 4 * S):  # it goes on before
        writer.write(*make_record(tables.HOSTS, time_ns=when))
    recording.refresh()
    assert source.array["time_ns"].tolist() == [S, 2 * S, 3 * S, 4 * S]
    writer.close()
