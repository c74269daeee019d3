"""``zerotop run`` with programs that are told of the job: it behaves as without them, whatever they do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from programs import run_zerotop, start_on_terminal

JOB = "import sys, time; print('working'); time.sleep(0.5); sys.exit(int(sys.argv[1]))"


def run_told(folder: Path, *options: str, code: int = 0) -> subprocess.CompletedProcess[bytes]:
    command = ["run", "--headless", "--recording", str(folder / "recording"), *options]
    return run_zerotop(folder, *command, "--", sys.executable, "-c", JOB, str(code))


def read_messages(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_command_is_notified_of_the_end(tmp_path: Path) -> None:
    ended = run_told(tmp_path, "--notify", f"cat >> {tmp_path}/told", code=3)
    assert (ended.returncode, ended.stdout) == (3, b"working\n")
    (message,) = read_messages(tmp_path / "told")
    assert (message["event"], message["held_back"]) == ("end", 0)
    assert message["end"] == {"state": "ended", "exit_code": 3, "sentence": "The job failed with exit code 3."}
    assert message["recording"] == "recording"


def test_a_command_that_fails_is_a_sentence_and_the_exit_code_stays(tmp_path: Path) -> None:
    ended = run_told(tmp_path, "--notify", "echo gone >&2; exit 9")
    assert (ended.returncode, ended.stdout) == (0, b"working\n")
    assert b"zerotop: The command of --notify failed with exit code 9: gone\n" in ended.stderr


@pytest.mark.parametrize("target", ["ftp://example.org/x", "nats://host", " "])
def test_notifications_that_cannot_work_are_refused_before_the_job(tmp_path: Path, target: str) -> None:
    refused = run_told(tmp_path, "--notify", target)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"--notify" in refused.stderr
    assert not (tmp_path / "recording").exists()


def test_a_command_that_hangs_holds_up_neither_job_nor_shell_for_long(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    ended = run_told(tmp_path, "--notify", "sleep 300")
    assert (ended.returncode, ended.stdout) == (0, b"working\n")
    assert time.monotonic() - begin_s < 30
    assert b"does not answer" in ended.stderr


def test_a_job_that_cannot_be_started_tells_nobody(tmp_path: Path) -> None:
    ended = run_zerotop(tmp_path, "run", "--headless", "--notify", f"touch {tmp_path}/told", "--", "/no/such/program")
    assert ended.returncode == 127
    assert not (tmp_path / "told").exists()


def test_it_goes_on_after_the_screen_is_left(tmp_path: Path) -> None:
    job = "import time; print('at work', flush=True); time.sleep(8)"
    arguments = ("run", "--notify", f"cat >> {tmp_path}/told", "--", sys.executable, "-c", job)
    terminal = start_on_terminal(tmp_path, *arguments)
    try:
        terminal.wait_for("at work")
        terminal.type_keys("q")
        terminal.wait_for("Detach")
        terminal.type_keys("d")
        assert terminal.exit_code() == 0
    finally:
        terminal.close()
    assert read_messages(tmp_path / "told") == []
    deadline_s = time.monotonic() + 60
    while not (messages := read_messages(tmp_path / "told")) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert [message["event"] for message in messages] == ["end"]
