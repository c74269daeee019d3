"""Ranks whose process goes on after the exception that ended their training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from in_pieces import find_at_end
from memory_recording import PlantedRecording, record_two_steps
from small_recording import BEGIN_NS, S, make_identity
from zerotop.analysis.findings import Finding, detect_findings, link_findings
from zerotop.analysis.findings.ranks import runs_after_error
from zerotop_probe.recording import events

TEXT = """\
Traceback (most recent call last):
  File "/job/train.py", line 40, in main
    raise ValueError("bad label")
ValueError: bad label
"""
SHUTDOWN, LOOP = ("threading.py", 1590, "_shutdown", False), ("train.py", 40, "main", True)
CHILDREN = [
    ("multiprocessing/process.py", 149, "BaseProcess.join", False),
    ("multiprocessing/util.py", 357, "_exit_function", False),
]
UPLOADS = [("upload.py", 5, "send", True), ("threading.py", 982, "Thread.run", False)]


def _record(folder: Path, at: float, text: str, training: list[Any], **threads: list[Any]) -> PlantedRecording:
    """Record a rank that prints ``text`` at a second, and whose stacks are seen in second 40."""
    recording = record_two_steps(folder)
    recording.write_event(make_identity(0), 1.5, events.Hello, rank=0, local_rank=0)
    recording.write_output(at, text)
    frames = list(dict.fromkeys(frame for one in (training, *threads.values()) for frame in one))
    stacks: list[dict[str, Any]] = [{"count": 1, "frames": [frames.index(one) for one in training]}]
    stacks += [{"count": 1, "thread": name, "frames": [frames.index(one) for one in each]} for name, each in threads.items()]
    named = [dict(zip(("file", "line", "function", "own"), one, strict=True)) for one in frames]
    facts = {"where": "between phases", "why": "silent", "step": 2, "begin_ns": 29 * S, "end_ns": 40 * S, "samples": 1}
    recording.write_event(make_identity(0), 40, events.Stacks, frames=named, stacks=stacks, **facts)
    return recording


def _find(recording: PlantedRecording, second: float) -> list[Finding]:
    found = detect_findings(recording.open_recording(), BEGIN_NS + int(second * S))
    return [one for one in found if one.name == "runs_after_error"]


@pytest.mark.parametrize("piece", [1, 10000])
def test_a_thread_keeps_the_process(tmp_path: Path, piece: int) -> None:
    _record(tmp_path, 31, TEXT, [SHUTDOWN], uploader=UPLOADS)
    (found,) = find_at_end(tmp_path, [runs_after_error.detect], piece)
    assert found.headline == "ValueError at train.py:40 in main ended the training; rank 0 still runs"
    assert "ValueError: bad label. 9.00 s later" in found.details
    assert found.details.endswith("Python waits for threads, of which uploader at upload.py:5 in send runs.")
    assert "Start uploader as a daemon" in found.advice
    assert (found.fix, found.begin_ns, found.known_ns) == ("train.py:40", BEGIN_NS + 31 * S, BEGIN_NS + 40 * S)


def test_child_processes_keep_the_process(tmp_path: Path) -> None:
    (found,) = _find(_record(tmp_path, 31, TEXT, CHILDREN, uploader=UPLOADS), 41)
    assert found.details.endswith("Python waits for child processes.")
    assert "uploader" not in found.advice


@pytest.mark.parametrize(
    ("at", "text", "training"),
    [
        (31, TEXT, [SHUTDOWN, LOOP]),  # the script waits for its threads itself
        (31, TEXT, [("torch/utils/data/dataloader.py", 9, "next", False)]),
        (15, TEXT, [SHUTDOWN]),  # it was caught: training went on
        (31, "Training is over\n", [SHUTDOWN]),
        (31, TEXT.replace("ValueError", "KeyboardInterrupt"), [SHUTDOWN]),
        (31, f"Exception in thread Thread-1 (send):\n{TEXT}", [SHUTDOWN]),
        (31, "".join(f"[rank1]: {line}\n" for line in TEXT.splitlines()), [SHUTDOWN]),
    ],
    ids=["in the script", "elsewhere", "caught", "no error", "Ctrl-C", "a thread's", "another rank's"],
)
def test_other_ends_are_not_told(tmp_path: Path, at: float, text: str, training: list[Any]) -> None:
    assert not _find(_record(tmp_path, at, text, training, uploader=UPLOADS), 41)


@pytest.mark.parametrize(("ends_itself", "names"), [(True, ["dead_rank"]), (False, ["runs_after_error"])])
def test_it_stays_unless_the_rank_ends_with_its_error(tmp_path: Path, ends_itself: bool, names: list[str]) -> None:
    """A job that SIGTERM ends has no other finding of its error."""
    recording = _record(tmp_path, 31, TEXT, [SHUTDOWN], uploader=UPLOADS)
    code, name = (1, None) if ends_itself else (None, "SIGTERM")
    gone = {"exit_code": 1} if ends_itself else {"exit_code": -15}
    recording.write_event(recording.node, 60, events.RankGone, rank=0, pid=make_identity(0).pid, **gone)
    recording.write_event(recording.node, 61, events.JobEnded, exit_code=code, signal=name, text="The job ended.")
    found = [one.finding for one in link_findings(detect_findings(recording.open_recording(), BEGIN_NS + 70 * S))]
    assert [one.name for one in found if one.severity.value == "error"] == names
