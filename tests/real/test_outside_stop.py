"""Stopping real jobs: asking, insisting, killing; and passing signals on in the foreground."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from agents import AGENT, build_python_command, join_output_bytes, read_node_events, wait_for
from zerotop_probe.outside.attaching import attaching, jobs
from zerotop_probe.outside.job import agent, job_control
from zerotop_probe.outside.procfs import ProcessHandle

# Says which signals it got; ends at the last of them.
LISTENER = """
import os, signal, sys, time
names, last = sys.argv[1].split(","), sys.argv[2]
def note(number, frame):
    os.write(1, f"{signal.Signals(number).name}\\n".encode())  # a print that interrupts one fails
    if signal.Signals(number).name == last: sys.exit(9)
for name in names: signal.signal(getattr(signal, name), note)
print("ready", flush=True)
while True: time.sleep(0.05)
"""

# A launcher whose rank has moved to a process group of its own and ignores whatever can be ignored.
STUBBORN = """
import os, signal, subprocess, sys, time
code = "import signal, time; [signal.signal(n, 1) for n in (2, 15)]; print('ready'); time.sleep(600)"
environment = {**os.environ, "RANK": "0"}
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env=environment)
open("child", "w").write(str(child.pid))
sys.exit(child.wait() and 1)
"""


def build_listener(signals: str, last: str) -> list[str]:
    return [*build_python_command(LISTENER), signals, last]


def signals_sent(recording: Path) -> list[str]:
    return [event["signal"] for event in read_node_events(recording, "stop_sent")]


def is_ready(recording: Path) -> bool:
    return bool(list(recording.glob("output-*.rec"))) and b"ready\n" in join_output_bytes(recording, "output")


def test_a_gentle_stop_is_an_interrupt_as_from_the_keyboard(tmp_path: Path) -> None:
    started = agent.launch_in_background(str(tmp_path), build_listener("SIGINT,SIGTERM", "SIGINT"))
    wait_for(lambda: is_ready(tmp_path))
    job_control.request_stop(str(tmp_path))
    wait_for(lambda: not started.is_alive())
    assert join_output_bytes(tmp_path, "output") == b"ready\nSIGINT\n"
    assert signals_sent(tmp_path) == ["SIGINT"]
    (end,) = read_node_events(tmp_path, "job_ended")
    assert end["exit_code"] == 9
    assert end["text"] == "The job failed with exit code 9, after it had been asked to stop."
    job_control.request_stop(str(tmp_path))  # of a job that has ended: nothing happens


def test_a_stop_insists_by_itself(tmp_path: Path) -> None:
    started = agent.launch_in_background(str(tmp_path), build_listener("SIGINT,SIGTERM", ""), grace_s=(0.3, 0.3))
    wait_for(lambda: is_ready(tmp_path))
    job_control.request_stop(str(tmp_path))
    wait_for(lambda: not started.is_alive())
    assert join_output_bytes(tmp_path, "output") == b"ready\nSIGINT\nSIGTERM\n"
    assert signals_sent(tmp_path) == ["SIGINT", "SIGTERM", "SIGKILL"]
    assert read_node_events(tmp_path, "job_ended")[0]["signal"] == "SIGKILL"


def test_asking_again_does_not_wait(tmp_path: Path) -> None:
    started = agent.launch_in_background(str(tmp_path), build_listener("SIGINT,SIGTERM", "SIGTERM"), grace_s=(600, 600))
    wait_for(lambda: is_ready(tmp_path))
    job_control.request_stop(str(tmp_path))
    wait_for(lambda: b"SIGINT" in join_output_bytes(tmp_path, "output"))
    job_control.request_stop(str(tmp_path))
    wait_for(lambda: not started.is_alive())
    assert join_output_bytes(tmp_path, "output") == b"ready\nSIGINT\nSIGTERM\n"


def test_a_termination_of_the_agent_in_the_background_is_a_stop(tmp_path: Path) -> None:
    started = agent.launch_in_background(str(tmp_path), build_listener("SIGINT,SIGTERM", "SIGINT"))
    wait_for(lambda: is_ready(tmp_path))
    assert started.send_signal(signal.SIGHUP)  # the terminal it was started from is gone
    assert started.send_signal(signal.SIGTERM)
    wait_for(lambda: not started.is_alive())
    assert join_output_bytes(tmp_path, "output") == b"ready\nSIGINT\n"


@pytest.fixture
def stubborn_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ProcessHandle, ProcessHandle]:
    """A recording whose launcher ends when interrupted and leaves a rank; the agent and that rank."""
    recording = tmp_path / "recording"
    recording.mkdir()
    monkeypatch.chdir(tmp_path)
    started = agent.launch_in_background(str(recording), build_python_command(STUBBORN), grace_s=(0.3, 0.3))
    wait_for(lambda: is_ready(recording) and read_node_events(recording, "rank_found"))
    rank = ProcessHandle.from_pid(int((tmp_path / "child").read_text()))
    assert rank is not None
    return recording, started, rank


def test_ranks_that_left_their_launcher_are_killed_too(stubborn_job: tuple[Path, ProcessHandle, ProcessHandle]) -> None:
    recording, started, rank = stubborn_job
    job_control.request_stop(str(recording))
    wait_for(lambda: not started.is_alive())
    assert not rank.is_alive()
    assert signals_sent(recording) == ["SIGINT", "SIGTERM", "SIGKILL"]
    assert [event["rank"] for event in read_node_events(recording, "rank_gone")] == [0]


def test_stopping_without_an_agent(stubborn_job: tuple[Path, ProcessHandle, ProcessHandle]) -> None:
    recording, started, rank = stubborn_job
    os.kill(started.pid, signal.SIGKILL)
    wait_for(lambda: not job_control.is_sampler_alive(str(recording)))
    facts = job_control.read_facts(str(recording))
    assert facts.job is not None
    root = facts.job
    job_control.request_stop(str(recording))  # the launcher is interrupted, its rank stays
    wait_for(lambda: not root.is_alive())
    assert rank.is_alive()
    assert job_control.is_job_alive(str(recording))
    job_control.request_stop(str(recording))  # terminated: ignored
    assert rank.is_alive()
    job_control.request_stop(str(recording))
    wait_for(lambda: not rank.is_alive())
    assert not job_control.is_job_alive(str(recording))


def test_nothing_to_stop(tmp_path: Path) -> None:
    with pytest.raises(job_control.JobUnreachable, match="does not say that it was started"):
        job_control.request_stop(str(tmp_path))
    assert not job_control.is_sampler_alive(str(tmp_path))
    assert not job_control.is_job_alive(str(tmp_path / "nowhere"))


def test_in_the_foreground_sent_signals_reach_the_job_once(tmp_path: Path) -> None:
    names = "SIGINT,SIGTERM,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
    command = [*AGENT, "--foreground", str(tmp_path), "--", *build_listener(names, "SIGTERM")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for name in ("SIGUSR1", "SIGHUP", "SIGUSR2", "SIGQUIT", "SIGINT", "SIGTERM"):
            process.send_signal(getattr(signal, name))
            assert process.stdout.readline() == f"{name}\n"
        assert process.stdout.read() == ""
        assert process.wait(60) == 9


def test_a_signal_that_the_caller_ignores_reaches_a_handler_of_the_job(tmp_path: Path) -> None:
    """As without zerotop: ignoring is inherited, and the job may set a handler all the same."""
    command = [*AGENT, "--foreground", str(tmp_path), "--", *build_listener("SIGHUP,SIGINT,SIGTERM", "SIGTERM")]
    script = "trap '' HUP INT; exec \"$@\""
    with subprocess.Popen(["bash", "-c", script, "_", *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for name in ("SIGHUP", "SIGINT", "SIGTERM"):
            process.send_signal(getattr(signal, name))
            assert process.stdout.readline() == f"{name}\n"
        assert process.wait(60) == 9


def test_in_the_foreground_a_stop_request_spares_the_callers_group(tmp_path: Path) -> None:
    """The job shares its process group with us and whoever called us; only the job is meant."""
    command = [*AGENT, "--foreground", str(tmp_path), "--", *build_listener("SIGINT", "SIGINT")]
    script = "trap 'echo caller interrupted' INT; \"$@\"; echo ended $?"
    with subprocess.Popen(["bash", "-c", script, "_", *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        job_control.request_stop(str(tmp_path))
        assert process.stdout.read() == "SIGINT\nended 9\n"


def test_a_hangup_that_the_caller_ignores_stays_ignored(tmp_path: Path) -> None:
    command = [
        *AGENT,
        "--foreground",
        str(tmp_path),
        "--",
        *build_python_command("import time; print('ready', flush=True); time.sleep(600)"),
    ]
    with subprocess.Popen(["nohup", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_a_key_at_the_terminal_interrupts_the_job_once(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole group from the terminal: passing it on as well would be a second one."""
    ours, theirs = pty.openpty()
    job = build_listener("SIGINT,SIGTERM", "SIGTERM")
    command = [*AGENT, "--foreground", str(tmp_path), "--", *job]
    take_terminal = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
    leader = [*build_python_command(take_terminal), *command]
    process = subprocess.Popen(leader, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""

    def shows_text(text: bytes) -> bool:
        nonlocal seen
        seen += os.read(ours, 1000)
        return text in seen

    wait_for(lambda: shows_text(b"ready\r\n"))
    os.write(ours, b"\x03")
    wait_for(lambda: shows_text(b"SIGINT"))
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: shows_text(b"SIGTERM"))
    assert process.wait(60) == 9
    assert seen.count(b"SIGINT") == 1
    assert join_output_bytes(tmp_path, "output") == b"ready\nSIGINT\nSIGTERM\n"
    os.close(ours)


def test_ranks_without_a_launcher_are_all_stopped(tmp_path: Path) -> None:
    """As srun leaves them on a node: the job was attached to, and none of its ranks is another's child."""
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_PORT": "29573"}
    ranks = [
        subprocess.Popen(build_listener("SIGINT", "SIGINT"), env=environment | {"RANK": str(number)}, stdout=subprocess.PIPE)
        for number in (0, 1)
    ]
    try:
        assert [rank.stdout is not None and rank.stdout.readline() for rank in ranks] == [b"ready\n"] * 2
        job = jobs.find_job(ranks[1].pid)
        assert job is not None
        recording = attaching.begin_recording(job, str(tmp_path / "recording"))
        sampler = agent.watch_in_background(recording)
        assert sampler is not None
        job_control.request_stop(recording)
        assert [rank.wait(30) for rank in ranks] == [9, 9]
        wait_for(lambda: not sampler.is_alive())
        assert signals_sent(Path(recording)) == ["SIGINT"]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
