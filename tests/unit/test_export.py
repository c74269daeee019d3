"""Export: the recorded values, with names and units, and no formulas for spreadsheets."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import polars
import pytest

import recordings
from recordings import FOLDER
from small_recording import BEGIN_NS, S, make_identity, make_record, read_recording
from small_recording import make_span as span_of
from small_recording import write_table as write_open
from zerotop.analysis.memory.phase_peaks import read_rank_peaks
from zerotop.analysis.reports import export_tables
from zerotop.analysis.reports.export import FORMATS, export_table
from zerotop.analysis.reports.export_tables import TABLES
from zerotop.cli import main
from zerotop.demo import RECORDING_PATH
from zerotop.recording.spreadsheet import escape_formula
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording import tables
from zerotop_probe.recording.events import Engine
from zerotop_probe.recording.tables import BOUNDARY, SKIPPED
from zerotop_probe.recording.writer import EventWriter, Identity


def write_closed_table(folder: Path, table: tables.Table, who: Identity, *records: tuple[Any, ...]) -> None:
    write_open(folder, table, who, *records).close()


def export_rows(recording: Any, table: str, fmt: str) -> list[dict[str, Any]]:
    stream = io.BytesIO()
    count = export_table(recording, table, fmt, stream)
    stream.seek(0)
    if fmt == "csv":
        got: list[dict[str, Any]] = list(csv.DictReader(io.TextIOWrapper(stream, "utf-8", newline="")))
    elif fmt == "jsonl":
        got = [json.loads(line) for line in stream]
    else:
        got = polars.read_parquet(stream).to_dicts()
    assert len(got) == count
    return got


def make_span(begin: int, flags: int = 0, tokens: int = -1) -> tuple[int, ...]:
    phase = tables.PHASE_CODE["forward"]
    return (begin, begin + 5, tokens, 3, 1, 2, 128, phase, flags, 0, 0, 0)


@pytest.mark.parametrize("fmt", ["jsonl", "parquet"])
def test_spans(tmp_path: Path, fmt: str) -> None:
    write_closed_table(tmp_path, tables.SPANS, make_identity(1), make_span(10), make_span(20))
    write_closed_table(tmp_path, tables.SPANS, make_identity(0), make_span(30, tables.SKIPPED | tables.EVAL, 256))
    got = export_rows(read_recording(tmp_path), "spans", fmt)
    assert list(got[0].items()) == [
        ("rank", 0),
        ("host", "node1"),
        ("begin_unix_ns", BEGIN_NS + 30),
        ("end_unix_ns", BEGIN_NS + 35),
        ("duration_ns", 5),
        ("tokens", 256),
        ("step", 3),
        ("micro_step", 1),
        ("rows", 2),
        ("sequence", 128),
        ("phase", "forward"),
        ("boundary", False),
        ("skipped", True),
        ("eval", True),
        ("failed", False),
        ("incomplete", False),
        ("light", False),
        ("counted", False),
        ("another_iterator", False),
        ("depth", 0),
        ("engine", 0),
    ]
    assert [(row["rank"], row["begin_unix_ns"] - BEGIN_NS, row["tokens"]) for row in got[1:]] == [
        (1, 10, None),
        (1, 20, None),
    ]


def test_batches_have_one_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_tables, "BATCH_ROWS", 2)
    write_closed_table(tmp_path, tables.SPANS, make_identity(0), *(make_span(time) for time in range(5)))
    for fmt in FORMATS:
        got = export_rows(read_recording(tmp_path), "spans", fmt)
        assert [int(row["begin_unix_ns"]) - BEGIN_NS for row in got] == [0, 1, 2, 3, 4]


def test_allocator_names_and_a_phase_of_the_future(tmp_path: Path) -> None:
    known = make_record(tables.ALLOCATOR, time_ns=1, phase=3, edge=tables.END)
    strange = make_record(tables.ALLOCATOR, time_ns=1, phase=99, edge=tables.TICK)
    write_closed_table(tmp_path, tables.ALLOCATOR, make_identity(0), known, strange)
    got = export_rows(read_recording(tmp_path), "allocator", "jsonl")
    assert [(row["phase"], row["edge"]) for row in got] == [("forward", "end"), (None, "tick")]
    assert "pad" not in got[0]


def test_readings_between_phases_have_the_step_of_their_own_time(tmp_path: Path) -> None:
    """The thread that reads the allocator sees only phases in progress: neither counted steps nor those recorded later."""
    spans = [
        *(span_of(1, 2, "forward", 0), span_of(3, 4, "step", 0, BOUNDARY)),
        span_of(9, 10, "step", 1, BOUNDARY | tables.COUNTED),
        span_of(19, 20, "step", 2, BOUNDARY | tables.COUNTED),
        *(span_of(21, 22, "forward", 3), span_of(23, 24, "step", 3, BOUNDARY)),
    ]
    ticks = [
        make_record(tables.ALLOCATOR, time_ns=int(at * S), step=0, micro_step=0, phase=0, edge=tables.TICK)
        for at in (0.5, 1.5, 2.5, 15, 20.5, 21.5, 25)
    ]
    known = make_record(tables.ALLOCATOR, time_ns=30 * S, step=9, micro_step=1, phase=4, edge=tables.TICK)
    write_closed_table(tmp_path, tables.SPANS, make_identity(0), *spans)
    write_closed_table(tmp_path, tables.ALLOCATOR, make_identity(0), *ticks, known)
    got = export_rows(read_recording(tmp_path), "allocator", "jsonl")
    assert [(row["step"], row["micro_step"], row["phase"]) for row in got] == [
        (None, None, "other"),
        (0, 0, "forward"),
        (0, None, "other"),
        (2, None, None),
        (3, None, "other"),
        (3, 0, "forward"),
        (None, None, "other"),
        (9, 1, "backward"),
    ]


EXPORTED = [table for name, table in tables.TABLES.items() if name in TABLES]


@pytest.mark.parametrize("table", EXPORTED, ids=[table.name for table in EXPORTED])
@pytest.mark.parametrize(("fmt", "null"), [("csv", ""), ("jsonl", None), ("parquet", None)])
def test_unknown_is_null_and_a_launcher_is_not(tmp_path: Path, table: tables.Table, fmt: str, null: Any) -> None:
    times = {field.name: 7 for field in table.fields if field.name in ("time_ns", "begin_ns", "end_ns")}
    by_rank = table.name in ("spans", "allocator", "device_times", "probe")
    write_closed_table(tmp_path, table, make_identity(0 if by_rank else -1), make_record(table, **times))
    (row,) = export_rows(read_recording(tmp_path), table.name, fmt)
    for field in table.fields:
        if field.code in "qifd" and field.name not in times:
            launcher = (table.name, field.name) == ("processes", "rank")
            assert row[field.name] == null if not launcher else int(row[field.name]) == -1, field.name


def test_numbers_below_zero_are_no_formulas(tmp_path: Path) -> None:
    write_closed_table(
        tmp_path, tables.GPUS, make_identity(-1), make_record(tables.GPUS, time_ns=1, temperature_c=-5.0, gpu=0)
    )
    assert float(export_rows(read_recording(tmp_path), "gpus", "csv")[0]["temperature_c"]) == -5


RISKY = (
    *("=1+1", "+a", "-a", "@a", "\ta", "\ra", "\na", "\uff1d1", "\uff20a", "\ufe66a"),
    *(" =1", "\u00a0=1", "\u3000\uff1d1", "\u200b=1", "\ufeff@a", "\x0b=1", "\u202e=1"),
)


@pytest.mark.parametrize("name", [*RISKY, 'a"b,c', "a\nb", "[red]", "", "a=1", "; a", "a-b", "'=1"])
def test_text_in_a_spreadsheet(tmp_path: Path, name: str) -> None:
    write_closed_table(tmp_path, tables.THREADS, make_identity(-1), (1, 2, 3, 0.5, 4, 5, 6, name.encode()))
    recording = read_recording(tmp_path)
    (row,) = export_rows(recording, "threads", "csv")
    assert row["name"] == escape_formula(name) == ("'" + name if name in RISKY else name)
    assert "rank" not in row
    for fmt in ("jsonl", "parquet"):
        assert export_rows(recording, "threads", fmt)[0]["name"] == name


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a;=1", "a;'=1"),
        ("a; =1", "a; '=1"),
        (";=1;@b", "';'=1;'@b"),
        ("; ;\uff0b1", "'; ;'\uff0b1"),
        ("a\t=1\n-b", "a\t'=1\n'-b"),
        ("a=1;b", "a=1;b"),
    ],
)
def test_a_cell_that_a_spreadsheet_divides(text: str, escaped: str) -> None:
    assert escape_formula(text) == escaped


def test_a_name_cut_within_a_letter(tmp_path: Path) -> None:
    write_closed_table(tmp_path, tables.THREADS, make_identity(-1), (1, 2, 3, 0.5, 4, 5, 6, "aé".encode()[:2]))
    for fmt in FORMATS:
        assert export_rows(read_recording(tmp_path), "threads", fmt)[0]["name"] == "a�"


def test_events(tmp_path: Path) -> None:
    ranks = EventWriter(str(tmp_path), make_identity(1, host="-n"))
    ranks.write(2, Engine, stage=2, loss=math.nan)
    node = EventWriter(str(tmp_path), make_identity(-1, host="-n"))
    node.write(3, "=gpu\ud800")
    recording = read_recording(tmp_path)
    first, second = export_rows(recording, "events", "jsonl")
    assert list(first) == ["time_unix_ns", "event", "rank", "host", "pid", "facts"]
    assert (first["time_unix_ns"], first["rank"], first["pid"]) == (BEGIN_NS + 2, 1, 101)
    assert json.loads(first["facts"]) == {"stage": 2, "loss": None}
    assert (second["event"], second["rank"], second["host"]) == ("=gpu?", None, "-n")
    assert export_rows(recording, "events", "csv")[1]["event"] == "'=gpu?"
    assert export_rows(recording, "events", "csv")[1]["host"] == "'-n"
    ranks.close()
    node.close()


def make_step_spans(begin: float, number: int, flags: int = 0) -> list[Any]:
    return [
        span_of(begin, begin + 1, "forward", number),
        span_of(begin + 1, begin + 2, "step", number, BOUNDARY | flags),
    ]


@pytest.mark.parametrize(("fmt", "null"), [("csv", ""), ("jsonl", None), ("parquet", None)])
def test_steps_of_a_recording(tmp_path: Path, fmt: str, null: Any) -> None:
    write_closed_table(tmp_path, tables.SPANS, make_identity(1), *make_step_spans(10, 0), *make_step_spans(20, 1, SKIPPED))
    write_open(tmp_path, tables.SPANS, make_identity(0, pid=9), *make_step_spans(50, 0), born=40).close()
    write_closed_table(tmp_path, tables.SPANS, make_identity(0), *make_step_spans(30, 0))
    recording = read_recording(tmp_path)
    got = export_rows(recording, "steps", fmt)
    assert list(got[0]) == [
        *("rank", "step", "begin_unix_s", "iteration_s", "data_s", "forward_s", "backward_s", "step_s", "optimizer_s"),
        *("eval_s", "checkpoint_s", "stages_s", "micro_steps", "rows", "tokens", "skipped", "light", "counted"),
        "allocated_peak_bytes",
        *(
            "reserved_peak_bytes",
            "host_rss_bytes",
            "host_held_bytes",
            "nvml_process_bytes",
            "begin_unix_ns",
            "end_unix_ns",
            "steps",
        ),
    ]
    assert [(int(row["rank"]), float(row["begin_unix_s"])) for row in got] == [(0, 1030), (0, 1050), (1, 1010), (1, 1012)]
    assert [float(row["iteration_s"]) for row in got] == [2, 2, 2, 10]
    assert [str(row["skipped"]).lower() for row in got] == ["false", "false", "false", "true"]
    assert [int(row["end_unix_ns"]) for row in got] == (read_steps(recording)["end_unix_ns"]).tolist()
    assert all(row[name] == null for row in got for name in ("tokens", "rows", "host_rss_bytes", "allocated_peak_bytes"))


@pytest.mark.parametrize("name", ["gpu-counted-leak", "story", "x2-zero3"])
def test_peaks_are_those_of_the_memory_command(name: str) -> None:
    """The highest of all may be of no finished step: of the steps after the last reading, or of initialization."""
    recording = recordings.open_recording(name)
    (frame,) = export_tables.build_frames(recording, "peaks", str)
    told = [(one.process.rank, peak) for one in read_rank_peaks(recording.at()) for peak in one.phases]
    assert frame["allocated_peak_bytes"].to_list() == [peak.allocated_bytes for _, peak in told]
    assert frame["rank"].to_list() == [rank for rank, _ in told]
    for row in frame.iter_rows(named=True):
        assert (row["step"] is None) == (row["phase"] == "init")
    if name != "x2-zero3":
        assert frame["allocated_peak_bytes"].max() > read_steps(recording)["allocated_peak_bytes"].max()


def test_a_number_says_its_unit(tmp_path: Path) -> None:
    units = ("_ns", "_s", "_bytes", "_percent", "_w", "_c", "_mhz", "_cores", "cores_used")
    counts = {
        *("loss", "grad_norm", "learning_rate"),
        "tokens",
        "rows",
        "sequence",
        "micro_steps",
        "steps",
        "thread_count",
        "busy_threads",
        "cores",
        "load",
        "boundaries",
        "child_processes",
    }
    counts |= {"retries", "ooms", "segments", "device_allocs", "device_frees", "lost", "errors", "cgroup_oom_kills"}
    counts |= {"major_faults", "loader_workers", "loader_blocked"}
    names = {"rank", "step", "micro_step", "depth", "engine", "device", "gpu", "pid", "tid", "processor", "throttle_reasons"}
    names |= {"because_of_step", "last_step"}
    for table in TABLES:
        stream = io.BytesIO()
        export_table(read_recording(tmp_path), table, "parquet", stream)
        stream.seek(0)
        for name, kind in polars.read_parquet_schema(stream).items():
            assert not kind.is_numeric() or name in counts | names or name.endswith(units), (table, name)


@pytest.mark.parametrize("table", TABLES)
def test_an_empty_recording_has_columns(tmp_path: Path, table: str) -> None:
    stream = io.BytesIO()
    assert export_table(read_recording(tmp_path), table, "csv", stream) == 0
    assert stream.getvalue().count(b"\n") == 1
    assert b"rank" in stream.getvalue() or b"host" in stream.getvalue()
    for fmt in ("jsonl", "parquet"):
        assert export_rows(read_recording(tmp_path), table, fmt) == []


@pytest.mark.parametrize(("table", "fmt"), [("nope", "csv"), ("spans", "xlsx")])
def test_unknown_names_are_refused(tmp_path: Path, table: str, fmt: str) -> None:
    with pytest.raises(ValueError, match=r"^Unknown .*\. Choose one of: .*\.$"):
        export_table(read_recording(tmp_path), table, fmt, io.BytesIO())


def test_a_link_where_we_write_is_not_followed(tmp_path: Path) -> None:
    """In a folder that others can write to somebody may guess how the unfinished file is called."""
    (tmp_path / "precious").write_text("kept")
    (tmp_path / f".steps.csv.{os.getpid()}").symlink_to(tmp_path / "precious")
    assert main(["export", str(FOLDER / "z2.zerotop"), "-o", str(tmp_path / "steps.csv")]) == 1
    assert (tmp_path / "precious").read_text() == "kept"
    assert not (tmp_path / "steps.csv").exists()


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no" / "steps.csv"
    assert main(["export", str(FOLDER / "z2.zerotop"), "-o", str(path)]) == 1
    missing = f"There is no folder {path.parent}: create it first, or choose another one"
    assert capsys.readouterr().err == f"zerotop: No such file or directory: {path}. {missing}\n"


def test_an_older_recording_has_the_columns_of_this_version() -> None:
    recording = recordings.open_recording("cpu-clean")
    for table in recording.sources:
        assert len({tuple(frame.columns) for frame in export_tables.build_frames(recording, table, str)}) == 1


@pytest.mark.parametrize(("name", "begin"), [("a.csv", b"rank,step,"), ("a.jsonl", b'{"rank":'), ("a.parquet", b"PAR1")])
def test_the_name_of_a_file_says_its_format(name: str, begin: bytes, tmp_path: Path) -> None:
    output = tmp_path / name
    assert main(["export", str(RECORDING_PATH), "-o", str(output)]) == 0
    assert output.read_bytes().startswith(begin)
    assert main(["export", str(RECORDING_PATH), "--format", "csv", "-o", str(output)]) == 1
    assert output.read_bytes().startswith(begin)
    assert main(["export", str(RECORDING_PATH), "--format", "csv", "--force", "-o", str(output)]) == 0
    assert output.read_bytes().startswith(b"rank,step,")
