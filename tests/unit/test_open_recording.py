"""The public object: a recording at a moment, as ``docs/recordings.md`` shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import recordings
import zerotop
from zerotop.report.notebook import OpenRecording
from zerotop_probe.recording.events import Engine, RankGone

S = 1_000_000_000
_DOCUMENT = Path(__file__).parents[2] / "docs" / "recordings.md"


def open_recording(name: str) -> OpenRecording:
    return zerotop.open_recording(str(recordings.find_packed_file(name)))


def test_the_documented_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = next(
        code for code in re.findall(r"```python\n(.*?)```", _DOCUMENT.read_text(), re.S) if "open_recording" in code
    )
    exec(example.replace('"brisk-otter"', repr(str(recordings.find_packed_file("cpu-dead")))), {})
    printed = capsys.readouterr().out
    assert printed.startswith("vm ZeRO 2\n")
    assert "rank 1 ended with exit code 247" in printed
    assert re.search(r"^vm [0-9]{9,}$", printed, re.M)


def test_nothing_later_is_known_at_a_moment() -> None:
    planted = open_recording("cpu-dead")
    end, recording = planted.at(), planted.recording
    assert end.end is not None
    steps = end.ranks[0].steps
    middle_ns = int(steps.times[len(steps) // 2])
    earlier = planted.at(middle_ns)
    assert earlier.end is None
    assert not earlier.events_of(RankGone)
    assert earlier.ranks[0].steps.times.tolist() == [time_ns for time_ns in steps.times.tolist() if time_ns <= middle_ns]
    assert earlier.ranks[0].engine == end.ranks[0].engine
    assert planted.at(recording.begin_ns).ranks == {}


def test_a_window_has_only_what_is_within() -> None:
    recording = open_recording("cpu-dead")
    at = recording.at()
    steps = at.ranks[0].steps
    begin_ns, end_ns = (int(time_ns) for time_ns in steps.times[[3, 8]])
    window = at.between(begin_ns, end_ns)
    assert window.ranks[0].steps.times.tolist() == steps.times[4:9].tolist()
    assert not window.events_of(Engine)
    assert window.ranks[0].engine.zero_stage == 2  # known before
    times = window.nodes["vm"].samples("processes").times
    assert len(times)
    assert ((times > begin_ns) & (times <= end_ns)).all()
    assert (window.end, at.between(end_ns, at.cursor_ns).end) == (None, at.end)


def test_a_rank_has_its_own_samples() -> None:
    recording = open_recording("cpu-dead")
    at = recording.at(recording.end_ns - S)
    rank = at.ranks[1]
    assert repr(rank) == f"<rank 1, process {rank.pid} on vm>"
    assert (repr(at), repr(at.nodes["vm"])) == (f"<cpu-dead at {at.cursor_ns}: ranks 0, 1>", "<node vm>")
    samples, spans = rank.samples("processes"), rank.samples("spans")
    assert set(samples.rows["pid"].tolist()) == {rank.pid}
    assert 0 < max(samples.times[-1], spans.times[-1]) <= at.cursor_ns
    assert not len(rank.samples("gpus"))
    with pytest.raises(AttributeError, match="A moment is immutable"):
        at.cursor_ns += 1


def test_the_last_steps_and_their_frame() -> None:
    steps = open_recording("cpu-dead").at().ranks[1].steps
    last = steps.last(5)
    assert (len(last), len(steps.last(10_000))) == (5, len(steps))
    frame = last.frame
    assert frame["step"].to_list() == steps.rows["step"][-5:].tolist()
    assert np.array_equal(frame["unix_ns"].to_numpy(), last.times)


def test_polars_is_imported_only_for_frames(tmp_path: Path) -> None:
    path = recordings.unpack_to_folder("cpu-dead", tmp_path)
    program = (
        "import sys, zerotop\n"
        f"at = zerotop.open_recording({str(path)!r}).at()\n"
        "assert at.ranks[0].engine.zero_stage == 2 and at.end.rank == 1\n"
        "known = set(sys.modules)\n"
        "assert len(at.ranks[0].steps.last(1).frame) == 1\n"
        "print('polars' in known, 'polars' in sys.modules)\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == "False True\n"
