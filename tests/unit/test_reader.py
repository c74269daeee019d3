"""Reading recordings: whole, torn, growing, damaged, of the future."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerotop.recording import storage as folders
from zerotop.recording.memory_map import choose_room
from zerotop.recording.reader import Recording, RecordingError
from zerotop_probe.recording import directory, tables
from zerotop_probe.recording.events import JobEnded
from zerotop_probe.recording.writer import EventWriter, Identity, RecordWriter

MOST_OPEN = 48
WHO = Identity("rank", 0, "node1", 100, 1, "")
# Of a machine that has just booted: after a day, times such as 1 ns would be before any record of a rank.
BOOT = {"monotonic_ns": 0, "unix_ns": 10**18}


def make_recording(folder: Path) -> Path:
    return Path(directory.create_recording(["python", "train.py"], path=str(folder / "recording")))


def write_probe(folder: Path, *times: int, who: Identity = WHO) -> RecordWriter:
    writer = RecordWriter(str(folder), tables.PROBE, who, clock=BOOT)
    for time in times:
        writer.write(time, 1, 2, 0, 0, 0)
    return writer


def read_times(recording: Recording) -> list[list[int]]:
    return [source.array["time_ns"].tolist() for source in recording.sources["probe"]]


def test_truncated_anywhere(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    write_probe(folder, 1, 2, 3).close()
    (path,) = folder.glob("*.rec")
    data, size = path.read_bytes(), tables.PROBE.record_struct.size
    header = len(data) - 3 * size
    for length in [*range(header + 1), *range(len(data) - size, len(data) + 1)]:
        path.write_bytes(data[:length])
        recording = Recording.open(folder)
        assert read_times(recording) == ([] if length < header else [[1, 2, 3][: (length - header) // size]])
        assert recording.damaged_files == 0


def test_a_torn_record_and_a_torn_header_wait(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    write_probe(folder, 1, 2).close()
    (path,) = folder.glob("*.rec")
    data = path.read_bytes()
    path.write_bytes(data[:20])
    recording = Recording.open(folder)
    assert read_times(recording) == []
    for length, expected in ((len(data) - 5, [[1]]), (len(data), [[1, 2]])):
        with path.open("ab") as file:
            file.write(data[path.stat().st_size : length])
        assert recording.refresh()
        assert read_times(recording) == expected
    assert not recording.refresh()


def test_growing(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    recording = Recording.open(folder)
    assert read_times(recording) == []
    assert not recording.refresh()
    first = write_probe(folder, 1)
    assert recording.refresh()
    assert read_times(recording) == [[1]]
    first.write(2, 1, 2, 0, 0, 0)
    second = write_probe(folder, 7, who=WHO._replace(rank=1))
    events = EventWriter(str(folder), WHO)
    events.write(5, "late")
    events.write(4, "early")
    assert recording.refresh()
    assert read_times(recording) == [[1, 2], [7]]
    assert [event.event_name for event in recording.events] == ["early", "late"]
    assert not recording.refresh()
    source = recording.sources["probe"][0]
    assert [source.count_until(source.offset_ns + time) for time in (0, 1, 2, 3)] == [0, 1, 2, 2]
    for writer in (first, second, events):
        writer.close()


@pytest.mark.parametrize("room", [0, 100, 1 << 17])
def test_growing_within_what_is_mapped_and_beyond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(folders, "choose_room", lambda path: room)
    folder, written = make_recording(tmp_path), [1]
    writer = write_probe(folder, 1)
    recording = Recording.open(folder)
    (source,) = recording.sources["probe"]
    first, begin = source.array, source.array.ctypes.data
    for count in (1, 2, 30, 10_000, 1):
        for _ in range(count):
            written.append(len(written))
            writer.write(written[-1], 1, 2, 0, 0, 0)
        assert recording.refresh()
        assert read_times(recording) == [written]
        if len(written) < 30:
            assert (source.array.ctypes.data == begin) == ((len(written) - 1) * tables.PROBE.record_struct.size <= room)
    assert first["time_ns"].tolist() == [1]
    assert not recording.refresh()
    writer.close()


def test_a_file_that_takes_the_name_of_another_is_read_instead_once_it_has_more(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    assert choose_room(str(folder)) > 0  # else nothing is mapped before it is there
    write_probe(folder, 1, 2, 3).close()
    (path,) = folder.glob("*.rec")
    data, size = path.read_bytes(), tables.PROBE.record_struct.size
    recording = Recording.open(folder)
    for fewer, expected in ((2, [1, 2, 3]), (-2, [1, 2, 3, 3, 3]), (-1, [1, 2, 3, 3, 3]), (-4, [1, 2, 3, *[3] * 4])):
        other = tmp_path / "other"
        other.write_bytes(data[: len(data) - fewer * size] if fewer > 0 else data + data[-size:] * -fewer)
        other.replace(path)
        recording.refresh()
        assert read_times(recording) == [expected]


def test_more_tables_than_files_may_be_open(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    for rank in range(80):
        write_probe(folder, rank, who=WHO._replace(rank=rank)).close()
    most = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({MOST_OPEN}, {MOST_OPEN}))"
    sums = "sum(int(source.array['time_ns'].sum()) for source in Recording.open(Path(sys.argv[1])).sources['probe'])"
    program = f"import sys; from pathlib import Path; from zerotop.recording.reader import Recording; {most}; print({sums})"
    done = subprocess.run([sys.executable, "-c", program, folder], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(sum(range(80)))]


def test_records_are_counted_and_ticks_found_however_far_back(tmp_path: Path) -> None:
    folder, ticks = make_recording(tmp_path), [1, 2, 3, 70, 5, 600, 9000, 1, 66]  # records of each
    written = [time for time, count in enumerate(ticks) for _ in range(count)]
    write_probe(folder, *written).close()
    (source,) = Recording.open(folder).sources["probe"]
    for time, count in enumerate(ticks):
        known = sum(ticks[: time + 1])
        assert source.count_until(source.offset_ns + time) == known
        assert source.read_last_tick(source.offset_ns + time)["time_ns"].tolist() == [time] * count
    assert source.count_until(source.offset_ns - 1) == 0


def test_a_long_table_is_not_read_for_its_last_tick(tmp_path: Path) -> None:
    folder, ticks = make_recording(tmp_path), [20_000, 1, 5, 800, 7, 9]  # records of each
    write_probe(folder, *(time for time, count in enumerate(ticks, 1) for _ in range(count))).close()
    for time, count in enumerate(ticks, 1):
        (source,) = Recording.open(folder).sources["probe"]
        moment_ns = source.offset_ns + time
        assert source.count_written(moment_ns) == sum(ticks[:time])
        assert source.read_last_tick(moment_ns)["time_ns"].tolist() == [time] * count
        assert len(source.read_last_tick(moment_ns, moment_ns + 1)) == 0
        assert source.has_been_read == (time == 1)
        assert source.count_until(moment_ns) == sum(ticks[:time])
        assert source.has_been_read


def test_damage_near_the_end_is_left_out_of_a_last_tick(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    begin_ns = 10**15
    write_probe(folder, *range(begin_ns, begin_ns + 30_000)).close()
    (source,) = Recording.open(folder).sources["probe"]
    with max(folder.glob("probe-*.rec")).open("r+b") as opened:
        opened.seek(-10 * source.array.itemsize, 2)
        opened.write(bytes(10 * source.array.itemsize))
    (source,) = Recording.open(folder).sources["probe"]
    last_ns = begin_ns + 29_989
    assert source.read_last_tick(source.offset_ns + last_ns + 10**9)["time_ns"].tolist() == [last_ns]
    assert source.damaged_records == 10


def test_released_memory_is_read_again(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    count = 100_000
    write_probe(folder, *range(count)).close()
    recording = Recording.open(folder)
    (source,) = recording.sources["probe"]
    assert source.array["time_ns"].sum() == count * (count - 1) // 2
    before = resident_file_kib()
    recording.release_memory()
    assert before - resident_file_kib() > source.array.nbytes / 1024 / 2
    assert source.array["time_ns"].sum() == count * (count - 1) // 2


def resident_file_kib() -> int:
    """How much of the files that this process has mapped is in its memory."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile:")]
    return int(line.split()[1])


