"""Leaving the screen and coming back, stopping a job, losing its sampler: in a real terminal."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents import build_python_command, join_output_bytes, read_node_events, wait_for
from programs import run_zerotop, start_on_terminal
from terminals import Terminal
from zerotop_probe.outside.job import job_control

# Works until a file appears; says when it is asked to end, and ends then unless told to go on.
WORKER = """
import os, signal, sys, time
def asked(number, frame):
    print("asked by", signal.Signals(number).name, flush=True)
    if not int(sys.argv[2]): raise SystemExit(4)
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, asked)
print("at work", flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.05)
print("work done", flush=True)
raise SystemExit(6)
"""


class Work:
    """A job watched on a terminal, in the recording "mine" of a state directory of its own."""

    def __init__(self, folder: Path, *, stubborn: bool = False) -> None:
        self.folder = folder
        self.recording = folder / "zerotop" / "sessions" / "mine"
        self._flag = folder / "end"
        job = [*build_python_command(WORKER), str(self._flag), str(int(stubborn))]
        self.terminal = start_on_terminal(folder, "run", "--recording", str(self.recording), "--", *job)
        self.terminal.wait_for("at work")

    def attach_again(self, called: str = "mine") -> Terminal:
        self.terminal.close()
        self.terminal = start_on_terminal(self.folder, "attach", called)
        return self.terminal

    def answer_quit(self, key: str) -> None:
        """Asks to leave, and answers the question."""
        self.terminal.type_keys("q")
        self.terminal.wait_for("Detach", "Stop the job", "Cancel")
        self.terminal.type_keys(key)

    def leave_ended(self) -> int:
        """Waits for the end of a job that was stopped, and leaves; the program's exit code."""
        self.terminal.wait_for("The job has ended.")
        self.terminal.type_keys("l")
        return self.terminal.exit_code()

    def wait_until_said(self, word: bytes) -> None:
        wait_for(lambda: word in join_output_bytes(self.recording, "output"))

    def read_listed(self) -> dict[str, object]:
        (row,) = json.loads(run_zerotop(self.folder, "recordings", "--json").stdout)
        assert isinstance(row, dict)
        return row

    def end_job(self) -> None:
        self._flag.touch()

    def close(self) -> None:
        self.end_job()
        self.terminal.close()
        if (job := job_control.read_facts(str(self.recording)).job) is not None:
            wait_for(lambda: not job.is_alive())

    def kill_sampler(self) -> None:
        (sampler,) = [process for process in job_control.read_facts(str(self.recording)).samplers if process.is_alive()]
        os.kill(sampler.pid, signal.SIGKILL)
        wait_for(lambda: not sampler.is_alive())


Start = Callable[..., Work]


@pytest.fixture
def start_work(tmp_path: Path) -> Iterator[Start]:
    """Starts a Work; whatever a test leaves of it is ended."""
    works: list[Work] = []

    def begin_work(**options: bool) -> Work:
        works.append(Work(tmp_path, **options))
        return works[-1]

    yield begin_work
    for work in works:
        work.close()


def test_a_detached_job_goes_on_and_is_found_again(start_work: Start) -> None:
    work = start_work()
    work.terminal.type_keys("q")
    work.terminal.wait_for("Detach", "zerotop attach mine")
    work.terminal.type_keys("d")
    assert work.terminal.exit_code() == 0
    assert "Training continues. Reattach: zerotop attach mine" in work.terminal.text
    assert work.read_listed()["state"] == "live"
    again = work.attach_again()
    again.wait_for("at work")
    work.end_job()
    again.wait_for("exit code 6")
    again.type_keys("q")
    assert again.exit_code() == 6
    assert "The job failed with exit code 6." in again.text
    assert (work.read_listed()["state"], work.read_listed()["exit_code"]) == ("ended", 6)


def test_a_viewer_that_is_killed_takes_nothing_with_it(start_work: Start) -> None:
    work = start_work()
    os.kill(work.terminal.pid, signal.SIGKILL)
    assert work.terminal.exit_code() == -signal.SIGKILL
    assert work.read_listed()["state"] == "live"
    work.end_job()
    wait_for(lambda: read_node_events(work.recording, "job_ended"))
    assert join_output_bytes(work.recording, "output") == b"at work\nwork done\n"


