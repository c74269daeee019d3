"""``zerotop`` alone: a list in a terminal, a usage error without one; how soon it is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import recordings
from terminals import Terminal
from zerotop.cli import main

# The list shows the jobs of the machine too, above the recordings.
pytestmark = pytest.mark.alone


def start_program(folder: Path) -> Terminal:
    """The program without arguments, its recordings in ``folder``."""
    environment = os.environ | {"XDG_STATE_HOME": str(folder), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    return Terminal([sys.executable, "-m", "zerotop"], environment=environment, folder=folder)


def test_without_a_terminal_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "missing COMMAND" in capsys.readouterr().err
    run = subprocess.run([sys.executable, "-m", "zerotop"], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    assert run.returncode == 2


def test_in_a_terminal_it_lists_opens_and_leaves(tmp_path: Path) -> None:
    folders = tmp_path / "zerotop" / "sessions"
    folders.mkdir(parents=True)
    shutil.copy(recordings.find_packed_file("z2-oom"), folders)
    terminal = start_program(tmp_path)
    terminal.wait_for("1 recording")
    terminal.wait_for("OOM (GPU)")
    terminal.type_keys("\r")
    terminal.wait_for("Timeline")  # the tabs of the screens, which the list has not
    terminal.type_keys("q")
    terminal.wait_for("1 recording")
    terminal.type_keys("q")
    assert terminal.exit_code() == 0


def test_two_hundred_are_there_at_once(tmp_path: Path) -> None:
    """Half a second on a machine at rest, measured beside what any program of this toolkit needs to be there."""
    folders = tmp_path / "zerotop" / "sessions"
    folders.mkdir(parents=True)
    names = recordings.list_recordings()
    for number in range(200):
        shutil.copy(recordings.find_packed_file(names[number % len(names)]), folders / f"{number}.zerotop")
    seconds = min(_seconds_until_listed(tmp_path) for _ in range(3))
    bare = min(_seconds_to_import() for _ in range(3))
    assert seconds < bare * 3 + 0.2, (seconds, bare)


def _seconds_until_listed(folder: Path) -> float:
    begin = time.monotonic()
    terminal = start_program(folder)
    terminal.wait_for("200 recordings")
    seconds = time.monotonic() - begin
    terminal.type_keys("q")
    assert terminal.exit_code() == 0
    return seconds


def _seconds_to_import() -> float:
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import textual.app, textual.widgets, numpy"], check=True)
    return time.monotonic() - begin