def test_a_writer_is_known_by_its_header(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    clock = {"monotonic_ns": 7, "unix_ns": 1007}
    RecordWriter(str(folder), tables.ALLOCATOR, WHO, clock=clock, peaks="window").close()
    (source,) = Recording.open(folder).sources["allocator"]
    assert (source.created_ns, source.offset_ns, source.header["peaks"]) == (1007, 1000, "window")
    assert (source.role, source.rank, source.host, source.pid) == ("rank", 0, "node1", 100)
    assert source.last_ns is None


def change_recording(folder: Path, **facts: Any) -> None:
    path = folder / "session.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def read_refusal(path: Path) -> str:
    with pytest.raises(RecordingError) as caught:
        Recording.open(path)
    text = str(caught.value)
    assert text.endswith(".")
    return text


def test_no_recording(tmp_path: Path) -> None:
    assert "no recording at" in read_refusal(tmp_path / "missing")
    assert "session.json" in read_refusal(tmp_path)
    (tmp_path / "file").write_text("x")
    assert "is not a recording" in read_refusal(tmp_path / "file")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", "{}", '{"zerotop": [1, 0]}', "\xff", '{"zerotop": "1"}'])
def test_damaged_recording_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "session.json").write_text(text, encoding="latin-1")
    assert "damaged" in read_refusal(tmp_path)


