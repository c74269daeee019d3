"""Launching and ending real jobs: exit codes, what a job gets from us, that it never depends on its agent."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zerotop_probe
from agents import (
    AGENT,
    build_python_command,
    join_output_bytes,
    read_node_events,
    read_node_records,
    run_in_foreground,
    wait_for,
)
from machine import run_in_cgroup, small_group
from zerotop_probe.outside import own_python
from zerotop_probe.outside.job import agent, job_control
from zerotop_probe.outside.job.job import CommandError
from zerotop_probe.outside.procfs import ProcessHandle

ENDS = [
    ("pass", 0, None, "The job ended with exit code 0."),
    ("raise SystemExit(3)", 3, None, "The job failed with exit code 3."),
    ("import ctypes; ctypes.string_at(0)", 139, "SIGSEGV", "The job was killed by signal 11 (SIGSEGV)."),
    ("import os; os.kill(os.getpid(), 9)", 137, "SIGKILL", "The job was killed by signal 9 (SIGKILL)."),
    ("raise SystemExit(143)", 143, None, "The job failed with exit code 143, as after SIGTERM."),
]


@pytest.mark.parametrize(("code", "exit_code", "signal_name", "text"), ENDS)
def test_how_a_job_ended(tmp_path: Path, code: str, exit_code: int, signal_name: str, text: str) -> None:
    done = run_in_foreground(tmp_path, *build_python_command(code), capture_output=True)
    assert done.returncode == (exit_code if signal_name is None else 128 - exit_code)
    (end,) = read_node_events(tmp_path, "job_ended")
    assert (end["exit_code"], end["signal"], end["oom_kills"], end["text"]) == (
        exit_code,
        signal_name,
        0,
        text,
    )
    assert 0 < end["seconds"] < 30
    assert [event["event"] for event in read_node_events(tmp_path)][-1] == "sampler_ended"


def test_a_job_starts_as_a_shell_would_start_it(tmp_path: Path) -> None:
    """Signals, limits, folder, input are the caller's, and so is the environment but for two variables."""
    code = """
import json, os, resource, signal, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
# Signals 32 and 33 are the C library's own, which sets them up when it needs them.
ignored = int(status["SigIgn"], 16) & ~(3 << 31)
print(json.dumps({
    "mask": status["SigBlk"].strip(), "ignored": ignored, "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "folder": os.getcwd(), "input": sys.stdin.read(), "arguments": sys.argv[1:], "group": os.getpgrp(),
    "open": sorted(os.listdir("/proc/self/fd")), "environment": dict(os.environ),
}))
"""
    recording = tmp_path / "recording"
    recording.mkdir()
    before = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        "HOME": "/",
    }
    arguments = [*build_python_command(code), "two words", "--", ""]
    options = {"input": b"typed", "cwd": tmp_path, "env": before, "stderr": subprocess.DEVNULL}
    plain = subprocess.run(arguments, stdout=subprocess.PIPE, check=True, **options)  # type: ignore[call-overload]
    ours = run_in_foreground(recording, *arguments, stdout=subprocess.PIPE, **options)
    expected, got = json.loads(plain.stdout), json.loads(ours.stdout)
    assert got.pop("environment") == {
        **expected.pop("environment"),
        "PYTHONPATH": os.path.dirname(zerotop_probe.__file__) + "/bootstrap" + os.pathsep + before["PYTHONPATH"],
        "PYTHONZEROTOP_SESSION": str(recording),
    }
    assert got == expected


def test_a_background_job_has_a_session_of_its_own_and_no_input(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getsid(0) == os.getpid() == os.getpgrp(), [sys.stdin.read()])"
    started = agent.launch_in_background(str(tmp_path), build_python_command(code))
    wait_for(lambda: not started.is_alive())
    assert join_output_bytes(tmp_path, "output") == b"True ['']\n"


def test_killing_the_agent_leaves_the_job_to_a_good_end(tmp_path: Path) -> None:
    recording, flag, result = tmp_path / "recording", tmp_path / "flag", tmp_path / "result"
    recording.mkdir()
    code = f"""
import os, time
while not os.path.exists({str(flag)!r}): time.sleep(0.02); print("word " * 1000)
open({str(result)!r}, "w").write("done")
"""
    started = agent.launch_in_background(str(recording), build_python_command(code))
    assert job_control.is_sampler_alive(str(recording))
    os.kill(started.pid, signal.SIGKILL)
    wait_for(lambda: not job_control.is_sampler_alive(str(recording)))
    assert job_control.is_job_alive(str(recording))
    flag.touch()
    wait_for(lambda: not job_control.is_job_alive(str(recording)))
    assert result.read_text() == "done"