def test_a_terminal_that_is_closed_leaves_the_job_running(start_work: Start) -> None:
    work = start_work()
    work.terminal.hang_up()
    wait_for(work.terminal.has_ended)
    assert work.read_listed()["state"] == "live"
    work.end_job()
    wait_for(lambda: read_node_events(work.recording, "job_ended"))


def test_a_job_is_stopped_gently(start_work: Start) -> None:
    work = start_work()
    work.answer_quit("s")
    assert work.leave_ended() == 4
    assert "The job failed with exit code 4, after it had been asked to stop." in work.terminal.text
    assert join_output_bytes(work.recording, "output") == b"at work\nasked by SIGINT\n"


def test_a_job_that_does_not_want_to_end_is_killed(start_work: Start) -> None:
    work = start_work(stubborn=True)
    work.answer_quit("s")
    work.wait_until_said(b"SIGINT")
    work.terminal.type_keys("s")
    work.wait_until_said(b"SIGTERM")
    work.terminal.wait_for("Kill it now")
    work.terminal.type_keys("s")
    assert work.leave_ended() == 137
    assert "The job was killed by signal 9 (SIGKILL), after it had been asked to stop." in work.terminal.text


def test_a_cancelled_leave_changes_nothing(start_work: Start) -> None:
    work = start_work()
    work.answer_quit("c")
    work.end_job()
    work.terminal.wait_for("work done", "exit code 6")
    work.terminal.type_keys("q")
    assert work.terminal.exit_code() == 6
    assert read_node_events(work.recording, "stop_sent") == []


def test_a_sampler_that_died_is_replaced_from_the_screen(start_work: Start) -> None:
    """However long ago: a job that runs is live although nobody has written for more than the seconds of silence."""
    work = start_work()
    work.kill_sampler()
    work.terminal.watch_output(7)
    assert "exit status is unknown" not in work.terminal.text
    work.terminal.wait_for("The sampler has stopped")
    work.terminal.type_keys("r")
    wait_for(lambda: job_control.is_sampler_alive(str(work.recording)))
    work.end_job()
    work.terminal.wait_for("work done", "its exit code is not known")
    work.terminal.type_keys("q")
    assert work.terminal.exit_code() == 1
    assert (work.read_listed()["state"], work.read_listed()["exit_code"]) == ("ended", None)
    assert "mine  exit ?" in run_zerotop(work.folder, "recordings").stdout.decode()


def test_attaching_replaces_a_sampler_that_died(start_work: Start) -> None:
    work = start_work()
    work.answer_quit("d")
    assert work.terminal.exit_code() == 0
    work.kill_sampler()
    again = work.attach_again(str(work.recording))
    again.wait_for("a new one records from now on", "at work")
    assert job_control.is_sampler_alive(str(work.recording))
    work.answer_quit("s")
    assert work.leave_ended() == 1
    assert "its exit code is not known" in again.text
    assert recorded_by_all(work.recording) == b"at work\nasked by SIGINT\n"


def test_attaching_without_a_terminal_still_replaces_the_sampler(start_work: Start) -> None:
    work = start_work()
    work.kill_sampler()
    done = run_zerotop(work.folder, "attach", "mine")
    assert done.returncode == 1
    assert done.stderr.decode() == (
        "zerotop: The job's sampler had died: a new one records from now on.\n"
        "zerotop: The live screen needs a terminal; --headless records without one\n"
    )
    assert job_control.is_sampler_alive(str(work.recording))
    work.end_job()
    wait_for(lambda: read_node_events(work.recording, "sampler_ended"))


def test_a_job_that_ended_unseen_is_no_success(start_work: Start) -> None:
    work = start_work()
    work.kill_sampler()
    work.end_job()
    wait_for(lambda: not job_control.is_job_alive(str(work.recording)))
    work.terminal.wait_for("exit status is unknown")
    work.terminal.type_keys("q")
    assert work.terminal.exit_code() == 1
    assert "Exit status unknown: the job's end was not recorded." in work.terminal.text
    assert work.read_listed()["exit_code"] is None


def recorded_by_all(recording: Path) -> bytes:
    """The job's output by all samplers, in the order of their starts."""
    logs = sorted(recording.glob("output-node-*.log"), key=lambda path: path.stat().st_mtime_ns)
    return b"".join(log.read_bytes() for log in logs)
