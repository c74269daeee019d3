"""Files that ranks write their output to: found from outside, recorded at the end, and read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memory_recording import record_two_steps
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.analysis.failures.diagnosis import find_failure
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.output.lines import BEGIN, OutputBuffer
from zerotop.analysis.views.notices import describe_rank_files
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.output.tail import read_last_lines
from zerotop.recording.reader import Recording
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.output.drawing import OutputPage, SearchState, draw_lines
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling.ranks.rank_files import TAIL_BYTES, RankFiles
from zerotop_probe.recording import directory, events, tables

WRITE = "import sys; print(sys.argv[1]); print(sys.argv[2], file=sys.stderr); sys.stdout.flush(); input()"


@contextmanager
def _start(stdout: Path, stderr: Path, words: str, complaint: str = "") -> Iterator[ProcessHandle]:
    """Run a process that has written to files; it ends at the end of the context."""
    command = [sys.executable, "-c", WRITE, words, complaint]
    with stdout.open("ab") as out, stderr.open("ab") as err:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err)
    found = ProcessHandle.from_pid(child.pid)
    assert found is not None
    try:
        yield found
    finally:
        child.communicate(b"\n", timeout=20)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return Path(directory.create_recording(["torchrun", "train.py"], path=str(tmp_path / "recorded"), redact_output=True))


def _read(recording: Path) -> list[str]:
    opened = Recording.open(recording)
    buffer = OutputBuffer(opened)
    buffer.refresh_at(opened.end_ns + S)
    return [line.text for line in buffer.read_lines(BEGIN, 10_000)]


def test_the_end_of_each_file_is_recorded_redacted(tmp_path: Path, recording: Path) -> None:
    noted: list[tuple[int, str | None, str | None]] = []
    files = RankFiles(str(recording), lambda _, rank, out, err: noted.append((rank, out, err)))
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_text("old line\n" * TAIL_BYTES)
    with _start(out, err, "last words", "login --token hunter2hunter2hunter2") as process:
        files.follow(process, 3)
        files.follow(process, 3)
    files.record_end(process)
    files.close()
    assert noted == [(3, str(out), str(err))] * 2
    lines = _read(recording)
    assert f"[the end of the stdout of rank 3, from {out}:]" in lines
    assert "last words" in lines
    assert "login --token <redacted>" in lines
    assert sum(map(len, lines)) < 2 * TAIL_BYTES
    opened = Recording.open(recording)
    printed = [line.text for stream in read_last_lines(opened.at(opened.end_ns + S)) for line in stream]
    assert "[rank3]: last words" in printed


def test_a_file_of_several_ranks_is_recorded_once_and_with_what_their_launcher_adds(tmp_path: Path, recording: Path) -> None:
    files, log = RankFiles(str(recording), lambda *_: None), tmp_path / "log"
    with _start(log, log, "from a") as first, _start(log, log, "from b") as second:
        files.follow(first, 0)
        files.follow(second, 1)
    files.record_end(first)
    files.record_end(second)
    with log.open("a") as appended:
        appended.write("the launcher's table\n")
    files.close()
    lines = [line for line in _read(recording) if line.strip()]
    assert lines[0] == f"[the end of the output of ranks 0, 1, from {log}:]"
    assert sorted(lines[1:]) == ["from a", "from b", "the launcher's table"]


def test_other_files_of_the_name_pipes_and_empty_files_have_no_last_words(tmp_path: Path, recording: Path) -> None:
    noted: list[tuple[str | None, str | None]] = []
    files = RankFiles(str(recording), lambda _, rank, out, err: noted.append((out, err)))
    out = tmp_path / "out"
    with _start(out, Path(os.devnull), "mine") as process:
        files.follow(process, 0)
    out.rename(tmp_path / "moved")
    out.write_text("not of this rank\n")
    files.record_end(process)
    files.close()
    assert noted == [(str(out), None), (None, None)]
    assert _read(recording) == []


def test_output_that_is_not_recorded_is_not_read_from_files_either(tmp_path: Path) -> None:
    recording = Path(directory.create_recording(["x"], path=str(tmp_path / "recorded"), output=False))
    noted: list[tuple[str | None, str | None]] = []
    files, out = RankFiles(str(recording), lambda _, rank, out, err: noted.append((out, err))), tmp_path / "out"
    with _start(out, out, "mine") as process:
        files.follow(process, 0)
    files.record_end(process)
    files.close()
    assert noted[-1] == (str(out), str(out))
    assert list(recording.glob("output-*")) == []


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 22, in <module>
ValueError: no such shape
"""


def test_a_traceback_in_a_file_is_that_of_its_rank_and_the_file_is_named(tmp_path: Path) -> None:
    planted = record_two_steps(tmp_path)
    planted.write_records(tables.SPANS, make_identity(1), [make_span(28, 29, "step", 1, tables.BOUNDARY)], born=1)
    for rank in (0, 1):
        planted.write_event(make_identity(rank), 1.5, events.Hello, rank=rank, local_rank=rank)
    planted.write_event(make_identity(1), 31, events.Goodbye)
    path = tmp_path / "output-rank1-node1-101.log"
    path.write_text(TRACEBACK)
    row = (31 * S + S // 2, 0, len(TRACEBACK), 2, 0)
    planted.write_records(tables.OUTPUT, make_identity(1), [row], born=31)
    file = "/logs/1/stderr.log"
    planted.write_event(planted.node, 31.5, events.OutputFiles, rank=1, pid=101, start=1, stdout=None, stderr=file)
    planted.write_event(planted.node, 31.6, events.RankGone, rank=1, pid=101)
    planted.write_event(planted.node, 33, events.JobEnded, exit_code=1, signal=None, text="The job failed.")
    recording = planted.open_recording()
    (dead,) = (one for one in detect_findings(recording, BEGIN_NS + 40 * S) if one.name == "dead_rank")
    assert dead.headline == "Rank 1 ended with ValueError at train.py:22"
    assert "Its last output is in /logs/1/stderr.log." in dead.details
    failure = find_failure(recording.at(BEGIN_NS + 40 * S))
    assert failure is not None
    assert failure.advice == "Its output has the traceback. Its last output is in /logs/1/stderr.log."


def test_the_files_of_running_ranks_are_named(tmp_path: Path) -> None:
    planted = record_two_steps(tmp_path)
    for rank in (0, 1):
        name = f"/logs/{rank}/stdout.log"
        planted.write_event(planted.node, 2 + rank, events.OutputFiles, rank=rank, pid=1, start=1, stdout=name, stderr=None)
    recording = planted.open_recording()
    assert describe_rank_files(recording, BEGIN_NS + S) == ""
    assert describe_rank_files(recording, BEGIN_NS + 2 * S) == "rank 0 writes to /logs/0/stdout.log"
    assert describe_rank_files(recording, BEGIN_NS + 3 * S) == "rank 0 writes to /logs/0/stdout.log, 1 other rank to theirs"
    assert RecordingSource(recording).view_at(BEGIN_NS + 2 * S).job.rank_files == "rank 0 writes to /logs/0/stdout.log"


def test_output_names_them_in_its_title() -> None:
    page = OutputPage((), (), 0, 0.0, True, None, None, 0.0, True, False, False)
    search = SearchState("", None, is_typing=False)
    title, *_ = draw_lines(page, search, 60, 4, BLOCKS, note="rank 0 writes to /logs/0/stdout.log")
    assert "".join(text for text, _ in title).startswith("Output rank 0 writes to /logs/0/stdout.log ")
