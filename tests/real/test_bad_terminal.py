"""The screen where terminals are small or poor, and on output that is out to break it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents import build_python_command, wait_for
from programs import run_headless, run_zerotop, start_on_terminal
from terminals import Terminal

# Markup, colours, a cleared screen, another title, the alternate screen, a bell, bytes that are no UTF-8, wide characters.
HOSTILE = (
    b"[red]markup[/red] [/] [@click=app.quit]click[/] [bold\n"
    b"\x1b[31mcoloured\x1b[0m \x1b[2J\x1b[3Jcleared \x1b]0;my title\x07titled \x1b[?1049halternate \x1b[?25lcursor\x07\n"
    b"\xff\xfe broken \x00 nul \x9b31m c1 \xc3\n" + "wide 日本語 emoji 🎉 e\u0301\n".encode() + b"no end of line"
)

Open = Callable[..., Terminal]


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Open]:
    """The program on a terminal; ended at the end of the test."""
    terminals: list[Terminal] = []

    def begin_program(*arguments: str, **options: object) -> Terminal:
        terminals.append(start_on_terminal(tmp_path, *arguments, **options))  # type: ignore[arg-type]
        return terminals[-1]

    yield begin_program
    for terminal in terminals:
        terminal.close()


@pytest.fixture
def hostile_recording(tmp_path: Path) -> str:
    """A recording of such output."""
    recording = tmp_path / "recording"
    assert run_headless(recording, build_python_command(f"import os; os.write(1, {HOSTILE!r})")).returncode == 0
    return str(recording)


def test_a_jobs_output_is_text_whatever_it_is(open_terminal: Open, tmp_path: Path) -> None:
    code = f"import os, time; os.write(1, {HOSTILE!r}); time.sleep(2)"
    terminal = open_terminal("run", "--recording", str(tmp_path / "recording"), "--", *build_python_command(code))
    terminal.wait_for("[red]markup[/red] [/] [@click=app.quit]click[/] [bold", "exit code 0", "no end of line")
    terminal.wait_for("coloured cleared titled alternate cursor", "wide 日本語 emoji 🎉")
    for escape in (b"\x1b[31m", b"my title", b"\x1b[3J", b"\x9b", b"\xff"):
        assert escape not in terminal.drawn
    terminal.type_keys("q")
    assert terminal.exit_code() == 0


@pytest.mark.parametrize("term", ["xterm", "vt100", "dumb", ""])
def test_forty_columns(open_terminal: Open, tmp_path: Path, term: str) -> None:
    code = "import time; print('at work', flush=True); time.sleep(600)"
    terminal = open_terminal(
        "run", "--recording", str(tmp_path / "s"), "--", *build_python_command(code), rows=15, columns=40, TERM=term
    )
    terminal.wait_for("LIVE", "no step yet", "q leave")
    terminal.type_keys("q")
    terminal.wait_for("Stop the job")
    terminal.type_keys("s")
    terminal.wait_for("The job has ended")
    terminal.type_keys("l")
    assert terminal.exit_code() == 130


def test_a_terminal_of_hardly_any_size(open_terminal: Open, hostile_recording: str) -> None:
    for rows, columns in ((1, 1), (3, 10), (200, 20)):
        terminal = open_terminal("replay", hostile_recording, rows=rows, columns=columns)
        terminal.watch_output(1.0)
        terminal.type_keys("q")
        assert terminal.exit_code() == 0


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"},
    ],
)
def test_nothing_but_ascii_is_drawn_where_the_locale_has_no_more(
    open_terminal: Open, hostile_recording: str, locale: dict[str, str]
) -> None:
    terminal = open_terminal("replay", hostile_recording, "--speed", "1000", **locale)
    terminal.wait_for("[red]markup", "emoji", "exit code 0")
    terminal.watch_output(0.5)
    assert terminal.drawn.isascii()
    terminal.type_keys("q")
    assert terminal.exit_code() == 0


def test_without_a_terminal_replay_is_a_summary(tmp_path: Path, hostile_recording: str) -> None:
    done = run_zerotop(tmp_path, "replay", hostile_recording)
    assert done.returncode == 0
    assert b"The job ended with exit code 0." in done.stdout
    assert done.stderr == b"The screens need a terminal: this is a summary. All findings: zerotop findings\n"
    # A screen cannot be shown, so the job is run as a batch job.
    done = run_zerotop(tmp_path, "run", "--", sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, b"1\n")


def test_a_viewer_that_ignores_hanging_up_ends_with_its_terminal(open_terminal: Open, hostile_recording: str) -> None:
    terminal = open_terminal("replay", hostile_recording, ignoring="HUP")
    terminal.wait_for("EXIT 0")
    status = Path(f"/proc/{terminal.pid}/status").read_text()
    (ignored,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn")]
    assert ignored >> (signal.SIGHUP - 1) & 1
    terminal.hang_up()
    wait_for(terminal.has_ended)
    assert terminal.exit_code() == -signal.SIGHUP
