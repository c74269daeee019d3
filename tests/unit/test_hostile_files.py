"""Recordings that are damaged or made to harm: bounded time and memory, and a sentence."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest

import recordings
from small_recording import S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.cli import main
from zerotop.recording.events.event_files import EventBudget
from zerotop.recording.packed.packing import MemoryBudget, pack_folder, unpack_files
from zerotop.recording.packed.parquet_pages import iter_page_sizes
from zerotop.recording.reader import Recording, RecordingError
from zerotop.recording.record_check import RecordCheck
from zerotop.recording.storage import Directory
from zerotop_probe.recording import directory, events, tables
from zerotop_probe.recording.tables import PROBE, SPANS, Table
from zerotop_probe.recording.writer import EventWriter

UPTIME_NS = 100_000 * S


def probe_rows(*times_s: float) -> Any:
    rows = np.zeros(len(times_s), [tuple(column) for column in PROBE.dtype])
    rows["time_ns"] = [int(time_s * S) for time_s in times_s]
    return rows


def find_damaged(table: Table, rows: Any, created_ns: int = UPTIME_NS) -> list[int]:
    """The places of the damaged records."""
    found = RecordCheck(table, created_ns).find_damaged(rows)
    return [] if found is None else np.flatnonzero(found).tolist()


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ((100_000, 100_001, 100_002), []),
        ((100_000, 100_005, 100_001, 100_006), []),  # threads write in turn
        ((100_000, 0, 0, 100_003), [1, 2]),  # a page that was never written
        ((0, 0, 100_002, 100_003), [0, 1]),
        ((0, 0, 0), [0, 1, 2]),
        ((100_000, 100_001, 0, 0), [2, 3]),
        ((100_000, 200_000, 100_002, 100_003), [1]),  # one from the future
        ((100_000, 100_001, 9e9, 100_002), [2]),
        ((100_000, -5, 100_002), [1]),
        ((100_000, 50_000, 100_002, 100_003), [1]),
        ((100_000, 200_000, 100_002, 0, 100_004), [1, 3]),
        ((), []),
    ],
)
def test_records_of_impossible_times(times_s: tuple[float, ...], expected: list[int]) -> None:
    assert find_damaged(PROBE, probe_rows(*times_s)) == expected


def test_reversed_records_are_not_all_believed() -> None:
    rows = probe_rows(*range(101_000, 100_000, -1))
    kept = np.delete(rows["time_ns"], find_damaged(PROBE, rows))
    assert (np.diff(kept) >= -10 * S).all()


def test_records_that_contradict_themselves() -> None:
    rows = np.array(
        [make_span(100_000, 100_001, "step"), make_span(100_003, 100_002, "step")], [tuple(c) for c in SPANS.dtype]
    )
    assert find_damaged(SPANS, rows) == [1]
    output = np.array(
        [make_record(tables.OUTPUT, time_ns=UPTIME_NS, offset=-5, length=1)], [tuple(c) for c in tables.OUTPUT.dtype]
    )
    assert find_damaged(tables.OUTPUT, output) == [0]


def test_zeroed_page_is_left_out_and_counted(tmp_path: Path) -> None:
    write_table(
        tmp_path, PROBE, make_identity(0), *((int((1000 + n) * S), 1, 2, 0, 0, 0) for n in range(500)), born=1000
    ).close()
    (path,) = tmp_path.glob("*.rec")
    data = bytearray(path.read_bytes())
    begin = len(data) - 400 * PROBE.record_struct.size
    data[begin : begin + 4096] = bytes(4096)
    path.write_bytes(data)
    recording = read_recording(tmp_path)
    (source,) = recording.sources["probe"]
    lost = -(-4096 // PROBE.record_struct.size) + 1
    assert 500 - lost <= len(source.array) < 500
    assert recording.damaged_records == 500 - len(source.array)
    times = source.array["time_ns"]
    assert (np.diff(times) > 0).all()
    # The file grows, and only what is new is checked.
    with path.open("ab") as file:
        file.write(PROBE.record_struct.pack(1600 * S, 1, 2, 0, 0, 0) + PROBE.record_struct.pack(0, 1, 2, 0, 0, 0))
    before = recording.damaged_records
    assert recording.refresh()
    assert source.array["time_ns"].tolist() == [*times.tolist(), 1600 * S]
    assert recording.damaged_records == before + 1


WRONG_DTYPES: list[Any] = [
    [["time_ns", "<f8"]],
    [["time_ns", "<i4"]],
    [["time_ns", ">i8"]],
    [["time_ns", "|O"]],
    [["time_ns", "S2000000000"]],
    [["time_ns", "<i8"]],
    [["time_ns", "<i8"], ["time_ns", "<i8"]],
    [[f"c{number}", "<i8"] for number in range(10_000)],
    "<i8",
    7,
    None,
    [[]],
]


@pytest.mark.parametrize("dtype", WRONG_DTYPES, ids=lambda dtype: str(dtype)[:30])
def test_header_with_another_dtype(tmp_path: Path, dtype: Any) -> None:
    write_table(tmp_path, PROBE, make_identity(0), (S, 1, 2, 0, 0, 0)).close()
    (path,) = tmp_path.glob("*.rec")
    line, _, data = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(line) | {"dtype": dtype}).encode() + b"\n" + data)
    recording = read_recording(tmp_path)
    assert recording.sources["probe"] == []
    assert recording.damaged_files == 1
    recording.refresh()
    assert recording.damaged_files == 1


def test_files_of_other_kinds_are_skipped_at_once(tmp_path: Path) -> None:
    write_table(tmp_path, PROBE, make_identity(0), (S, 1, 2, 0, 0, 0)).close()
    (path,) = tmp_path.glob("*.rec")
    os.mkfifo(tmp_path / "events-rank1-x-1.jsonl")
    os.mkfifo(tmp_path / "probe-rank1-x-1.rec")
    (tmp_path / "probe-rank2-x-1.rec").symlink_to(path)
    (tmp_path / "probe-rank3-x-1.rec").mkdir()
    (tmp_path / "events-rank4-x-1.jsonl").symlink_to("/dev/zero")
    with (tmp_path / "probe-rank5-x-1.rec").open("wb") as file:
        file.write(path.read_bytes())
        file.truncate(1 << 42)
    recording = read_recording(tmp_path)
    assert recording.damaged_files == 6
    assert [source.rank for source in recording.sources["probe"]] == [0]


def test_lines_that_are_no_events(tmp_path: Path) -> None:
    writer = EventWriter(str(tmp_path), make_identity(0))
    writer.write(time.monotonic_ns(), "known")
    writer.close()
    (path,) = tmp_path.glob("events-*")
    good = path.read_bytes().splitlines()[1]
    nested = b'{"time_ns":1,"event":"x","a":' + b"[" * 900 + b"]" * 900 + b"}"
    with path.open("ab") as file:
        for line in (b"[" * 100_000, b"x" * (9 << 20), nested, b'{"time_ns":1e300,"event":"x"}', good):
            file.write(line + b"\n")
    recording = read_recording(tmp_path)
    assert [event.event_name for event in recording.events] == ["known", "known"]
    assert recording.damaged_lines == 4


def test_events_have_a_budget() -> None:
    budget = EventBudget()
    line = b'{"a":[' + b"[]," * 300_000 + b"[]]}"
    admitted = sum(budget.admits(line) for _ in range(100))
    assert 0 < admitted < 20


def test_facts_of_infinite_size_are_none(tmp_path: Path) -> None:
    writer = EventWriter(str(tmp_path), make_identity(0))
    writer.write(time.monotonic_ns(), events.Overflow, step=1, loss_scale_before=float("inf"), loss_scale_after=2.0)
    writer.close()
    recording = read_recording(tmp_path)
    assert recording.events[0].facts["loss_scale_before"] is None
    assert recording.events[0].facts["loss_scale_after"] == 2.0


# --- packed ---------------------------------------------------------------------------------------------------------------


def test_page_sizes_are_those_of_the_file() -> None:
    values = {"a": np.arange(100_000), "b": [b"%d" % number for number in range(100_000)]}
    buffer = io.BytesIO()
    polars.DataFrame(values).write_parquet(buffer, compression="zstd", statistics=True)
    assert 100_000 * 8 < sum(iter_page_sizes(buffer.getvalue())) < 4_000_000
    for data in (b"", b"PAR1", buffer.getvalue()[:-9] + b"PAR1", buffer.getvalue()[1:]):
        with pytest.raises((ValueError, LookupError)):
            list(iter_page_sizes(data)) or [][0]


def test_any_damage_to_a_parquet_file_ends_soon() -> None:
    buffer = io.BytesIO()
    polars.DataFrame({"a": np.arange(1000), "b": [b"x"] * 1000}).write_parquet(buffer)
    data, chance = buffer.getvalue(), np.random.default_rng(1)
    begin_s = time.process_time()
    for _ in range(300):
        damaged_data = bytearray(data)
        for place in chance.integers(0, len(data), 4):
            damaged_data[place] = chance.integers(256)
        budget = MemoryBudget(Path("x"), 1 << 28)
        try:
            for size in iter_page_sizes(bytes(damaged_data)):
                budget.reserve(size + 1024)
        except (ValueError, LookupError, TypeError, AttributeError, RecordingError):
            pass
    assert time.process_time() - begin_s < 10


def packed_with(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_a_small_file_that_unpacks_to_gigabytes(tmp_path: Path) -> None:
    contents = {"zerotop": [1, 0], "packed": 1, "tables": []}
    path = packed_with(
        tmp_path / "bomb.zerotop", {"packed.json": json.dumps(contents).encode(), "events-a.jsonl": bytes(300 << 20)}
    )
    assert path.stat().st_size < 1 << 20
    with pytest.raises(RecordingError, match="would fill the memory if it were unpacked"):
        unpack_files(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("stated", [0, 100, 1 << 20])
def test_a_member_larger_than_it_says(tmp_path: Path, method: int, stated: int) -> None:
    path = tmp_path / "bomb.zerotop"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("packed.json", json.dumps({"zerotop": [1, 0], "packed": 1, "tables": []}), zipfile.ZIP_DEFLATED)
        archive.writestr("events-a.jsonl", bytes(100 << 20))
        archive.getinfo("events-a.jsonl").file_size = stated
    tracemalloc.start()
    try:
        with pytest.raises(RecordingError, match="is damaged or was cut short"):
            unpack_files(path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_table_of_more_records_than_memory(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("cpu-clean", tmp_path)
    path = tmp_path / "packed.zerotop"
    with path.open("wb") as stream:
        pack_folder(Directory(folder), stream)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    contents = json.loads(members["packed.json"])
    (table,) = [table for table in contents["tables"] if table["parquet"].startswith("spans")]
    buffer = io.BytesIO()
    one = polars.read_parquet(members[table["parquet"]]).head(1)
    one.select(polars.all().repeat_by(4_000_000).explode()).write_parquet(buffer, compression="zstd", statistics=False)
    members[table["parquet"]] = buffer.getvalue()
    table["files"] = [table["files"][0] | {"records": 8_000_000}]
    members["packed.json"] = json.dumps(contents).encode()
    assert len(buffer.getvalue()) < 1 << 20
    with pytest.raises(RecordingError, match="would fill the memory if it were unpacked"):
        unpack_files(packed_with(path, members))


def test_an_archive_of_very_many_members(tmp_path: Path) -> None:
    path = tmp_path / "many.zerotop"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"")
        archive.filelist *= 200_000
    with pytest.raises(RecordingError, match="too many members"):
        unpack_files(path)


# --- while it is shown ----------------------------------------------------------------------------------------------------

_SHRINK = """
import os, sys
from pathlib import Path
from zerotop.recording.reader import Recording, RecordingError
recording = Recording.open(Path(sys.argv[1]))
(source,) = recording.sources["probe"]
os.truncate(max(source.path.parent.glob("probe-*.rec")), 5000)  # the last segment, which is not read yet
print(int(source.array["time_ns"].sum()) > 0, len(source.array) < 50_000)
try:
    recording.refresh()
