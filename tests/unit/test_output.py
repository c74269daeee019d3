"""The reel of the job's output: the same lines from wherever it is looked at, and searching in it."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from printing import Printing, read_monotonic_ns
from zerotop.analysis.output.lines import BEGIN, LinePosition, OutputBuffer, OutputLine, StepClock
from zerotop.analysis.output.search import OutputSearch, compile_pattern, fold_repeats
from zerotop.recording.output import blocks as output_blocks
from zerotop.recording.output.transcript import Transcript
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import BEGINS
from zerotop_probe.recording.writer import Identity, RecordWriter

SECOND = 1_000_000_000


def open_buffer(job: Printing, cursor_ns: int | None = None) -> OutputBuffer:
    """As a reader sees it that opens the recording now."""
    buffer = OutputBuffer(Recording.open(job.path))
    buffer.refresh_at(time.time_ns() if cursor_ns is None else cursor_ns)
    return buffer


def fold(*texts: str, search: str = "") -> list[str]:
    """Return the lines as a screen shows them."""
    lines = [OutputLine(text, at, 0, False, LinePosition(0, at)) for at, text in enumerate(texts)]
    folded = fold_repeats(lines, re.compile(search) if search else None)
    return [line.text if line.repeats == 1 else f"{line.text} x{line.repeats}" for line in folded]


def test_lines_and_messages_that_repeat_are_shown_once() -> None:
    warning = ("torch/nn/module.py:83: FutureWarning: deprecated", "  return func(*args)")
    assert fold(*warning, *warning, "loss 3") == [f"{line} x2" for line in warning] + ["loss 3"]
    assert fold(*warning, "loss 3", *warning) == [*warning, "loss 3", *warning]
    assert fold("a", "[rank1]: a", "a", "b", "a", "b") == ["a x4", "b x2"]
    assert fold("a", "", "a", "", "", "") == ["a x2", " x2", "", ""]
    assert fold("10%|# | 1/10", "20%|## | 2/10", "loss 1", "loss 2") == ["20%|## | 2/10 x2", "loss 1", "loss 2"]


def test_each_line_that_a_search_finds_stays() -> None:
    assert fold("a", "b", "a", "b", "a", "b", search="b") == ["a", "b", "a", "b", "a", "b"]
    assert fold("a", "a", "a", search="b") == ["a x3"]


def read_texts(reel: OutputBuffer, top: LinePosition = BEGIN, count: int = 1 << 30) -> list[str]:
    return [line.text for line in reel.read_lines(top, count)]


def a_job(folder: Path, count: int) -> Printing:
    """Lines, progress bars and colours, in pieces that are cut anywhere."""
    job, dice = Printing(folder), random.Random(7)
    data = b""
    for number in range(count):
        data += b"line %d of the job\n" % number
        if number % 5 == 0:
            data += b"".join(b"\r%3d%%|##" % percent for percent in range(0, 100, 10)) + b"\n"
        if number % 7 == 0:
            data += b"\x1b[31mEpoch\x1b[0m %d: l\xc3\xb6ss\n" % number
    begin = read_monotonic_ns() - 3600 * SECOND
    while data:
        size = dice.randrange(1, 400)
        begin = begin + SECOND // 20
        job.write_output(data[:size], at_ns=begin)
        data = data[size:]
    return job


def test_an_empty_output(tmp_path: Path) -> None:
    empty = open_buffer(Printing(tmp_path))
    assert read_texts(empty) == []
    assert empty.move_position(BEGIN, 5) == empty.move_position(BEGIN, -5) == empty.cursor == BEGIN
    assert (empty.measure_share(BEGIN), empty.position_at_share(1.0), empty.find_time(BEGIN)) == (0.0, BEGIN, None)


@pytest.mark.parametrize("size", [300, 5_000, 1 << 17])
def test_blocks_of_any_size_have_the_same_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(output_blocks, "BLOCK", size)
    job = a_job(tmp_path, 400)
    recording = Recording.open(job.path)
    assert tuple(read_texts(open_buffer(job))) == Transcript(recording).read_tail(time.time_ns(), 1 << 20)


def test_growing_equals_opening_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_blocks, "BLOCK", 100)
    job = Printing(tmp_path)
    growing = open_buffer(job)
    growing.blocks.refresh()
    recording = growing.blocks._recording
    for number in range(60):
        job.write_output(b"a line %d\nand th" % number)
        if number % 3 == 0:
            recording.refresh()
            growing.refresh_at(time.time_ns())
    recording.refresh()
    growing.refresh_at(time.time_ns())
    assert read_texts(growing) == read_texts(open_buffer(job))
    assert growing.blocks.sealed_count == open_buffer(job).blocks.sealed_count > 3


def test_streams_and_nodes_are_in_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_blocks, "BLOCK", 64)
    first = Printing(tmp_path)
    second = Printing(tmp_path, pid=2, path=first.path)
    for number in range(20):
        first.write_output(b"out %d\n" % number, "stdout")
        first.write_output(b"\r%d%%" % number, "stderr")
        second.write_output(b"far %d\n" % number, "stdout")
    shown = open_buffer(first).read_lines(BEGIN, 1000)
    assert [line.text for line in shown] == [f"{who} {n}" for n in range(20) for who in ("out", "far")] + ["19%"]
    assert [line.stream for line in shown[-3:]] == [1, 1, 2]


def test_lines_around_a_cursor(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    begin = read_monotonic_ns() - 100 * SECOND
    pieces = (b"one\ntwo\n", b"\r10%", b"\r20%", b"\nthree\n")
    at = [job.write_output(piece, at_ns=begin + number * SECOND) for number, piece in enumerate(pieces)]
    shown = open_buffer(job, at[2] + SECOND // 2).read_lines(BEGIN, 10)
    assert [(line.text, line.is_later, line.position) for line in shown] == [
        ("one", False, (0, 0)),
        ("two", False, (0, 1)),
        ("20%", False, None),
        ("20%", True, (0, 2)),
        ("three", True, (0, 3)),
    ]
    assert read_texts(open_buffer(job, at[0] - SECOND // 2), count=1) == ["one"]
    assert open_buffer(job, at[0] - SECOND // 2).cursor == BEGIN


def test_places_move_by_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_blocks, "BLOCK", 150)
    job = a_job(tmp_path, 60)
    there = open_buffer(job)
    every = read_texts(there)
    for begin, lines in ((0, 17), (0, 1000), (50, -20), (50, -1000), (33, 9)):
        place = there.move_position(there.move_position(BEGIN, begin), lines)
        assert read_texts(there, place) == every[max(0, begin + lines) :]
    assert there.move_position(there.cursor, -1) < there.cursor
    shares = [there.measure_share(there.move_position(BEGIN, line)) for line in range(0, len(every), 7)]
    assert shares == sorted(shares)
    assert there.position_at_share(0.0) == BEGIN


@pytest.mark.parametrize("size", [200, 1 << 17])
@pytest.mark.parametrize(("wanted", "like"), [("Line 1", 0), ("line 1", 111), ("EPOCH 7", 0), ("epoch 7", 3), ("löss", 23)])
def test_every_match_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, like: int, size: int) -> None:
    monkeypatch.setattr(output_blocks, "BLOCK", size)
    there = open_buffer(a_job(tmp_path, 161))
    search = OutputSearch(there, wanted)
    if like and wanted == "line 1":
        like = sum(1 for text in read_texts(there) if "line 1" in text)
    assert search.continue_search(60)
    assert (search.match_count, search.searched_share, search.is_done) == (like, 1.0, True)
    place, found = BEGIN, []
    while (match := search.find_nearest(place, 1, 60)[0]) is not None:
        found.append(match)
        place = there.move_position(match, 1)
    assert [search.number_match(match) for match in found] == list(range(1, like + 1))
    assert all(search.pattern.search(read_texts(there, match, 1)[0]) for match in found)
    if found:
        assert (
            search.find_nearest(LinePosition(1 << 30, 0)._replace(block=there.blocks.sealed_count, line=1 << 30), -1, 60)[0]
            == found[-1]
        )
        assert search.find_nearest(found[0], -1, 60) == (None, None)


def test_a_search_that_takes_long_says_where_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_blocks, "BLOCK", 100)
    job = a_job(tmp_path, 50)
    job.write_output(b"the needle\n")
    search = OutputSearch(open_buffer(job), "needle")
    place, looks = BEGIN, 0
    while True:
        found, rest = search.find_nearest(place, 1, 0.0)
        looks += 1
        if rest is None:
            break
        place = rest
    assert found is not None
    assert looks > 5
    assert search.number_match(found) == 1
    assert not OutputSearch(open_buffer(job), "needle").continue_search(0.0)


def test_matches_come_while_the_job_prints(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    recording = Recording.open(job.path)
    there = OutputBuffer(recording)
    search = OutputSearch(there, "loss")
    for number in range(1, 4):
        job.write_output(b"a loss\n")
        recording.refresh()
        there.refresh_at(time.time_ns())
        assert search.match_count == number


def test_capitals_are_looked_at_when_there_are_some() -> None:
    assert compile_pattern("a.b").search("xA.Bx")
    assert not compile_pattern("a.b").search("axb")
    assert not compile_pattern("A.b").search("a.b")


def test_the_step_in_which_a_line_was_printed(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    assert StepClock(Recording.open(job.path)).step_at(time.time_ns()) is None
    begin = read_monotonic_ns() - 100 * SECOND
    for rank in (0, 1):
        writer = RecordWriter(str(job.path), BEGINS, Identity.for_this_process("rank", rank)._replace(pid=7 + rank))
        for step in range(3):
            writer.write(begin + (10 * step + rank) * SECOND, step, 0, 3, 0, 0, 0)
    clock = StepClock(Recording.open(job.path))
    unix = begin + time.time_ns() - read_monotonic_ns()
    assert [clock.step_at(unix + second * SECOND) for second in (-1, 1, 9, 11, 99)] == [None, 0, 0, 1, 2]
