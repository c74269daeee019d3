"""Steps that were not recorded: found, named with their reason, and in no median."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from machine import small_disk
from memory_recording import PlantedRecording
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.reports.comparison import compare_paths
from zerotop.analysis.reports.headline import summarize_recording
from zerotop.analysis.reports.memory import read_report
from zerotop.analysis.reports.recording_summary import build_overview
from zerotop.analysis.timeline.range_summary import summarize_range
from zerotop.analysis.timeline.timeline import TimelineBuilder
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.commands.common.exit_messages import describe_place, describe_rank_losses
from zerotop.recording.reader import Recording
from zerotop_probe.recording import directory, events, tables
from zerotop_probe.recording.tables import BOUNDARY, PHASE_CODE

# A rank that trains on; its disk is full from step 10 to step 20.
RANK = """
import os, sys, time
from zerotop_probe.inside.hooks.hook_installer import PROBE
from zerotop_probe.recording.tables import BOUNDARY
assert PROBE.start_recording(sys.argv[1])
recorder, filler = PROBE.recorder, None
for step in range(30):
    if step == 10:
        filler = open(sys.argv[2], "wb", buffering=0)
        try:
            while filler.write(bytes(4096)): pass
        except OSError: pass
    if step == 20:
        os.unlink(sys.argv[2])
        filler.close()
    for _ in range(40):  # more than a page has room for
        span = recorder.begin_span(time.monotonic_ns(), "forward", (0, step, 0))
        recorder.end_span(span, time.monotonic_ns())
    span = recorder.begin_span(time.monotonic_ns(), "step", (0, step, 0))
    recorder.end_span(span, time.monotonic_ns(), BOUNDARY)
    recorder.end_step(span, time.monotonic_ns())