except RecordingError as error:
    print(error)
"""


def test_a_file_cut_short_under_a_reader(tmp_path: Path) -> None:
    """An access to lost pages would end the process with SIGBUS."""
    path = Path(directory.create_recording(["python", "train.py"], path=str(tmp_path / "recording")))
    clock = {"monotonic_ns": UPTIME_NS, "unix_ns": 10**18}
    rows = [(UPTIME_NS + n * S, 1, 2, 0, 0, 0) for n in range(50_000)]
    write_table(path, PROBE, make_identity(0), *rows, born=UPTIME_NS / S).close()
    assert clock["monotonic_ns"] == UPTIME_NS
    done = subprocess.run([sys.executable, "-c", _SHRINK, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "True True"
    assert done.stdout.splitlines()[1].endswith("was cut short while it was read: open the recording again.")


def test_another_bus_error_still_ends_the_process(tmp_path: Path) -> None:
    code = """
import mmap, sys
from zerotop.recording.memory_map import map_files
kept = map_files("", (sys.argv[1],), 64, 1)
with open(sys.argv[1], "r+b") as file:
    other = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
    other[5000]
"""
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    assert done.returncode == -7


# --- escapes --------------------------------------------------------------------------------------------------------------


def test_export_to_a_terminal_shows_escapes(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("cpu-clean", tmp_path)
    (path, *_) = folder.glob("events-node*")
    line = json.loads(path.read_text().splitlines()[1])
    with path.open("a") as file:
        file.write(json.dumps(line | {"event": "\x1b]0;title\x07\x1b[2J\x9b2J"}) + "\n")
    controller, terminal = pty.openpty()
    chunks: list[bytes] = []

    def collect_output() -> None:
        try:
            while data := os.read(controller, 1 << 16):
                chunks.append(data)
        except OSError:
            pass

    reader = threading.Thread(target=collect_output)
    reader.start()
    for form in ("csv", "jsonl"):
        command = [sys.executable, "-m", "zerotop", "export", str(folder), "--table", "events", "--format", form]
        subprocess.run(command, stdout=terminal, check=True)
    os.close(terminal)
    reader.join()
    os.close(controller)
    shown = b"".join(chunks)
    assert b"\x1b" not in shown
    assert b"\x9b" not in shown
    assert shown.count(rb"\x1b]0;title\x07\x1b[2J\x9b2J") == 1  # JSON has its own escapes
    assert b"job_started" in shown


def test_one_damaged_recording_leaves_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "zerotop" / "sessions"
    folder.mkdir(parents=True)
    recordings.unpack_to_folder("cpu-clean", folder)
    (folder / "bad.zerotop").write_bytes(b"PK\x03\x04" + bytes(1000))
    os.mkfifo(folder / "pipe.zerotop")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "session.json")
    assert main(["recordings"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "cpu-clean" in line] == ["cpu-clean"]
    assert any("bad.zerotop" in line and "is damaged" in line for line in lines)
    assert any(line.startswith("pipe") and "cannot be read" in line for line in lines)


def test_recording_opens_with_any_name(tmp_path: Path) -> None:
    path = Path(directory.create_recording(["python"], path=str(tmp_path / "recording")))
    file = path / "session.json"
    wrong: dict[str, Any]
    for wrong in ({"name": 5}, {"name": "x" * 10**6}, {"command": "python"}, {"command": [1]}, {"launcher": {}}):
        file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
        recording = Recording.open(path)
        assert recording.name == "recording"
        for key in wrong:
            assert key not in recording.info
