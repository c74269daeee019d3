"""Real recordings of H200s, packed: what is said of them is what their own output says, and holds at every cursor."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

import recordings
from programs import start_on_terminal
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.reports.export import export_table
from zerotop.analysis.reports.export_tables import TABLES
from zerotop.analysis.reports.headline import summarize_recording
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.recording.output.tail import read_output_tail
from zerotop.recording.reader import Recording

# What the jobs were asked for: (steps that were done, of them skipped, exit code).
EXPECTED = {
    "story": (14, 10, 0),
    "x4-z3": (16, 0, 0),
    "z2": (24, 0, 0),
    "z2-expandable": (16, 0, 0),
    "z2-fp16": (24, 11, 0),
    "z2-offload": (24, 0, 0),
    "z2-oom": (4, 0, 1),
    "z3-offload-all": (14, 0, 0),
}
NAMES = sorted(EXPECTED)
PRIVATE = re.compile(rb"/(?:root|opt|work|Users)\b|/home/(?!user1?\b)|(?i:password|secret|api_?key|hf_[a-z0-9]{20})")


def list_cursors(recording: Recording, count: int = 12) -> list[int]:
    """Moments evenly through a recording, its end the last."""
    whole = recording.last_written_ns - recording.begin_ns
    return [recording.begin_ns + whole * place // count for place in range(1, count + 1)]


def read_output(recording: Recording) -> str:
    return read_output_tail(recording.at(recording.last_written_ns), 1 << 20).decode()


def test_every_recording_has_labels_and_all_are_small() -> None:
    assert set(recordings.list_recordings()) == set(recordings.read_labels()) >= set(EXPECTED)
    assert sum(recordings.find_packed_file(name).stat().st_size for name in recordings.list_recordings()) < 8_000_000


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_the_output(name: str) -> None:
    recording = recordings.open_recording(name)
    assert (recording.damaged_files, recording.damaged_lines) == (0, 0)
    steps, skipped, code = EXPECTED[name]
    view = RecordingSource(recording).view_at(None)
    output = read_output(recording)
    losses = re.findall(r"'loss': '([^']+)', 'grad_norm': '([^']+)'", output)
    assert len(losses) == len(view.iterations.step) == steps
    assert view.iterations.skipped.sum() == sum(norm in ("inf", "nan") for _, norm in losses) == skipped
    assert view.job.exit_code == code
    assert f"{steps} steps, {skipped} skipped" in summarize_recording(recording)
    if code == 0:
        assert f"after {steps} steps" in output
        (seconds,) = re.findall(r"'train_runtime': '([\d.]+)'", output)
        # The rest is the Trainer's own: evaluation, the last logs.
        assert 0 < view.iterations.iteration_s.sum() <= float(seconds) * 1.02


def check_view(view: LiveView) -> None:
    for gpu in view.gpus:
        allocated, reserved = gpu.allocated_bytes or 0, gpu.reserved_bytes or 0
        assert 0 <= allocated <= reserved
        assert 0 < gpu.used_bytes <= gpu.total_bytes
        assert reserved <= gpu.total_bytes
    for rank in view.ranks:
        assert rank.rss_bytes <= rank.rss_peak_bytes
    for host in view.hosts:
        assert sum(rank.cores_used for rank in view.ranks) <= host.cores * 1.1


@pytest.mark.parametrize("name", NAMES)
def test_the_view_at_any_cursor(name: str, tmp_path: Path) -> None:
    """The packed one shows what the directory does; what has been reached is never less later."""
    packed = recordings.open_recording(name)
    here, there = RecordingSource(packed), RecordingSource(Recording.open(recordings.unpack_to_folder(name, tmp_path)))
    done, peaks = 0, dict[int, int]()
    for cursor in list_cursors(packed):
        view = here.view_at(cursor)
        assert repr(view) == repr(there.view_at(cursor))
        check_view(view)
        assert len(view.iterations.step) >= done
        done = len(view.iterations.step)
        for rank in view.ranks:
            assert rank.rss_peak_bytes >= peaks.get(rank.pid, 0)
            peaks[rank.pid] = rank.rss_peak_bytes
    assert done == EXPECTED[name][0]
    assert max(peaks.values()) > 1 << 30


@pytest.mark.parametrize("name", NAMES)
def test_every_table_of_a_recording_is_exported(name: str) -> None:
    recording = recordings.open_recording(name)
    for table in TABLES:
        stream = io.BytesIO()
        rows = export_table(recording, table, "csv", stream)
        assert len(list(csv.DictReader(io.StringIO(stream.getvalue().decode())))) == rows > 0


def test_the_recorded_demo_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--recorded"]) == 0
    output = capsys.readouterr().out
    assert "LlamaForCausalLM, 8,030.3 M parameters, ZeRO-2, optimizer on CPU, fp16" in output
    assert "14 steps, 10 skipped" in output


def test_the_recorded_demo_plays_on_a_terminal(tmp_path: Path) -> None:
    """From where the model is ready on, by itself."""
    terminal = start_on_terminal(tmp_path, "demo", "--recorded", rows=40, columns=120)
    try:
        terminal.wait_for("story")
        terminal.wait_for("skipped")
        terminal.type_keys("q")
        assert terminal.exit_code() == 0
    finally:
        terminal.close()
