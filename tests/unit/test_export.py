"""Export: what is written is what was recorded, with names and units, and no formulas."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import polars
import pytest

from zerotop.analysis import export as exporting
from zerotop.analysis.export import FORMATS, MORE_TABLES, TABLES, export, spreadsheet_safe
from zerotop.analysis.steps import steps
from zerotop.session.reader import Session
from zerotop_probe.recording import tables
from zerotop_probe.recording.writer import EventWriter, Identity, RecordWriter

OFFSET = 1_700_000_000_000_000_000


def identity(rank: int, host: str = "node1") -> Identity:
    return Identity("rank" if rank >= 0 else "node", rank, host, 100 + rank, 1, "boot")


def write(folder: Path, table: tables.Table, who: Identity, *records: tuple[Any, ...]) -> None:
    writer = RecordWriter(str(folder), table, who)
    for record in records:
        writer.write(*record)
    writer.close()
    assert writer.lost == 0


def read(folder: Path) -> Session:
    return Session(folder, {"boot": "boot", "clock": {"unix_ns": OFFSET, "monotonic_ns": 0}})


def rows(session: Any, table: str, fmt: str) -> list[dict[str, Any]]:
    stream = io.BytesIO()
    count = export(session, table, fmt, stream)
    stream.seek(0)
    if fmt == "csv":
        got: list[dict[str, Any]] = list(csv.DictReader(io.TextIOWrapper(stream, "utf-8", newline="")))
    elif fmt == "jsonl":
        got = [json.loads(line) for line in stream]
    else:
        got = polars.read_parquet(stream).to_dicts()
    assert len(got) == count
    return got


def span(begin: int, flags: int = 0, tokens: int = -1) -> tuple[int, ...]:
    phase = tables.PHASE_CODE["forward"]
    return (begin, begin + 5, tokens, 3, 1, 2, 128, phase, flags, 0, 0, 0)


@pytest.mark.parametrize("fmt", ["jsonl", "parquet"])
def test_spans(tmp_path: Path, fmt: str) -> None:
    write(tmp_path, tables.SPANS, identity(1), span(10), span(20))
    write(tmp_path, tables.SPANS, identity(0), span(30, tables.SKIPPED | tables.EVAL, 256))
    got = rows(read(tmp_path), "spans", fmt)
    assert list(got[0].items()) == [
        ("rank", 0),
        ("host", "node1"),
        ("begin_unix_ns", OFFSET + 30),
        ("end_unix_ns", OFFSET + 35),
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
        ("depth", 0),
        ("engine", 0),
    ]
    assert [(row["rank"], row["begin_unix_ns"] - OFFSET, row["tokens"]) for row in got[1:]] == [
        (1, 10, None),
        (1, 20, None),
    ]


def test_batches_have_one_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "BATCH_ROWS", 2)
    write(tmp_path, tables.SPANS, identity(0), *(span(time) for time in range(5)))
    for fmt in FORMATS:
        got = rows(read(tmp_path), "spans", fmt)
        assert [int(row["begin_unix_ns"]) - OFFSET for row in got] == [0, 1, 2, 3, 4]


def test_allocator_names_and_a_phase_of_the_future(tmp_path: Path) -> None:
    record = (1, 2, 3, 4, 5, 6, 0, 0, 7, 0)
    write(tmp_path, tables.ALLOCATOR, identity(0), (*record, 3, tables.END, 0, 0), (*record, 99, 0, 0, 0))
    got = rows(read(tmp_path), "allocator", "jsonl")
    assert [(row["phase"], row["edge"]) for row in got] == [("forward", "end"), (None, "tick")]
    assert "pad" not in got[0]


def test_unknown_is_null_and_a_launcher_is_not(tmp_path: Path) -> None:
    record = (1, 10, 20, -1, 0, 0, 9, math.nan, 0.5, 4, 1, 77, -1)
    write(tmp_path, tables.PROCESSES, identity(-1), record)
    for fmt, null in (("jsonl", None), ("parquet", None), ("csv", "")):
        (row,) = rows(read(tmp_path), "processes", fmt)
        assert list(row)[:3] == ["rank", "host", "time_unix_ns"]
        assert int(row["rank"]) == -1
        assert row["pinned_bytes"] == null
        assert row["cores_used"] == null
        assert float(row["waiting_cores"]) == 0.5


@pytest.mark.parametrize("name", ["=1+1", "+a", "-a", "@a", "\ta", "\ra", 'a"b,c', "a\nb", "[red]", ""])
def test_text_in_a_spreadsheet(tmp_path: Path, name: str) -> None:
    write(tmp_path, tables.THREADS, identity(-1), (1, 2, 3, 0.5, 4, 5, 6, name.encode()))
    session = read(tmp_path)
    (row,) = rows(session, "threads", "csv")
    assert row["name"] == spreadsheet_safe(name) == ("'" + name if name[:1] in tuple("=+-@\t\r") else name)
    assert "rank" not in row
    for fmt in ("jsonl", "parquet"):
        assert rows(session, "threads", fmt)[0]["name"] == name


def test_a_name_cut_within_a_letter(tmp_path: Path) -> None:
    write(tmp_path, tables.THREADS, identity(-1), (1, 2, 3, 0.5, 4, 5, 6, "aé".encode()[:2]))
    for fmt in FORMATS:
        assert rows(read(tmp_path), "threads", fmt)[0]["name"] == "a�"


def test_events(tmp_path: Path) -> None:
    ranks = EventWriter(str(tmp_path), identity(1, "-n"))
    ranks.write(2, "engine", stage=2, loss=math.nan)
    node = EventWriter(str(tmp_path), identity(-1, "-n"))
    node.write(3, "=gpu\ud800")
    session = read(tmp_path)
    first, second = rows(session, "events", "jsonl")
    assert list(first) == ["time_unix_ns", "event", "rank", "host", "pid", "facts"]
    assert (first["event"], first["rank"], first["host"]) == ("=gpu?", None, "-n")
    assert (second["time_unix_ns"], second["rank"], second["pid"]) == (OFFSET + 2, 1, 101)
    assert json.loads(second["facts"]) == {"stage": 2, "loss": None}
    assert rows(session, "events", "csv")[0]["event"] == "'=gpu?"
    assert rows(session, "events", "csv")[0]["host"] == "'-n"
    ranks.close()
    node.close()


def test_steps_of_a_recording(tmp_path: Path) -> None:
    step = tables.PHASE_CODE["step"]
    write(
        tmp_path,
        tables.SPANS,
        identity(0),
        *((at, at + 5, -1, at // 10, 0, -1, -1, step, tables.BOUNDARY, 0, 0, 0) for at in (0, 10, 20)),
    )
    session = read(tmp_path)
    expected = steps(session)
    assert len(expected)
    for fmt in FORMATS:
        got = rows(session, "steps", fmt)
        assert list(got[0]) == list(expected.dtype.names or ())
        assert [int(row["step"]) for row in got] == expected["step"].tolist()


def test_steps_are_what_analysis_says(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("zerotop.analysis.steps")
    array = np.array(
        [(0, 1.5, -1), (1, math.nan, 3)], [("rank", "i4"), ("iteration_s", "f8"), ("tokens", "i8")]
    )
    module.steps = lambda session: array
    monkeypatch.setitem(sys.modules, module.__name__, module)
    nothing: Any = SimpleNamespace(sources={}, events=[])
    assert rows(nothing, "steps", "jsonl") == [
        {"rank": 0, "iteration_s": 1.5, "tokens": None},
        {"rank": 1, "iteration_s": None, "tokens": 3},
    ]


@pytest.mark.parametrize("table", [name for name in TABLES + MORE_TABLES if name != "steps"])
def test_an_empty_recording_has_columns(table: str) -> None:
    nothing: Any = SimpleNamespace(sources={}, events=[])
    stream = io.BytesIO()
    assert export(nothing, table, "csv", stream) == 0
    assert b"host" in stream.getvalue()
    for fmt in ("jsonl", "parquet"):
        assert rows(nothing, table, fmt) == []


@pytest.mark.parametrize(("table", "fmt"), [("nope", "csv"), ("spans", "xlsx")])
def test_what_there_is_not(table: str, fmt: str) -> None:
    nothing: Any = SimpleNamespace(sources={}, events=[])
    with pytest.raises(ValueError, match=r"^There is no .*; there are .*\.$"):
        export(nothing, table, fmt, io.BytesIO())
