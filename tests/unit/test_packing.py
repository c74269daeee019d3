"""Packed recordings: the same files come out, and the program reads both alike; damage is one sentence."""

from __future__ import annotations

import io
import json
import math
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from small_recording import make_identity, make_span, write_table
from zerotop.cli import main
from zerotop.recording import catalog
from zerotop.recording.output.tail import read_output_tail
from zerotop.recording.packed.packing import PACKED_FORMAT, SUFFIX, pack_folder, unpack_files
from zerotop.recording.reader import Recording, RecordingError
from zerotop.recording.storage import Directory, UnpackedFolder
from zerotop_probe.recording import directory, tables
from zerotop_probe.recording.writer import EventWriter, RecordWriter


def make_recording(folder: Path) -> Path:
    """A recording with two ranks, a sampler, events and output, whose job has ended."""
    path = Path(directory.create_recording(["python", "train.py"], path=str(folder / "recording")))
    for rank in (0, 1):
        write_table(path, tables.SPANS, make_identity(rank), make_span(0, 1, "forward"), make_span(1, 2, "step", 3)).close()
    name = b"pt_autograd_0"
    threads = [(time, 1, 2, cores, 5, 6, 7, name) for time, cores in ((1, 0.5), (2, math.nan), (3, -0.0))]
    write_table(path, tables.THREADS, make_identity(-1), *threads).close()
    write_table(path, tables.OUTPUT, make_identity(-1), (1, 0, 6, 0, 0), (2, 6, 7, 1, 0)).close()
    (output,) = path.glob("output-*.rec")
    output.with_suffix(".log").write_bytes(b"hello\nworld\xff\n")
    with_events(path, "job_started", "job_ended")
    return path


def with_events(path: Path, *names: str) -> None:
    events = EventWriter(str(path), make_identity(-1))
    for place, name in enumerate(names):
        events.write(place, name, exit_code=0)
    events.close()


def pack_recording(path: Path) -> bytes:
    stream = io.BytesIO()
    assert pack_folder(Directory(path), stream) == []
    return stream.getvalue()


def packed_file(path: Path) -> Path:
    file = path.with_name("packed" + SUFFIX)
    file.write_bytes(pack_recording(path))
    return file


def read_contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def read_refusal(path: Path) -> str:
    with pytest.raises(RecordingError) as caught:
        Recording.open(path)
    assert str(caught.value).endswith(".")
    return str(caught.value)


def test_the_same_files_come_out_and_the_same_bytes_go_in(tmp_path: Path) -> None:
    path = make_recording(tmp_path)
    assert unpack_files(packed_file(path)) == read_contents(path)
    assert pack_recording(path) == pack_recording(path)


