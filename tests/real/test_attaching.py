"""Attaching to any Python from outside: which job is meant, its recording's begin and end, and why it cannot be entered."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import zerotop_probe
from agents import wait_for
from machine import small_disk
from programs import ZEROTOP, make_environment, run_zerotop, start_on_terminal
from zerotop_probe.outside.attaching import attaching, jobs, payload
from zerotop_probe.outside.attaching.injector import State, plant_code
from zerotop_probe.outside.attaching.probe_entry import enter_processes
from zerotop_probe.outside.attaching.python_process import REMOTE_EXEC_VERSION, Target, examine_process
from zerotop_probe.outside.job import job_control
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording import events
from zerotop_probe.recording.writer import EventWriter, Identity

NOBODY = 65534
BUSY = "import sys, time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"
# Refuses ptrace(2) with EPERM from now on, as the default sandbox of containers does.
SANDBOX = """
import ctypes, platform, struct
number = {"x86_64": 101, "aarch64": 117}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
filters = b"".join(struct.pack("HBBI", *each) for each in (
    (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)))
code = ctypes.create_string_buffer(filters)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.c_void_p)]
program = Program(4, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program)) == 0
"""
ENTER = """
import sys
from zerotop_probe.outside.attaching.probe_entry import enter_processes
from zerotop_probe.outside.procfs import ProcessHandle
for entry in enter_processes(filter(None, [ProcessHandle.from_pid(int(sys.argv[1]))]), sys.argv[2]):
    print(entry.why_not)
"""

Job = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start_job() -> Iterator[Job]:
    """Starts a Python that is at work; ended at the end of the test."""
    jobs: list[subprocess.Popen[bytes]] = []

    def begin_job(before: str = "", *, python: str = sys.executable, **options: Any) -> subprocess.Popen[bytes]:
        command = [python, "-c", f"{before}\n{BUSY}"]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, **options))
        output = jobs[-1].stdout
        assert output is not None
        assert output.readline() == b"ready\n"
        return jobs[-1]

    yield begin_job
    for one in jobs:
        one.kill()
        one.communicate()


def list_recordings(state: Path) -> list[tuple[str, str]]:
    """(name, state) of each recording."""
    return [(row["name"], row["state"]) for row in json.loads(run_zerotop(state, "recordings", "--json").stdout)]


def attach_headless(state: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """``zerotop attach`` without a screen, and the name of the recording that it records in."""
    attached = subprocess.Popen(
        [*ZEROTOP, "attach", *arguments, "--headless"], env=make_environment(state), stderr=subprocess.PIPE, text=True
    )
    assert attached.stderr is not None
    first_line = attached.stderr.readline()
    assert first_line.startswith("zerotop: recording in ")
    return attached, first_line.strip().rpartition("/")[2]


def state_of(process: subprocess.Popen[bytes]) -> str:
    """One letter, see proc(5)."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def why_not(process: subprocess.Popen[bytes], recording: Path, *, patience_s: float = 1.0) -> str:
    """Why it cannot be entered."""
    target = ProcessHandle.from_pid(process.pid)
    assert target is not None
    (entry,) = enter_processes([target], str(recording), patience_s=patience_s)
    assert entry.reply in ("", "early")
    return entry.why_not


def test_a_recording_from_outside_ends_with_detach_and_can_be_taken_up(start_job: Job, tmp_path: Path) -> None:
    process = start_job()
    attached, name = attach_headless(tmp_path, str(process.pid))
    assert list_recordings(tmp_path) == [(name, "live")]
    for called in (str(process.pid), name):
        done = run_zerotop(tmp_path, "detach", called)
        assert done.returncode == 0, done.stderr
        assert f"Recorded in {tmp_path}" in done.stdout.decode()
        _, said = attached.communicate(timeout=30)
        assert (attached.returncode, said) == (0, "")
        assert list_recordings(tmp_path) == [(name, "ended")]
        assert f"{name}  detached" in run_zerotop(tmp_path, "recordings").stdout.decode()
        assert process.poll() is None
        attached, again = attach_headless(tmp_path, name)
        assert again == name
        assert list_recordings(tmp_path) == [(name, "live")]
    attached.send_signal(signal.SIGINT)
    _, said = attached.communicate(timeout=30)
    assert "The job and its recording continue." in said
    assert job_control.is_sampler_alive(str(tmp_path / "zerotop" / "sessions" / name))
    process.kill()
    wait_for(lambda: list_recordings(tmp_path) == [(name, "ended")])
    assert run_zerotop(tmp_path, "attach", name, "--headless").stderr.decode() == (
        f"zerotop: The job of {name} has ended; watch the recording with: zerotop replay {name}\n"
    )


