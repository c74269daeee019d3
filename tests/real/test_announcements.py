"""The bell and the notification when a job ends or fails."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import recordings
from terminals import Terminal
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.announcements import Announcer, write_announcement
from zerotop.ui.app.viewer import Viewer

JOB = """
import pathlib, time
while not pathlib.Path("seen").exists():
    time.sleep(0.1)
raise SystemExit(3)
"""


@pytest.mark.parametrize("choice", ["on", "off"])
def test_a_job_that_ends_is_announced_unless_that_is_off(tmp_path: Path, choice: str) -> None:
    state = tmp_path / "state" / "zerotop"
    state.mkdir(parents=True)
    (state / "settings.json").write_text(json.dumps({"announcements": choice}))
    command = [
        sys.executable,
        "-m",
        "zerotop",
        "run",
        "--recording",
        str(tmp_path / "recording"),
        "--",
        sys.executable,
        "-c",
        JOB,
    ]
    environment = {**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": str(state.parent)}
    terminal = Terminal(command, environment=environment, folder=tmp_path)
    try:
        terminal.wait_for("elapsed")
        assert b"\x1b]9;" not in terminal.drawn
        (tmp_path / "seen").touch()
        terminal.wait_for("exit code 3")
        announced = b"\x1b]9;recording: The job failed with exit code 3.\x07\x07"
        if choice == "on":
            terminal.wait_until(lambda _: announced in terminal.drawn)
        drawn = terminal.drawn
        terminal.watch_output(1.0)
        assert (drawn + terminal.drawn).count(announced) == (choice == "on")
    finally:
        terminal.close()


def test_text_of_a_job_cannot_write_escape_sequences() -> None:
    written = write_announcement("rank 0: \x1b]52;c;ZXZpbA==\x07\x9b2J" + "x" * 500)
    assert written.startswith("\x1b]9;rank 0:  ]52;c;ZXZpbA== 2Jxx")
    assert written.count("\x1b") == 1
    assert written.count("\x07") == 2
    assert len(written) < 250


def test_a_failure_is_announced_once_and_only_while_the_job_runs() -> None:
    recording = recordings.open_recording("cpu-hang")
    frame = Viewer(RecordingSource(recording), None, time.monotonic).make_frame()
    over = next(one for one in detect_findings(recording, recording.end_ns) if one.name == "hung_ranks")
    findings = detect_findings(recording, over.known_ns - 1)  # it stands still
    before, after = replace(frame, all_findings=()), replace(frame, all_findings=findings)
    source = SimpleNamespace(is_live=True)
    announcer = Announcer(cast(RecordingSource, source), is_own_job=False)
    assert announcer.find_news(before) == ""
    assert announcer.find_news(after) == f"cpu-hang: {next(one for one in findings if one.name == 'hung_ranks').headline}"
    later = [replace(one, known_ns=one.known_ns + 1, first_known_ns=one.detected_ns) for one in findings]
    assert announcer.find_news(after) == announcer.find_news(replace(frame, all_findings=tuple(later))) == ""
    source.is_live = False
    assert announcer.find_news(after) == "cpu-hang: The job ended with exit code 0."
    assert announcer.find_news(before) == ""
    late = Announcer(cast(RecordingSource, source), is_own_job=False)
    assert late.find_news(before) == late.find_news(after) == ""
    early = Announcer(cast(RecordingSource, source), is_own_job=True)
    assert early.find_news(after) == "cpu-hang: The job ended with exit code 0."
    assert early.find_news(after) == ""


def test_a_frame_begun_before_the_end_does_not_say_how_it_ended() -> None:
    recording = recordings.open_recording("cpu-hang")
    frame = Viewer(RecordingSource(recording), None, time.monotonic).make_frame()
    lagging = replace(frame, view=replace(frame.view, job=replace(frame.view.job, exit_text="")), all_findings=())
    source = SimpleNamespace(is_live=False)
    announcer = Announcer(cast(RecordingSource, source), is_own_job=True)
    assert announcer.find_news(lagging) == announcer.find_news(lagging) == ""
    assert announcer.find_news(frame) == "cpu-hang: The job ended with exit code 0."
    unknown = Announcer(cast(RecordingSource, source), is_own_job=True)
    assert [news for _ in range(20) if (news := unknown.find_news(lagging))] == ["cpu-hang: The job has ended."]
