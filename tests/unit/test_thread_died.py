"""Exceptions that end threads of a rank."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest

from in_pieces import find_at_end
from memory_recording import PlantedRecording, record_two_steps
from small_recording import BEGIN_NS, S, make_identity, make_record
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.findings.ranks import thread_died
from zerotop_probe.recording import events, tables

TEXT = """\
Exception in thread Thread-2 (prefetch):
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 982, in run
    self._target(*self._args, **self._kwargs)
  File "/job/train.py", line 7, in read_row
    return rows[i]
           ~~~~^^^
KeyError: 60
"""


def _find(recording: PlantedRecording, second: float = 40) -> list[Finding]:
    return list(detect_findings(recording.open_recording(), BEGIN_NS + int(second * S)))


def _begin(folder: Path) -> PlantedRecording:
    recording = record_two_steps(folder)
    recording.write_event(make_identity(0), 1.5, events.Hello, rank=0, local_rank=0)
    return recording


def _write_output(recording: PlantedRecording, parts: list[str]) -> None:
    """Write a part of the output each second from second 31 on."""
    recording.write_output(31, "".join(parts))
    for path in recording.folder.glob("output-*.rec"):
        path.unlink()
    offsets = [0, *accumulate(map(len, parts))]
    rows = [
        make_record(tables.OUTPUT, time_ns=(31 + number) * S, offset=offsets[number], length=len(part))
        for number, part in enumerate(parts)
    ]
    recording.write_records(tables.OUTPUT, recording.node, rows)


@pytest.mark.parametrize("cut", [1, 30, 200])
@pytest.mark.parametrize("piece", [1, 10000])
def test_a_thread_that_an_exception_ended(tmp_path: Path, cut: int, piece: int) -> None:
    recording, text = _begin(tmp_path), f"step 2\n{TEXT}step 3\n"
    _write_output(recording, [text[:cut], text[cut:]])
    (died,) = find_at_end(tmp_path, [thread_died.detect], piece)
    assert died.headline == "Thread-2 (prefetch) ended with KeyError at train.py:7 in read_row"
    assert died.details.startswith("KeyError: 60. ")
    assert (died.fix, died.ranks, died.begin_ns) == ("train.py:7", (0,), BEGIN_NS + 32 * S)


def test_only_the_first_threads_that_end_alike_are_reported(tmp_path: Path) -> None:
    recording = _begin(tmp_path)
    _write_output(recording, [TEXT.replace("-2", f"-{number}") for number in range(5)])
    assert sum(one.name == "thread_died" for one in _find(recording)) == 3


def test_an_exception_of_a_thread_does_not_end_its_rank(tmp_path: Path) -> None:
    recording = _begin(tmp_path)
    recording.write_output(31, TEXT)
    recording.write_event(recording.node, 33, events.RankGone, rank=0, pid=make_identity(0).pid, exit_code=-9)
    recording.write_event(recording.node, 34, events.JobEnded, exit_code=137, signal=None, text="The job failed.")
    (dead,) = [one for one in _find(recording) if one.name == "dead_rank"]
    assert dead.headline.startswith("Rank 0 was killed by signal 9")


def test_a_training_threads_own_exception_is_no_finding_of_a_thread(tmp_path: Path) -> None:
    recording = _begin(tmp_path)
    recording.write_output(31, TEXT.partition("\n")[2])
    assert not any(one.name == "thread_died" for one in _find(recording))


def test_a_threads_interrupt_is_that_of_the_whole_job(tmp_path: Path) -> None:
    """The thread that pins memory gets that of a loader worker from its queue."""
    recording = _begin(tmp_path)
    recording.write_output(31, TEXT.replace("KeyError: 60", "KeyboardInterrupt"))
    assert find_at_end(tmp_path, [thread_died.detect]) == ()
