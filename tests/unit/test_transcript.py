"""The job's lines at any cursor, from recordings made with the real writer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from printing import Printing
from zerotop.recording.output.transcript import Transcript
from zerotop.recording.reader import Recording


def read_lines(printing: Printing, cursor_ns: int | None = None, most: int = 200) -> tuple[str, ...]:
    """As a reader sees them that opens the recording now."""
    recording = Recording.open(printing.path)
    return Transcript(recording).read_tail(time.time_ns() if cursor_ns is None else cursor_ns, most)


def test_lines_at_a_cursor(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    assert read_lines(job) == ()
    first = job.write_output(b"one\ntw")
    time.sleep(0.01)
    job.write_output(b"o\nthree")
    assert read_lines(job, first + 1_000_000) == ("one", "tw")
    assert read_lines(job) == ("one", "two", "three")
    assert read_lines(job, first - 1_000_000_000) == ()


def test_bytes_without_a_record(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    job.write_output(b"one\n")
    job.write_unrecorded(b"two\n" * 3)
    job.write_output(b"three\nfo")
    job.write_output(b"ur\n")
    assert read_lines(job) == ("one", "two", "two", "two", "three", "four")


def test_a_progress_bar_on_another_stream_does_not_run_into_lines(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    job.write_output(b"\r  0%|   | 0/3", "stderr")
    for step in range(1, 4):
        job.write_output(b"{'loss': %d}\n" % step, "stdout")
        job.write_output(b"\r %d%%|#  | %d/3" % (step * 33, step), "stderr")
    assert read_lines(job) == ("{'loss': 1}", "{'loss': 2}", "{'loss': 3}", " 99%|#  | 3/3")
    job.write_output(b"\n", "stderr")
    job.write_output(b"done\n", "stdout")
    assert read_lines(job)[-2:] == (" 99%|#  | 3/3", "done")


def test_output_of_several_nodes_is_in_order_of_time(tmp_path: Path) -> None:
    first = Printing(tmp_path)
    second = Printing(tmp_path, pid=2, path=first.path)
    for number in range(3):
        first.write_output(b"first %d\n" % number)
        second.write_output(b"second %d\n" % number)
    assert read_lines(first) == tuple(f"{node} {number}" for number in range(3) for node in ("first", "second"))


def test_going_on_equals_looking_back(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    recording = Recording.open(job.path)
    live = Transcript(recording)
    seen = []
    for number in range(300):
        bar = b"\r%d%%" % number
        moment = job.write_output(
            b"line %d\x1b[" % number + b"0m\n" if number % 3 else bar, "stdout" if number % 2 else "stderr"
        )
        recording.refresh()
        seen.append((moment, live.read_tail(time.time_ns(), 20)))
        time.sleep(0.0005)
    looking_back = Transcript(Recording.open(job.path))
    for moment, shown in reversed(seen[::7]):
        assert looking_back.read_tail(moment + 100_000, 20) == shown


def test_many_lines_far_back_behind_a_chatty_progress_bar(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    for number in range(400):
        job.write_output(b"\r" + b"#" * 2000 + b"\r" + b"." * 2000)
        job.write_output(b"\rline %03d\x1b[K\n" % number)
    assert read_lines(job) == tuple(f"line {number:03}" for number in range(200, 400))
    assert read_lines(job, most=1000) == tuple(f"line {number:03}" for number in range(400))
    transcript = Transcript(Recording.open(job.path))
    assert transcript.read_tail(time.time_ns(), 5)[0] == "line 395"
    assert transcript.read_tail(time.time_ns(), 300)[0] == "line 100"


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_damaged_log_is_nothing_to_fail_on(tmp_path: Path, damage: str) -> None:
    job = Printing(tmp_path)
    job.write_output(b"one\n")
    job.write_output(b"two\n", "stderr")
    (log,) = job.path.glob("*.log")
    log.unlink() if damage == "gone" else os.truncate(log, 5)
    assert read_lines(job) == (() if damage == "gone" else ("one", "t"))