@pytest.mark.parametrize(("size", "existed"), [("4k", False), ("8k", False), ("8k", True)])
def test_where_nothing_can_be_recorded_nothing_is_left(start_job: Job, tmp_path: Path, size: str, existed: bool) -> None:
    """On a full disk, and on one with room for the recording's own file and no event."""
    with small_disk(tmp_path / "disk", size) as disk:
        (disk / "filler").write_bytes(bytes(4096))
        if existed:
            (disk / "s").mkdir()
        done = run_zerotop(tmp_path, "attach", str(start_job().pid), "--headless", "--recording", str(disk / "s"))
        said = f"zerotop: Cannot record to {disk}/s: No space left on device. Choose another folder with --recording DIR\n"
        assert (done.returncode, done.stderr.decode()) == (1, said)
        assert (disk / "s").exists() == existed
        assert [path for path in disk.rglob("*") if path.is_file()] == [disk / "filler"]


def test_one_that_was_seen_from_outside_only_is_left_alone(start_job: Job, tmp_path: Path) -> None:
    process = start_job("import time; print('ready', flush=True); time.sleep(600)")
    attached, name = attach_headless(tmp_path, str(process.pid))
    done = run_zerotop(tmp_path, "detach", name)
    assert done.stdout.decode() == f"Recorded in {tmp_path}/zerotop/sessions/{name}\n"
    attached.communicate(timeout=30)


@pytest.mark.parametrize("trace", ["", "events", "unanswered", "pending"])
def test_one_that_was_asked_to_take_the_probe_in_is_asked_to_let_it_go(tmp_path: Path, trace: str) -> None:
    process = ProcessHandle(2**22 + 1, 1)
    if trace == "events":
        EventWriter(str(tmp_path), Identity.for_this_process("rank", 0)._replace(pid=process.pid)).close()
    elif trace == "unanswered":
        Path(payload.answer_path(str(tmp_path), process)).touch()
    elif trace == "pending":
        writer = EventWriter(str(tmp_path), Identity.for_this_process("control"))
        writer.write(time.monotonic_ns(), events.NotEntered, rank=0, pid=process.pid, why="", pending=True)
        writer.close()
    facts = job_control.read_facts(str(tmp_path))
    assert attaching.may_hold_probe(str(tmp_path), facts, process.pid) == bool(trace)
    assert not attaching.may_hold_probe(str(tmp_path), facts, process.pid + 1)


def test_the_sampler_ends_when_its_recording_was_removed(start_job: Job, tmp_path: Path) -> None:
    process = start_job()
    attached, name = attach_headless(tmp_path, str(process.pid))
    recording = tmp_path / "zerotop" / "sessions" / name
    (sampler,) = job_control.read_facts(str(recording)).samplers
    shutil.rmtree(recording)
    wait_for(lambda: not sampler.is_alive())
    attached.communicate(timeout=30)
    assert process.poll() is None