def test_removing_the_recording_does_not_harm_the_job(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    recording.mkdir()
    code = f"""
import os, shutil, time
while len(os.listdir({str(recording)!r})) < 4: time.sleep(0.02)
shutil.rmtree({str(recording)!r})
for i in range(10): print(i); time.sleep(0.05)
"""
    done = run_in_foreground(recording, *build_python_command(code), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"".join(b"%d\n" % i for i in range(10))


def test_a_recording_that_cannot_be_written_does_not_harm_the_job(tmp_path: Path) -> None:
    """A file stands where the directory should be: not even root can write into it."""
    nowhere = tmp_path / "file"
    nowhere.touch()
    done = run_in_foreground(nowhere, *build_python_command("print('word'); raise SystemExit(5)"), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (5, b"word\n", b"")


@pytest.fixture
def not_a_program(tmp_path: Path) -> Path:
    path = tmp_path / "prose"
    path.write_text("This is a letter, not a program.\n")
    path.chmod(0o755)
    return path


def test_a_command_that_cannot_be_executed(tmp_path: Path, not_a_program: Path) -> None:
    recording = tmp_path / "recording"
    recording.mkdir()
    plain = tmp_path / "train.py"
    plain.touch()
    cases = {
        "no-such-command": (errno.ENOENT, "There is no command 'no-such-command' on the PATH"),
        str(tmp_path / "gone"): (errno.ENOENT, f"There is no command '{tmp_path}/gone'"),
        str(plain): (errno.EACCES, f"'{plain}' is not executable: run it as python {plain}, or chmod +x it"),
        str(recording): (errno.EISDIR, f"'{recording}' is a directory, not a command"),
        str(not_a_program): (
            errno.ENOEXEC,
            f"'{not_a_program}' is neither a program nor a script that begins with #!",
        ),
    }
    for command, (number, sentence) in cases.items():
        for launch in (agent.launch_in_background, agent.run_in_foreground):
            with pytest.raises(CommandError) as caught:
                launch(str(recording), [command])
            assert (caught.value.errno, str(caught.value)) == (number, sentence)
        done = run_in_foreground(recording, command, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (1, b"", f"{sentence}\n".encode())
    assert list(recording.iterdir()) == []


def test_the_callers_signal_mask_comes_back(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(CommandError):
        agent.run_in_foreground(str(tmp_path), ["no-such-command"])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_modules_of_the_working_directory_are_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("psutil", "pynvml", "argparse", "zerotop_probe", "probe"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    recording = tmp_path / "recording"
    recording.mkdir()
    monkeypatch.chdir(tmp_path)
    started = agent.launch_in_background(str(recording), ["true"])
    wait_for(lambda: not started.is_alive())
    assert read_node_events(recording, "job_ended")[0]["exit_code"] == 0


def test_an_agent_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "raise ImportError('this pynvml is broken')  # instead of {module}"
    monkeypatch.setattr(own_python, "BOOT_CODE", code)
    with pytest.raises(agent.AgentError, match="this pynvml is broken"):
        agent.launch_in_background(str(tmp_path), ["true"])


def test_a_signal_never_reaches_a_process_that_reused_the_pid() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        real = ProcessHandle.from_pid(child.pid)
        assert real is not None
        assert not ProcessHandle(real.pid, real.start - 1).send_signal(signal.SIGKILL)
        assert child.poll() is None
        assert real.send_signal(signal.SIGKILL)
        assert child.wait(10) == -9
    assert not real.is_alive()
    assert not real.send_signal(signal.SIGKILL)


def test_the_limit_of_open_files_is_raised_for_us_only(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))
from zerotop_probe.outside.job.agent import run_in_foreground
run_in_foreground({str(tmp_path)!r}, ["sh", "-c", "ulimit -Sn"])
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], file=sys.stderr)
"""
    done = subprocess.run(build_python_command(code), capture_output=True, check=True, timeout=30)
    assert (done.stdout, done.stderr) == (b"100\n", f"{hard}\n".encode())


def test_a_job_that_the_kernel_kills_for_memory(tmp_path: Path) -> None:
    job = build_python_command("import time; time.sleep(0.7); held = bytearray(300 << 20)")
    with small_group(96 << 20) as group:
        command = run_in_cgroup(group, *AGENT, "--foreground", str(tmp_path), "--", *job)
        done = subprocess.run(command, check=False, timeout=60, stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    (end,) = read_node_events(tmp_path, "job_ended")
    assert end["oom_kills"] == 1
    assert end["text"] == (
        "The job was killed by signal 9 (SIGKILL); the kernel's OOM killer ended 1 process of its control group."
    )
    rows = read_node_records(tmp_path, "hosts")
    assert set(rows["cgroup_limit_bytes"].tolist()) == {96 << 20}
    assert ((rows["cgroup_used_bytes"] > 0) & (rows["cgroup_used_bytes"] <= 96 << 20)).all()
    assert rows["cgroup_oom_kills"][0] == 0


def test_watching_a_job_that_somebody_else_started(tmp_path: Path) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with subprocess.Popen(["sleep", "1"]) as child:
        assert agent.watch_job(str(tmp_path), child.pid).exit_code is None
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    names = {event["event"] for event in read_node_events(tmp_path)}
    assert names == {"node", "affinity", "job_ended", "sampler_ended"}
    assert len(read_node_records(tmp_path, "processes")) > 5
    with pytest.raises(ProcessLookupError, match="There is no process"):
        agent.watch_job(str(tmp_path), child.pid)


def test_nothing_stays_open_in_the_caller(tmp_path: Path) -> None:
    code = f"""
import os, sys
from zerotop_probe.outside.job import agent
def opened(): return len(os.listdir("/proc/self/fd"))
before = opened()
for command in (["true"], ["false"], ["no-such-command"], [{str(tmp_path)!r}]):
    try: print(agent.run_in_foreground({str(tmp_path)!r}, command).exit_code, file=sys.stderr)
    except OSError: pass
assert opened() == before, os.system("ls -l /proc/%d/fd >&2" % os.getpid())
"""
    done = subprocess.run(build_python_command(code), capture_output=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, b"0\n1\n")