def test_a_packed_recording_is_the_recording(tmp_path: Path) -> None:
    path = make_recording(tmp_path)
    one, other = Recording.open(path), Recording.open(packed_file(path))
    assert (one.name, other.name) == ("recording", "packed")  # each has the name of its file
    assert (one.info, one.events) == (other.info, other.events)
    assert (one.begin_ns, one.last_written_ns) == (other.begin_ns, other.last_written_ns)
    for table, sources in one.sources.items():
        assert [s.path.name for s in sources] == [s.path.name for s in other.sources[table]]
        for source, again in zip(sources, other.sources[table], strict=True):
            assert source.array.tobytes() == again.array.tobytes()
            assert source.array.dtype == again.array.dtype
            assert (source.header, source.rank, source.offset_ns) == (again.header, again.rank, again.offset_ns)
    for recording in (one, other):
        assert read_output_tail(recording.at(one.last_written_ns)) == b"hello\nworld\xff\n"
    assert not other.refresh()
    other.release_memory()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_values_of_any_plain_types(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Every bit pattern comes back, in columns that no table of today has, too."""
    codes = data.draw(st.lists(st.sampled_from("qQiIHBfd") | st.sampled_from(["1s", "7s", "16s"]), min_size=1, max_size=5))
    fields = tuple(tables.Field(f"more{place}", code, "") for place, code in enumerate(codes))
    table = tables.PROBE._replace(fields=tables.PROBE.fields + fields)
    path = Path(directory.create_recording(["x"], path=str(tmp_path_factory.mktemp("any") / "recording")))
    RecordWriter(str(path), table, make_identity(0)).close()
    (file,) = path.glob("*.rec")
    with file.open("ab") as opened:
        count = data.draw(st.integers(0, 5))
        opened.write(
            data.draw(st.binary(min_size=count * table.record_struct.size, max_size=count * table.record_struct.size))
        )
    assert unpack_files(packed_file(path)) == read_contents(path)


def test_tables_are_parquet_that_others_can_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(pack_recording(make_recording(tmp_path)))) as archive:
        (name,) = [name for name in archive.namelist() if name.startswith("spans")]
        frame = polars.read_parquet(archive.read(name))
    assert frame["step"].to_list() == [0, 3, 0, 3]
    assert frame.columns == [field.name for field in tables.SPANS.fields]


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    path = make_recording(tmp_path)
    before = read_contents(path)
    for file in path.glob("spans-*.rec"):
        with file.open("ab") as opened:
            opened.write(b"half a record")
    assert unpack_files(packed_file(path)) == before


def test_damaged_and_unknown_files_are_packed_unchanged(tmp_path: Path) -> None:
    path = make_recording(tmp_path)
    (path / "probe-x.rec").write_bytes(b"no header\n")
    (path / "probe-y.rec").write_bytes(b"")
    header = json.loads((next(path.glob("spans-*"))).read_bytes().split(b"\n")[0])
    odd = header | {"table": "future", "dtype": [["place", "<f2"], ["time_ns", "<i8"]]}
    (path / "future-x.rec").write_bytes(json.dumps(odd).encode() + b"\n" + bytes(20))
    for number, wrong in enumerate(({"dtype": []}, {"table": "../elsewhere"}, {"table": 5})):
        (path / f"wrong{number}-x.rec").write_bytes(json.dumps(header | wrong).encode() + b"\n" + bytes(8))
    for encoding in ("utf-16", "utf-8-sig"):
        (path / f"probe-{encoding}.rec").write_bytes(json.dumps(odd).encode(encoding) + b"\n")
    later = header | {"table": "later", "dtype": [["time_ns", "<i8"]]}
    (path / "later-x.rec").write_bytes(json.dumps(later).encode() + b"\n" + bytes(range(16)))
    with open(next(path.glob("events-*")), "ab") as events:
        events.write(b"no event\n\xff\nhalf a li")
    file = packed_file(path)
    assert unpack_files(file) == read_contents(path)
    one, other = Recording.open(path), Recording.open(file)
    assert (one.damaged_files, one.damaged_lines) == (other.damaged_files, other.damaged_lines)
    assert (one.damaged_files > 0, one.damaged_lines) == (True, 2)


def test_writers_of_two_versions_of_a_table(tmp_path: Path) -> None:
    path = make_recording(tmp_path)
    wider = tables.PROBE._replace(fields=(*tables.PROBE.fields, tables.Field("new", "q", "")))
    for rank, table in ((0, tables.PROBE), (1, wider), (2, tables.PROBE)):
        writer = RecordWriter(str(path), table, make_identity(rank))
        writer.write(*range(len(table.fields)))
        writer.close()
    assert unpack_files(packed_file(path)) == read_contents(path)


def test_foreign_files_are_left_out_and_named(tmp_path: Path) -> None:
    path = make_recording(tmp_path)
    (path / "snapshot.pickle").write_bytes(b"\x80")
    stream = io.BytesIO()
    assert pack_folder(Directory(path), stream) == ["snapshot.pickle"]
    assert b"snapshot" not in stream.getvalue()


def test_cut_short_anywhere(tmp_path: Path) -> None:
    file = packed_file(make_recording(tmp_path))
    data = file.read_bytes()
    for length in [0, 1, 3, *range(4, len(data), 61), len(data) - 1]:
        file.write_bytes(data[:length])
        assert ("is not a recording" if length < 4 else "is damaged or was cut short") in read_refusal(file)


def test_a_changed_byte_anywhere_is_noticed_or_harmless(tmp_path: Path) -> None:
    path = make_recording(tmp_path)
    file = packed_file(path)
    data, whole = file.read_bytes(), read_contents(path)
    noticed = 0
    for place in range(0, len(data), 17):
        file.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            assert set(unpack_files(file).values()) <= set(whole.values())
        except RecordingError:
            noticed += 1
    assert noticed > 100


def with_contents(data: bytes, change: Callable[[dict[str, Any]], None], **members: bytes) -> bytes:
    """A packed recording whose contents say something else, with good checksums."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(stream, "w") as changed:
        for name in archive.namelist():
            about = archive.read(name)
            if name == "packed.json":
                value = json.loads(about)
                change(value)
                about = json.dumps(value).encode()
            elif name.startswith("spans"):
                about = members.get("spans", about)
            changed.writestr(zipfile.ZipInfo(name), about)
    return stream.getvalue()


def test_newer_formats(tmp_path: Path) -> None:
    file = packed_file(make_recording(tmp_path))
    data = file.read_bytes()
    file.write_bytes(with_contents(data, lambda about: about.update(packed=PACKED_FORMAT + 1)))
    assert "was packed in format 2, this zerotop reads up to 1: use a newer zerotop." in read_refusal(file)
    file.write_bytes(with_contents(data, lambda about: about.update(zerotop=[tables.FORMAT_MAJOR + 1, 0])))
    assert "use a newer zerotop." in read_refusal(file)


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "more records than there are": lambda table: table["files"][0].update(records=10**12),
    "fewer than none": lambda table: table["files"][0].update(records=-1),
    "no header": lambda table: table["files"][0].update(header=""),
    "objects": lambda table: table["files"][0].update(header=json.dumps({"dtype": [["begin_ns", "|O8"]]})),
    "an array in each record": lambda table: table["files"][0].update(header=json.dumps({"dtype": [["x", "(9,)<i8"]]})),
    "a column that is not there": lambda table: table["files"][0].update(header=json.dumps({"dtype": [["x", "<i8"]]})),
    "another type": lambda table: table["files"][0].update(header=json.dumps({"dtype": [["begin_ns", "<i4"]]})),
    "text of a number": lambda table: table["files"][0].update(header=json.dumps({"dtype": [["begin_ns", "S8"]]})),
    "no files": lambda table: table.update(files=[]),
    "no list": lambda table: table.update(files=5),
    "another member": lambda table: table.update(parquet="session.json"),
    "no member": lambda table: table.update(parquet="none"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_false_contents_are_refused(tmp_path: Path, what: str) -> None:
    file = packed_file(make_recording(tmp_path))

    def damage_table(about: dict[str, Any]) -> None:
        (table,) = [table for table in about["tables"] if table["parquet"].startswith("spans")]
        HOSTILE[what](table)

    file.write_bytes(with_contents(file.read_bytes(), damage_table))
    assert "is damaged" in read_refusal(file)


@pytest.mark.parametrize("parquet", [b"", b"PAR1", b"PAR1" * 40, b"PAR1" + bytes(99) + b"\x20\x00\x00\x00PAR1"])
def test_a_file_that_is_not_parquet(tmp_path: Path, parquet: bytes) -> None:
    file = packed_file(make_recording(tmp_path))
    file.write_bytes(with_contents(file.read_bytes(), lambda about: None, spans=parquet))
    assert "is damaged or was cut short" in read_refusal(file)


def test_files_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "file.zerotop"
    file.write_text("hello")
    assert "file.zerotop is not a recording" in read_refusal(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("hello", "world")
    assert "a zip of something else" in read_refusal(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("packed.json", json.dumps({"zerotop": [1, 0], "packed": 1, "tables": []}))
    assert "it has no session.json" in read_refusal(file)


def test_files_in_memory_read_like_files_on_disk(tmp_path: Path) -> None:
    (tmp_path / "name").write_bytes(b"0123456789")
    on_disk, in_memory = Directory(tmp_path), UnpackedFolder(tmp_path, {"name": b"0123456789"})
    assert on_disk.list_files() == in_memory.list_files() == ["name"]
    for begin, end in ((0, None), (3, 7), (8, 20), (12, 20), (7, 3)):
        assert on_disk.read_bytes("name", begin, end) == in_memory.read_bytes("name", begin, end)
    for folder in (on_disk, in_memory):
        size, seen = folder.view_segments(("name",), 0, 1)
        assert np.frombuffer(seen, np.uint8, size).tobytes() == b"0123456789"
        for read in (folder.file_size, folder.read_bytes):
            with pytest.raises(FileNotFoundError):
                read("none")
        with pytest.raises(FileNotFoundError):
            folder.view_segments(("none",), 0, 1)


def test_a_packed_file_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_recording(tmp_path)
    file = packed_file(path)
    assert set(catalog.list_recordings(tmp_path)) == {path, file}
    assert catalog.find_recording("pack", tmp_path) == file
    assert catalog.find_recording(str(file)) == file
    # A file that happens to be called like a recording hides it no more than before.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "reco").touch()
    monkeypatch.chdir(elsewhere)
    assert catalog.find_recording("reco", tmp_path) == path


@pytest.fixture
def recording_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state directory and, beside it, the working directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path / "state" / "zerotop" / "sessions"


def test_the_command(recording_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_recording(recording_root)
    assert main(["pack", "reco"]) == 0
    file = tmp_path / "here" / "recording.zerotop"
    assert unpack_files(file) == read_contents(path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().out.startswith("recording.zerotop: ")
    for arguments, said in (
        (["pack", "reco"], "recording.zerotop already exists: add --force to replace it, or name another file with -o FILE"),
        (["pack", str(file)], "is already packed"),
        (
            ["pack", "reco", "-o", str(tmp_path / "no" / "x")],
            f"No such file or directory: {tmp_path}/no/x. There is no folder {tmp_path}/no",
        ),
        (["attach", str(file)], f"is a packed recording; watch it with: zerotop replay {file}"),
    ):
        assert main(arguments) == 1
        assert said in capsys.readouterr().err
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_both_forms_are_listed_and_exported_alike(recording_root: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    path = make_recording(recording_root)
    exported = []
    assert main(["pack", "recording", "-o", str(path.with_name("other.zerotop"))]) == 0
    for name in ("recording", "other"):
        capsysbinary.readouterr()
        assert main(["export", name, "--table", "spans"]) == 0
        exported.append(capsysbinary.readouterr().out)
    assert exported[0] == exported[1]
    assert exported[0].count(b"\n") == 5
    assert main(["recordings", "--json"]) == 0
    rows = json.loads(capsysbinary.readouterr().out)
    assert {(row["name"], row["state"], row["exit_code"]) for row in rows} == {
        ("recording", "ended", 0),
        ("other.zerotop", "ended", 0),
    }


def test_a_job_that_runs_is_packed_up_to_now(recording_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_recording(recording_root)
    for events in path.glob("events-*"):
        events.unlink()
    future = {"clock": {"monotonic_ns": 0, "unix_ns": 2 * 10**18}}
    file = path / directory.SESSION_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | future))
    assert Recording.open(path).is_live
    assert main(["pack", "recording"]) == 0
    assert "The job is still running: packing the recording up to now." in capsys.readouterr().err
    assert not Recording.open(Path("recording.zerotop")).is_live


def test_a_broken_recording_is_not_packed(recording_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_recording(recording_root)
    (path / directory.SESSION_FILE).write_text("{")
    assert main(["pack", str(path)]) == 1
    assert "is damaged" in capsys.readouterr().err
    shutil.rmtree(path)
    assert main(["pack", str(path)]) == 1
    assert "There is no recording" in capsys.readouterr().err
    assert list(Path().iterdir()) == []