@pytest.mark.parametrize(
    "damaged", ["a pipe", "[" * 100_000, '{"zero_optimization": {"stage": 2}}'], ids=["pipe", "deep", "whole"]
)
def test_a_configuration_is_read_whatever_it_is(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "ds.json"
    if damaged == "a pipe":
        os.mkfifo(path)
    else:
        path.write_text(damaged)
    command = [sys.executable, "-c", BUSY, "--deepspeed", "ds.json"]
    # In a process group of its own: in one with the other worker's jobs it could be taken for a rank of theirs.
    variables = {**os.environ, "RANK": "0"}
    with subprocess.Popen(command, cwd=tmp_path, env=variables, start_new_session=True) as process:
        try:
            job = wait_for(lambda: jobs.find_job(process.pid))
            assert jobs.read_zero_stage(job) == (2 if damaged.startswith("{") else None)
        finally:
            process.kill()


def test_the_order_of_attaching_and_detaching_is_that_of_time(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    recording.mkdir()
    write = (
        "import sys, time\nfrom zerotop_probe.recording.writer import EventWriter, Identity\n"
        "who = Identity.for_this_process('control')._replace(pid=int(sys.argv[2]))\n"
        "EventWriter(sys.argv[1], who).write(time.monotonic_ns(), sys.argv[3])"
    )
    for pid, event in ((9, "attached"), (1, "detached")):
        subprocess.run([sys.executable, "-c", write, str(recording), str(pid), event], check=True)
    assert job_control.read_facts(str(recording)).detached
    subprocess.run([sys.executable, "-c", write, str(recording), "5", "attached"], check=True)
    assert not job_control.read_facts(str(recording)).detached


def test_entering_from_the_screen(start_job: Job, tmp_path: Path) -> None:
    process = start_job()
    terminal = start_on_terminal(tmp_path, "attach", str(process.pid))
    try:
        terminal.wait_for("E enter ranks")
        terminal.type_keys("E")
        terminal.wait_for(f"Process {process.pid} is not entered: it has not imported PyTorch yet. Try again")
        terminal.type_keys("q")
        terminal.wait_for("Detach")
        terminal.type_keys("d")
        assert terminal.exit_code() == 0
    finally:
        terminal.close()
    ((name, state),) = list_recordings(tmp_path)
    assert state == "live"
    assert run_zerotop(tmp_path, "detach", name).returncode == 0
    assert process.poll() is None


@pytest.mark.parametrize("command", ["attach", "detach"])
@pytest.mark.parametrize("number", ["gone", "0", "99999999999999999999"])
def test_a_number_that_is_no_process(tmp_path: Path, number: str, command: str) -> None:
    if number == "gone":
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            number = str(process.pid)
    options = ["--headless"] if command == "attach" else []
    done = run_zerotop(tmp_path, command, number, *options)
    assert done.returncode == 2
    words = "is not a Python process of a job here" if command == "attach" else f"PID {number} is not being recorded"
    assert words in done.stderr.decode()
    assert list_recordings(tmp_path) == []


def test_without_a_terminal_nothing_is_begun(start_job: Job, tmp_path: Path) -> None:
    done = run_zerotop(tmp_path, "attach", str(start_job().pid))
    assert done.returncode == 1
    assert done.stderr == b"zerotop: The live screen needs a terminal; --headless records without one\n"
    assert list_recordings(tmp_path) == []


def test_a_python_without_pytorch_is_not_entered_yet(start_job: Job, tmp_path: Path) -> None:
    assert "has not imported PyTorch yet" in why_not(start_job(), tmp_path, patience_s=30.0)
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_recorded_elsewhere(start_job: Job, tmp_path: Path) -> None:
    first, second = tmp_path / "the first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    process = start_job(
        f"from zerotop_probe.inside.hooks.hook_installer import PROBE\nPROBE.start_recording({str(first)!r})"
    )
    target = ProcessHandle.from_pid(process.pid)
    assert target is not None
    (entry,) = enter_processes([target], str(second))
    assert entry.why_not == f"it is already recorded in {first}. End that with zerotop detach '{first}'"
    (tmp_path / "link").symlink_to(first)
    (entry,) = enter_processes([target], str(tmp_path / "link"))
    assert entry.why_not == ""


def test_another_tracer(start_job: Job, tmp_path: Path) -> None:
    process = start_job()
    hold = "import sys\nfrom zerotop_probe.outside.attaching.ptrace.tracing import _call_ptrace\n"
    hold += "_call_ptrace(0x4206, int(sys.argv[1]))\n"
    with subprocess.Popen([sys.executable, "-c", hold + BUSY, str(process.pid)], stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        tracer.stdout.readline()
        reason = why_not(process, tmp_path)
        tracer.kill()
    assert f"Process {process.pid} is already traced by python" in reason
    assert f"process {tracer.pid})" in reason
    assert "has not imported PyTorch" in why_not(process, tmp_path, patience_s=30.0)


def test_a_tracer_that_leaves_is_waited_for(start_job: Job, tmp_path: Path) -> None:
    process = start_job()
    hold = "import sys, time\nfrom zerotop_probe.outside.attaching.ptrace.tracing import _call_ptrace\n"
    hold += "_call_ptrace(0x4206, int(sys.argv[1]))\nprint(flush=True)\ntime.sleep(1)\n"
    with subprocess.Popen([sys.executable, "-c", hold, str(process.pid)], stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        tracer.stdout.readline()
        assert "has not imported PyTorch" in why_not(process, tmp_path, patience_s=30.0)


def test_a_stopped_process(start_job: Job, tmp_path: Path) -> None:
    process = start_job()
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: state_of(process) == "T")
    assert f"kill -CONT {process.pid}" in why_not(process, tmp_path)


def stopped_s(target: Target) -> float:
    """How long it is held to be given something to do, which it has done then."""
    planted = plant_code(target, "pass")
    wait_for(lambda: planted.read_state() is State.DONE)
    return planted.stopped_s


@pytest.mark.skipif(sys.version_info >= REMOTE_EXEC_VERSION, reason="this Python is asked, and not stopped")
@pytest.mark.alone
def test_a_thread_of_ours_that_computes_prolongs_no_stop(start_job: Job) -> None:
    process = ProcessHandle.from_pid(start_job().pid)
    assert process is not None
    target, over, turn_s = examine_process(process), threading.Event(), sys.getswitchinterval()

    def keep_busy() -> None:
        while not over.is_set():
            sum(range(1000))

    with ThreadPoolExecutor() as threads:
        threads.submit(keep_busy)
        # Long, so that a turn of that thread in the middle of a stop can be told from other programs' turns.
        sys.setswitchinterval(0.06)
        try:
            stops = [stopped_s(target) for _ in range(7)]
        finally:
            sys.setswitchinterval(turn_s)
            over.set()
    # A turn would come in every one of them; the longest may be other programs' doing.
    assert median(stops) < 0.045


def test_a_main_thread_in_a_long_call_is_asked_and_not_waited_for(start_job: Job, tmp_path: Path) -> None:
    process = start_job("import time\nprint('ready', flush=True)\ntime.sleep(5)")
    wait_for(lambda: state_of(process) == "S")
    reason = why_not(process, tmp_path)
    assert "has not answered for 1 s: it is in one C call" in reason
    assert f"py-spy dump --pid {process.pid}" in reason
    assert process.poll() is None


@pytest.mark.skipif(sys.version_info >= REMOTE_EXEC_VERSION, reason="asked, and not held")
def test_a_python_that_starts_is_not_harmed(tmp_path: Path) -> None:
    """Half an interpreter crashes where it runs a text, and a text that imports breaks the import that it interrupts."""
    what = [sys.executable, "-c", "import argparse, decimal, json, logging"]
    refused: set[str] = set()
    for number in range(60):
        with subprocess.Popen(what, stderr=subprocess.PIPE) as process:
            time.sleep(number / 1000)
            target = ProcessHandle.from_pid(process.pid)
            if target is not None:
                refused |= {
                    entry.why_not.replace(str(process.pid), "N") for entry in enter_processes([target], str(tmp_path))
                }
            assert process.communicate(timeout=20)[1] == b"", number
            assert process.returncode == 0, number
    assert "The Python of process N is starting or exiting. Try again when it trains." in refused


def test_one_that_imports_without_end_is_entered_in_between(start_job: Job, tmp_path: Path) -> None:
    process = start_job(
        "import importlib, json, select, signal, sys, time\n"
        "def imports():\n"
        "    for name in ('json', 'json.decoder', 'json.scanner', 'json.encoder'):\n"
        "        del sys.modules[name]\n"
        "    importlib.import_module('json')\n"
        "print('ready', flush=True)\n"
        "while not select.select([sys.stdin], [], [], 0)[0]:\n"
        "    imports(), sum(range(60000))\n"
        "sys.exit(7)",
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    target = ProcessHandle.from_pid(process.pid)
    assert target is not None
    reasons = [entry.why_not for _ in range(10) for entry in enter_processes([target], str(tmp_path), patience_s=1.0)]
    assert not any("failed" in reason for reason in reasons)
    assert "it has not imported PyTorch yet. Try again when it trains" in reasons
    assert process.communicate(b"end\n", timeout=60)[1] == b""
    assert process.returncode == 7


def test_a_program_that_is_no_python(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        reason = why_not(process, tmp_path)
        process.kill()
    assert "exports no functions of CPython" in reason


def test_the_sandbox_of_a_container(start_job: Job, tmp_path: Path) -> None:
    process = start_job()
    done = subprocess.run(
        [sys.executable, "-c", SANDBOX + ENTER, str(process.pid), str(tmp_path)], check=True, capture_output=True, text=True
    )
    if sys.version_info >= REMOTE_EXEC_VERSION:  # that takes no tracing
        assert done.stdout == "it has not imported PyTorch yet. Try again when it trains\n"
    elif Path("/proc/sys/kernel/yama/ptrace_scope").exists():
        assert "yama.ptrace_scope" in done.stdout or "--cap-add SYS_PTRACE" in done.stdout
    else:
        assert "--cap-add SYS_PTRACE" in done.stdout


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


class Stranger:
    """A user without rights, who has a copy of the probe and a Python that he may run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(Path(zerotop_probe.__file__).parent, folder / "zerotop_probe")
        folder.chmod(0o755)
        self.options: dict[str, Any] = {"user": NOBODY, "cwd": "/", "env": {"PYTHONPATH": str(folder)}}
        self.python = next(filter(self._can_run, ("/usr/bin/python3", sys.executable)), "")

    def _can_run(self, python: str) -> bool:
        try:
            done = subprocess.run([python, "-c", ENTER, "0", "/"], check=False, capture_output=True, **self.options)
        except OSError:
            return False
        return done.returncode == 0

    def ask_to_enter(self, pid: int) -> str:
        """Try to enter the process as this user; return the answer."""
        command = [self.python, "-c", ENTER, str(pid), str(self._folder)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, **self.options)
        return str(done.stdout)


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    with tempfile.TemporaryDirectory() as folder:
        stranger_user = Stranger(Path(folder))
        if not stranger_user.python:
            pytest.skip("another user can run no Python here")
        yield stranger_user


@needs_root
def test_another_user_s_process(start_job: Job, stranger: Stranger) -> None:
    pid = start_job().pid
    assert stranger.ask_to_enter(pid) == f"Process {pid} belongs to another user. Run zerotop as that user or as root.\n"


@needs_root
def test_a_process_that_may_not_be_traced(start_job: Job, stranger: Stranger) -> None:
    forbid = "import ctypes; assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0"
    pid = start_job(forbid, python=stranger.python, **stranger.options).pid
    assert f"process {pid}, which is not dumpable" in stranger.ask_to_enter(pid)


LIMITS = {
    "file": ("resource.setrlimit(resource.RLIMIT_FSIZE, (0, -1)); signal.signal(25, signal.SIG_DFL)", "at most 0 KiB"),
    "address space": ("resource.setrlimit(resource.RLIMIT_AS, (1 << 20, -1))", "may map only 0 MiB more memory"),
    "descriptors": ("resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')), 999))", "files open"),
    "sandbox": (SANDBOX, "restricts its system calls"),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_a_process_that_the_probe_would_end(start_job: Job, tmp_path: Path, limit: str) -> None:
    before, sentence = LIMITS[limit]
    process = start_job("import os, resource, signal\n" + before)
    assert sentence in why_not(process, tmp_path)
    assert process.poll() is None


@pytest.mark.parametrize("handling", ["signal.SIG_IGN", "lambda *_: None"])
def test_a_process_that_expects_the_limit_of_files_is_entered(start_job: Job, tmp_path: Path, handling: str) -> None:
    process = start_job(
        "import resource, signal\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (0, -1)); signal.signal(signal.SIGXFSZ, {handling})"
    )
    assert "ulimit" not in why_not(process, tmp_path)
    assert process.poll() is None


@needs_root
def test_a_container_with_process_numbers_of_its_own(tmp_path: Path) -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as outer:
        assert outer.stdout is not None
        if outer.stdout.readline() != b"ready\n":
            pytest.skip("no namespaces of process numbers can be made here")
        (inner,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        process = ProcessHandle.from_pid(int(inner))
        assert process is not None
        (entry,) = enter_processes([process], str(tmp_path))
        outer.kill()
    assert "runs in a container with its own pids and files. Run zerotop inside it" in entry.why_not