@pytest.mark.parametrize("clock", [None, 5, [], {}, {"unix_ns": 1}, {"unix_ns": "x", "monotonic_ns": 1}])
def test_damaged_clock(tmp_path: Path, clock: Any) -> None:
    folder = make_recording(tmp_path)
    change_recording(folder, clock=clock)
    assert "damaged" in read_refusal(folder)


def test_newer_formats(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    change_recording(folder, zerotop=[tables.FORMAT_MAJOR, tables.FORMAT_MINOR + 9], more="facts")
    Recording.open(folder)
    change_recording(folder, zerotop=[tables.FORMAT_MAJOR + 1, 0])
    assert "newer zerotop" in read_refusal(folder)
    change_recording(folder, zerotop=[tables.FORMAT_MAJOR, 0])
    write_probe(folder, 1).close()
    (path,) = folder.glob("*.rec")
    path.write_bytes(path.read_bytes().replace(b'"zerotop": [1,', b'"zerotop": [2,'))
    assert "newer zerotop" in read_refusal(folder)


def test_unknown_tables_and_newer_columns_do_no_harm(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    extra = tables.Field("new", "q", "something of the future")
    wider = tables.PROBE._replace(fields=(*tables.PROBE.fields, extra))
    writer = RecordWriter(str(folder), wider, WHO, clock=BOOT)
    writer.write(1, 2, 3, 4, 5, 6, 7)
    other = RecordWriter(str(folder), tables.PROBE._replace(name="future"), WHO, clock=BOOT)
    other.write(1, 2, 3, 4, 5, 6)
    events = EventWriter(str(folder), WHO)
    events.write(1, "future", fact=[1])
    recording = Recording.open(folder)
    assert read_times(recording) == [[1]]
    assert recording.sources["probe"][0].array["new"].tolist() == [7]
    assert [(event.event_name, event.facts) for event in recording.events] == [("future", {"fact": [1]})]
    assert recording.damaged_files == 0
    for each in (writer, other, events):
        each.close()


@pytest.mark.parametrize("head", [b"", b"{}", b"[]", b"\xff", b'{"zerotop": [1, 0], "clock": 1, "table": "probe"}'])
def test_damaged_files_are_counted(tmp_path: Path, head: bytes) -> None:
    folder = make_recording(tmp_path)
    (folder / "probe-x.rec").write_bytes(head + b"\n")
    write_probe(folder, 1).close()
    recording = Recording.open(folder)
    assert read_times(recording) == [[1]]
    assert recording.damaged_files == 1


def test_a_file_without_a_whole_header_is_cut_once_the_job_is_over(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    write_probe(folder, 1).close()
    (path,) = folder.glob("*.rec")
    path.write_bytes(path.read_bytes()[:100])
    assert Recording.open(folder).cut_files == 0
    writer = EventWriter(str(folder), WHO)
    writer.write(1, JobEnded, exit_code=0, signal=None, text="The job ended.")
    writer.close()
    assert Recording.open(folder).cut_files == 1


def test_objects_are_never_read(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    write_probe(folder, 1).close()
    (path,) = folder.glob("*.rec")
    path.write_bytes(path.read_bytes().replace(b'["lost", "<i4"]', b'["lost", "|O8"]'))
    recording = Recording.open(folder)
    assert read_times(recording) == []
    assert recording.damaged_files == 1


def test_torn_and_damaged_events(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    events = EventWriter(str(folder), WHO)
    events.write(1, "one")
    (path,) = folder.glob("*.jsonl")
    with path.open("ab") as file:
        file.write(b'{"time_ns": 2, "ev\n[]\n{}\n\xff\n{"time_ns": Infinity, "event": "x"}\n')
    events.write(3, "three")
    with path.open("ab") as file:
        file.write(b'{"time_ns": 4, "event"')
    recording = Recording.open(folder)
    assert [event.event_name for event in recording.events] == ["one", "three"]
    assert recording.damaged_lines == 5
    with path.open("ab") as file:
        file.write(b': "four"}\n')
    assert recording.refresh()
    assert [event.event_name for event in recording.events] == ["one", "three", "four"]
    events.close()


def test_read_only(tmp_path: Path) -> None:
    folder = make_recording(tmp_path)
    write_probe(folder, 1).close()
    for path in folder.iterdir():
        path.chmod(0o400)
    folder.chmod(0o500)
    before = sorted(folder.iterdir())
    try:
        assert read_times(Recording.open(folder)) == [[1]]
        assert sorted(folder.iterdir()) == before
    finally:
        folder.chmod(0o700)


COUNT_FAULTS = """
import resource, sys
from pathlib import Path
import numpy as np
from zerotop.recording.reader import Recording
recording = Recording.open(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    [np.ones(1 << 17) for _ in range(4)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory by rules of its own")
def test_memory_of_freed_arrays_is_used_again(tmp_path: Path) -> None:
    """Four arrays of 1 MiB have 1024 pages."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, str(make_recording(tmp_path))], capture_output=True, check=True
    )
    assert int(done.stdout) < 2 * 1024
