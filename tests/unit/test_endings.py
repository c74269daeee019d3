"""What a recording lacks, as far as those who wrote it could still say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from machine import small_disk
from memory_recording import PlantedRecording, make_record
from rank_recordings import read_event_file as told_in
from rank_recordings import read_table_file
from small_recording import BEGIN_NS, S, make_identity
from zerotop.analysis.views.job_exit import Losses, read_ending
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop_probe.recording import events, tables

# A rank on whose disk there is no more room soon after it has begun. It says so when it ends.
RANK = """
import sys, time
from zerotop_probe.inside.hooks.hook_installer import PROBE
assert PROBE.start_recording(sys.argv[1])
with open(sys.argv[2], "wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)): pass
    except OSError: pass
PROBE.recorder.write_event(time.monotonic_ns(), "engine", config="long" * 2000)
for step in range(int(sys.argv[3])):
    span = PROBE.recorder.begin_span(time.monotonic_ns(), "forward", (0, step, 0))
    PROBE.recorder.end_span(span, time.monotonic_ns())
"""


def make_lossy_recording(folder: Path) -> PlantedRecording:
    """Rank 0 loses 3 records and later 4 more, of which its table does not tell; rank 1 loses 5 and is killed."""
    recording = PlantedRecording(folder)
    recording.write_engine()
    recording.write_records(
        tables.PROBE, make_identity(0), [make_record(tables.PROBE, 1), make_record(tables.PROBE, 2, lost=3)]
    )
    recording.write_records(tables.PROBE, make_identity(1), [make_record(tables.PROBE, 4, lost=5)])
    recording.write_event(make_identity(0), 8, events.Goodbye, lost=7)
    recording.write_event(recording.node, 9, events.JobEnded, exit_code=0, text="The job ended with exit code 0.")
    recording.write_event(recording.node, 10, events.SamplerEnded, lost_records=100, lost_output_bytes=9)
    return recording


def test_losses_of_ranks_and_samplers_add_up(tmp_path: Path) -> None:
    ending = read_ending(make_lossy_recording(tmp_path).open_recording())
    assert (ending.exit_code, ending.lost_records, ending.lost_output_bytes) == (0, 7 + 5 + 100, 9)


@pytest.mark.parametrize(
    ("second", "lost", "sentence"),
    [
        (1, 0, None),
        (2, 3, "The recording is incomplete: 3 records could not be written."),
        (5, 8, "The recording is incomplete: 8 records could not be written."),
        (8, 12, "The recording is incomplete: 12 records could not be written."),
        (10, 112, "The recording is incomplete: 112 records and 9 bytes of the job's output could not be written."),
    ],
)
def test_the_screen_says_so_from_when_it_is_known(tmp_path: Path, second: int, lost: int, sentence: str | None) -> None:
    view = RecordingSource(make_lossy_recording(tmp_path).open_recording()).view_at(BEGIN_NS + second * S)
    assert view.cost.lost_records == lost
    assert [notice for notice in view.job.notices if "incomplete" in notice] == ([sentence] if sentence else [])


def test_damaged_counts_count_nothing(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    recording.write_event(make_identity(0), 8, events.Goodbye, lost="many")
    recording.write_event(recording.node, 10, events.SamplerEnded, lost_records=None)
    assert read_ending(recording.open_recording()).lost_records == 0
    assert Losses(0, 0).loss_sentence == ""


def test_a_rank_on_a_full_disk_still_says_what_it_lost(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "256k") as disk:
        recording = disk / "recording"
        recording.mkdir()
        command = [sys.executable, "-c", RANK, str(recording), str(disk / "filler"), "500"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        (path,) = recording.glob("events-rank*.jsonl")
        (goodbye,) = [event for event in told_in(path) if event.get("event") == events.Goodbye.event_name]
        written = sum(len(read_table_file(path)) for name in ("spans", "begins") for path in recording.glob(f"{name}-*.rec"))
    assert (done.returncode, done.stderr) == (0, "")
    # Two of each phase; and what the probe has cost, at the end.
    assert goodbye["lost"] - (1000 - written) in (0, 1)
    assert written < 1000
