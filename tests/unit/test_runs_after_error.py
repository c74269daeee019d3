"""Ranks whose process goes on after their training: after the exception that ended it, or while its threads wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from in_pieces import find_at_end
from memory_recording import PlantedRecording, record_two_steps
from small_recording import BEGIN_NS, S, make_identity
from stuck_ranks_recording import Left, Stand, write_standing
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
    assert found.headline == "ValueError at train.py:40 in main ended the training, but not rank 0's process"
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


AT_EXIT = (("threading.py", 1622, "_shutdown", False),)
GETTING = "Thread-2", "acquire", ("queue.py", 171, "Queue.get", False), ("views.py", 61, "Writer.run", True)


def _name_last(folder: Path, *, daemon: bool | None, thread: Any = GETTING, left: Left | None = None) -> list[str]:
    folder.mkdir(exist_ok=True)
    stand = Stand(AT_EXIT, "acquire", other=thread, is_daemon=daemon)
    recording = write_standing(folder, {0: stand}, (25, 30, 37), left=left)
    linked = link_findings(detect_findings(recording, BEGIN_NS + 70 * S))
    return [one.finding.name for one in linked if one.finding.severity.value != "info"]


@pytest.mark.parametrize("daemon", [False, None])
def test_a_thread_that_waits_in_vain_keeps_the_process(tmp_path: Path, daemon: bool | None) -> None:
    recording = write_standing(tmp_path, {0: Stand(AT_EXIT, "acquire", other=GETTING, is_daemon=daemon)}, (25, 30))
    found = [one for one in detect_findings(recording, BEGIN_NS + 50 * S) if one.severity.value != "info"]
    assert [str(one.headline) for one in found] == ["Training ended, but not rank 0's process: Thread-2 waits for a queue"]
    assert found[0].details.startswith("10 s after the last step it had not ended")
    assert found[0].details.endswith("Thread-2 waits for a queue at views.py:61 in Writer.run.")
    assert "start it as a daemon" in found[0].advice
    assert (found[0].fix, found[0].known_ns) == ("views.py:61", BEGIN_NS + 30 * S)


def test_a_thread_that_works_or_that_python_does_not_wait_for_is_not_blamed(tmp_path: Path) -> None:
    assert not _name_last(tmp_path / "daemon", daemon=True)
    assert not _name_last(tmp_path / "works", daemon=False, thread=("up", "time.sleep", ("up.py", 6, "send", True)))


IGNORED = """\
Exception ignored {}: <module 'threading' from '/usr/lib/python3.12/threading.py'>
Traceback (most recent call last):
  File "/usr/lib/python3.12/threading.py", line 1622, in _shutdown
    lock.acquire()
KeyboardInterrupt:
"""


@pytest.mark.parametrize(
    ("printed", "names"),
    [
        (IGNORED.format("in"), ["runs_after_end"]),
        (IGNORED.format("on threading shutdown"), ["runs_after_end"]),
        ("", ["long_end"]),
    ],
    ids=["Python 3.12", "Python 3.13", "it ended by itself"],
)
def test_it_stays_if_the_job_was_interrupted(tmp_path: Path, printed: str, names: list[str]) -> None:
    """Python ends with exit code 0 then."""
    assert _name_last(tmp_path, daemon=False, left=Left(45, 0, printed)) == names