"""


def find_lost(recording: Recording, cursor_ns: int | None = None) -> list[Finding]:
    findings = detect_findings(recording, recording.end_ns if cursor_ns is None else cursor_ns)
    return [finding for finding in findings if finding.name == "steps_not_recorded"]


def test_a_disk_that_was_full_for_some_steps(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "256k") as disk:
        path = directory.create_recording(["train"], path=str(disk / "recording"))
        command = [sys.executable, "-c", RANK, path, str(disk / "filler")]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        recording = Recording.open(Path(path))
        source = RecordingSource(recording)
        (process,) = source.rank_steps
        losses = describe_rank_losses(path)
        (finding,) = find_lost(recording)
    rows = process.step_rows
    assert rows["step"].tolist() == list(range(30))
    unknown = np.flatnonzero(np.isnan(rows["iteration_s"]))
    assert set(range(12, 20)) <= set(unknown.tolist()) <= set(range(10, 22))
    steps = f"Steps {unknown[0]} to {unknown[-1]} of rank 0"
    assert losses[1:] == [f"{steps} are missing or incomplete in the recording: No space left on device."]
    assert finding.headline.startswith(f"{steps} are missing or incomplete in the recording")
    assert "No space left on device" in finding.details


def make_lossy_recording(folder: Path) -> PlantedRecording:
    """Two ranks with steps of a second. Rank 0 loses 3 to 5, rank 1 loses 3, 4 and, at its end, 9."""
    recording = PlantedRecording(folder)
    recording.write_engine()
    for rank, lost in ((0, (3, 4, 5)), (1, (3, 4))):
        spans: list[Any] = []
        for step in (step for step in range(9) if step not in lost):
            spans.append(make_span(step, step + 0.5, "forward", step, tokens=10))
            spans.append(make_span(step + 0.5, step + 1, "step", step, BOUNDARY))
        recording.write_records(tables.SPANS, make_identity(rank), spans)
        recording.write_records(tables.BEGINS, make_identity(rank), [(row[0], row[3], 0, row[7], 0, 0, 0) for row in spans])
        recording.write_event(make_identity(rank), 3.1, events.RecordsLost, step=3, why="Disk quota exceeded")
        recording.write_event(make_identity(rank), 10, events.Goodbye, lost=6, step=8 + rank)
    return recording


def test_the_finding_names_all_ranks_and_is_known_after_the_gap(tmp_path: Path) -> None:
    recording = make_lossy_recording(tmp_path).open_recording()
    first, last = find_lost(recording)
    assert (first.step, first.ranks, first.known_ns) == (3, (0, 1), BEGIN_NS + 7 * S)
    assert first.headline == "Steps 3 to 5 of ranks 0 and 1 are missing or incomplete in the recording"
    assert first.details == "3.00 s in all: Disk quota exceeded. Times and peaks leave them out."
    assert (last.step, last.ranks, last.known_ns) == (9, (1,), BEGIN_NS + 10 * S)
    assert last.headline.startswith("Step 9 of rank 1 is missing")
    assert find_lost(recording, BEGIN_NS + 7 * S - 1) == []


def test_reports_leave_the_missing_steps_out(tmp_path: Path) -> None:
    recording = make_lossy_recording(tmp_path).open_recording()
    source = RecordingSource(recording)
    view = source.view_at(None)
    assert view.iterations.step.tolist() == list(range(9))
    # Rank 1 has recorded the whole of step 6, which is the first after the gap of rank 0.
    np.testing.assert_array_equal(np.isnan(view.iterations.iteration_s), [False] * 3 + [True] * 3 + [False] * 3)
    assert view.progress.iteration_s == 1.0
    (notice,) = [notice for notice in view.job.notices if "missing" in notice]
    assert (
        notice == "5 of the steps 3 to 9 of ranks 0 and 1 are missing or incomplete in the recording: Disk quota exceeded."
    )
    overview = build_overview(recording)
    assert (overview.iteration_s, max(overview.iterations), overview.steps) == (1.0, 1.0, 9)
    text = summarize_recording(recording)
    assert "median 1.000 s per iteration, slowest 1.000 s" in text
    comparison = compare_paths([recording, recording])
    rows = {measure.name.strip(): measure.values for measure in comparison.measures}
    assert (rows["iteration"], rows["slowest iteration"], rows["not recorded"]) == ((1.0, 1.0), (1.0, 1.0), (3, 3))
    assert rows["steps not recorded"] == ("step 3 and 1 more",) * 2
    report = read_report(recording)
    assert report is not None
    assert notice in report.notices


def test_the_timeline_is_blank_in_a_gap(tmp_path: Path) -> None:
    source = RecordingSource(make_lossy_recording(tmp_path).open_recording())
    timelines = TimelineBuilder(source.recording, lambda: source.rank_steps)
    summary = summarize_range(timelines, timelines.make_subject(0), BEGIN_NS, BEGIN_NS + 9 * S)
    assert (summary.mean["iteration"], summary.highest["iteration"], summary.steps) == (1.0, 1.0, 5)
    (times,) = timelines.get_step_times(0)
    edges = BEGIN_NS + np.arange(10) * S
    from_steps, from_spans = times.measure_phases(edges), timelines.get_ribbon(0)[0].read_columns(edges)
    for seconds in (from_steps, from_spans):
        assert seconds[PHASE_CODE["forward"]].tolist() == [0.5] * 3 + [0] * 4 + [0.5] * 2
        assert seconds.sum(axis=0).tolist() == [1] * 3 + [0] * 4 + [1] * 2


def test_export_has_empty_cells_and_a_sentence(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    facts = {"zerotop": [1, 0], "name": "lossy", "boot": "boot", "clock": {"unix_ns": BEGIN_NS, "monotonic_ns": 0}}
    (tmp_path / directory.SESSION_FILE).write_text(json.dumps(facts))
    make_lossy_recording(tmp_path)
    assert main(["export", str(tmp_path)]) == 0
    output, errors = capfdbinary.readouterr()
    rows = [row for row in csv.DictReader(io.StringIO(output.decode())) if row["rank"] == "0"]
    assert [row["step"] for row in rows] == [str(step) for step in range(9)]
    for name in ("iteration_s", "forward_s", "tokens", "host_rss_bytes"):
        assert [row[name] == "" for row in rows[3:7]] == [True] * 4
    assert [float(row["iteration_s"]) for row in rows if row["iteration_s"]] == [1.0] * 5
    assert errors.startswith(b"zerotop: 5 of the steps 3 to 9 of ranks 0 and 1 are missing or incomplete")
    assert math.isclose(float(rows[2]["forward_s"]), 0.5)


def test_a_full_disk_is_no_hanging_rank(tmp_path: Path) -> None:
    """Silence of minutes in which records were lost, and the same without that event."""
    for name, lost in (("full", True), ("hanging", False)):
        (tmp_path / name).mkdir()
        planted = PlantedRecording(tmp_path / name)
        planted.write_engine()
        spans = [make_span(step, step + 1, "step", step, BOUNDARY) for step in (0, 1, 2, 300)]
        planted.write_records(tables.SPANS, make_identity(0), spans)
        planted.write_records(tables.BEGINS, make_identity(0), [(row[0], row[3], 0, row[7], 0, 0, 0) for row in spans])
        if lost:
            planted.write_event(make_identity(0), 3.5, events.RecordsLost, step=3, why="No space left on device")
        recording = planted.open_recording()
        names = [finding.name for finding in detect_findings(recording, recording.end_ns)]
        assert ("hung_ranks" in names) == (not lost)


def test_recorded_in_is_printed_only_for_a_recording_that_is_there(tmp_path: Path) -> None:
    path = directory.create_recording(["train"], path=str(tmp_path / "recording"))
    assert describe_place(path) == f"not recorded in {path}: nothing could be written to it"
    (Path(path) / "events-node-host-1.jsonl").write_text("{}\n")
    assert describe_place(path) == f"recorded in {path}"
    (Path(path) / directory.SESSION_FILE).unlink()
    assert describe_place(path) == f"not recorded in {path}: it was moved or removed while the job ran"
