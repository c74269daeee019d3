"""The job's output through a real agent: every byte is passed on and recorded, whatever readers do."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agents import AGENT, build_python_command, join_output_bytes, read_node_events, run_in_foreground, wait_for
from machine import small_disk
from terminals import Terminal
from zerotop_probe.outside.job import agent


def run_python_code(recording: Path, code: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return run_in_foreground(recording, *build_python_command(code), **options)


def test_streams_apart_and_byte_exact(tmp_path: Path) -> None:
    code = """
import os, sys
for i in range(300):
    os.write(1, bytes(range(256)) + b"\\r%d%%" % i)
    os.write(2, b"\\x1b[31mwarning %d\\x1b[0m [red]\\xff\\n" % i)
"""
    done = run_python_code(tmp_path, code, capture_output=True)
    assert done.returncode == 0
    assert done.stdout == b"".join(bytes(range(256)) + b"\r%d%%" % i for i in range(300))
    assert done.stderr == b"".join(b"\x1b[31mwarning %d\x1b[0m [red]\xff\n" % i for i in range(300))
    assert join_output_bytes(tmp_path, "stdout") == done.stdout
    assert join_output_bytes(tmp_path, "stderr") == done.stderr
    assert join_output_bytes(tmp_path, "output") == b""


def test_one_file_for_both_keeps_their_order(tmp_path: Path) -> None:
    code = "import os\nfor i in range(500): os.write(1 + i % 2, b'line %d\\n' % i)"
    done = run_python_code(tmp_path, code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.stdout == b"".join(b"line %d\n" % i for i in range(500))
    assert join_output_bytes(tmp_path, "output") == done.stdout


def peak_kib_of_agent(recording: Path, megabytes: int) -> tuple[int, bytes]:
    """The agent's highest resident memory, and what it passed on."""
    recording.mkdir()
    code = f"import os\npiece = os.urandom(1 << 20)\nfor _ in range({megabytes}): os.write(1, piece)"
    script = (
        "import re, sys\nfrom zerotop_probe.outside.job.agent import run_in_foreground\n"
        f"run_in_foreground({str(recording)!r}, [sys.executable, '-c', {code!r}])\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60)
    return int(done.stderr), done.stdout


def test_fifty_megabytes_pass_through_little_memory(tmp_path: Path) -> None:
    little, _ = peak_kib_of_agent(tmp_path / "little", 1)
    much, output = peak_kib_of_agent(tmp_path / "much", 50)
    assert len(output) == 50 << 20
    assert hashlib.sha256(output).digest() == hashlib.sha256(join_output_bytes(tmp_path / "much", "stdout")).digest()
    assert much < little + (8 << 10)


@pytest.mark.parametrize(("size", "is_enlarged"), [(100, False), (8 << 20, True)])
def test_pipes_of_much_output_are_enlarged(tmp_path: Path, size: int, is_enlarged: bool) -> None:
    """Otherwise 200 MB take three times as long as without us; a job that prints little leaves its reader's pipe alone."""
    command = [*AGENT, "--foreground", str(tmp_path), "--", sys.executable, "-c", f"import os; os.write(1, bytes({size}))"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        before = fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ)
        assert len(process.stdout.read()) == size
        assert (fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ) > before) is is_enlarged
    assert join_output_bytes(tmp_path, "stdout") == bytes(size)


def test_a_closed_reader_ends_the_job_as_without_us(tmp_path: Path) -> None:
    """SIGPIPE comes at the first write after the reader has closed, as in a shell's pipeline."""
    code = "import signal, time; signal.signal(13, 0)\nfor i in range(100): print('word', i, flush=True); time.sleep(0.2)"
    command = [*AGENT, "--foreground", str(tmp_path), "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"word 0\n"
        process.stdout.close()
        assert process.wait(10) == -signal.SIGPIPE
    assert len(join_output_bytes(tmp_path, "stdout").splitlines()) < 10
    assert read_node_events(tmp_path, "job_ended")[0]["signal"] == "SIGPIPE"


def test_a_slow_reader_slows_the_job_as_a_pipe_does(tmp_path: Path) -> None:
    """Nobody reads: the job waits in a write, and no process holds what it has not written yet."""
    progress = tmp_path / "progress"
    recording = tmp_path / "recording"
    recording.mkdir()
    code = f"""
import os
for i in range(1024): os.write(1, b"y" * (1 << 16)); open({str(progress)!r}, "w").write(str(i + 1))
"""
    command = [*AGENT, "--foreground", str(recording), "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        wait_for(progress.exists)
        written, since_s = "", time.monotonic()
        while time.monotonic() - since_s < 1.0 or not written:  # until the job waits
            if (now := progress.read_text()) != written:
                written, since_s = now, time.monotonic()
            time.sleep(0.02)
        assert int(written) < 16
        assert process.stdout.read() == b"y" * (64 << 20)
        assert process.wait(10) == 0
    assert len(join_output_bytes(recording, "stdout")) == 64 << 20


def test_the_end_is_recorded_while_the_last_output_waits_for_a_reader(tmp_path: Path) -> None:
    size = 1 << 18
    code = f"import os\nos.write(1, b'y' * {size})"
    command = [*AGENT, "--foreground", str(tmp_path), "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: read_node_events(tmp_path, "job_ended"))
        assert len(join_output_bytes(tmp_path, "stdout")) == size
        assert process.wait(10) == 0, "a reader that takes nothing is not waited for"
        assert process.stdout is not None
        assert process.stdout.read() == b"y" * size, "and gets its output all the same"


# Opens its output anew for every line, as programs do that log to a file called /dev/stderr.
REOPENER = "for i in range(10):\n    for name in 'stdout', 'stderr': open('/dev/' + name, 'w').write(f'{name} {i}\\n')"


def test_output_that_is_opened_anew_is_not_lost(tmp_path: Path) -> None:
    done = run_python_code(tmp_path, REOPENER, capture_output=True)
    assert done.stdout == join_output_bytes(tmp_path, "stdout") == b"".join(b"stdout %d\n" % i for i in range(10))
    assert done.stderr == join_output_bytes(tmp_path, "stderr") == b"".join(b"stderr %d\n" % i for i in range(10))


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_file_is_written_by_the_job_itself(tmp_path: Path, mode: str) -> None:
    """Appending, truncating, its position and errors are those of the file; what is added to it is recorded."""
    code = """
import os
os.write(1, b"one ")
os.write(2, str((os.lseek(1, 0, 1), os.fstat(1).st_ino, os.get_blocking(1))).encode())
os.write(1, b"two")
"""
    seen = []
    for ours in (False, True):
        path = tmp_path / f"{mode} {ours}"
        path.write_bytes(b"before ")
        with path.open(mode) as file:
            file.seek(0, 2)
            inode = os.fstat(file.fileno()).st_ino
            recording = tmp_path / "recording"
            recording.mkdir(exist_ok=True)
            command = [*AGENT, "--foreground", str(recording), "--"] if ours else []
            done = subprocess.run(
                [*command, *build_python_command(code)], stdout=file, stderr=subprocess.PIPE, check=True, timeout=60
            )
        seen.append((path.read_bytes(), done.stderr.replace(str(inode).encode(), b"")))
    assert seen[0] == seen[1]
    assert join_output_bytes(recording, "stdout") == b"one two"


def test_a_full_disk_of_the_output_fails_as_without_us(tmp_path: Path) -> None:
    code = (
        "import os\ntry:\n    while True: os.write(1, bytes(65536))\nexcept OSError as error: raise SystemExit(error.errno)"
    )
    with small_disk(tmp_path / "small", "256k") as disk, (disk / "output").open("wb") as file:
        assert run_python_code(tmp_path, code, stdout=file).returncode == errno.ENOSPC


def test_closed_descriptors_stay_closed(tmp_path: Path) -> None:
    code = "import os; print(sorted(os.listdir('/proc/self/fd')), file=open('seen', 'w'))"
    seen = []
    for wrapper in ([], [*AGENT, "--foreground", str(tmp_path), "--"]):
        command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *wrapper, *build_python_command(code)]
        assert subprocess.run(command, cwd=tmp_path, check=False, timeout=60).returncode == 0
        seen.append((tmp_path / "seen").read_text())
    assert seen[0] == seen[1]


@pytest.mark.parametrize("closed", [0, 1, 3])
def test_the_other_end_sees_what_the_job_closes(tmp_path: Path, closed: int) -> None:
    """Neither we nor the holder keep a pipe open that the job was given."""
    code = f"import os; os.close({closed}); os.read(4, 1)"
    recording = tmp_path / "recording"
    recording.mkdir()
    low = (*os.pipe(), *os.pipe())
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in low]
    for end in low:
        os.close(end)
    ours, theirs = ends[:2] if closed else ends[1::-1]
    stay, leave = ends[2:]
    shell = f'exec "$@" {closed}{">&" if closed else "<&"}{theirs} 4<&{stay} {theirs}>&- {stay}<&-'
    command = ["bash", "-c", shell, "bash", *AGENT, "--foreground", str(recording), "--", *build_python_command(code)]
    with subprocess.Popen(command, pass_fds=(theirs, stay), stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        os.close(stay)
        waiting = select.poll()
        waiting.register(ours, 0)
        assert waiting.poll(20_000), "its other end is still open"
        assert process.poll() is None
        os.write(leave, b"x")
        assert process.wait(20) == 0
    os.close(ours)
    os.close(leave)


def test_a_terminal_stays_a_terminal(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
def note(*_): os.write(1, f"{tuple(os.get_terminal_size(1))}\\n".encode())  # a print that interrupts one fails
note()
signal.signal(signal.SIGWINCH, note)
print(*map(os.isatty, (0, 1, 2)), "\\x1b[31mred\\x1b[0m", end="\\r\\n", flush=True)
while not os.path.exists("end"): time.sleep(0.05)
"""
    terminal = Terminal(
        [*AGENT, "--foreground", str(tmp_path), "--", *build_python_command(code)],
        environment=dict(os.environ),
        folder=tmp_path,
        rows=41,
        columns=123,
    )
    try:
        terminal.wait_for("(123, 41)", "True True True", "red\r\r\n")
        assert b"\x1b[31mred\x1b[0m\r\r\n" in terminal.drawn, "the user's terminal processes the output, once"
        fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 77, 0, 0))
        terminal.wait_for("(77, 10)")
        (tmp_path / "end").touch()
        assert terminal.exit_code() == 0
        assert b"True True True \x1b[31mred\x1b[0m\r\n" in join_output_bytes(tmp_path, "output")
    finally:
        terminal.close()


def has_new_holder(recording: Path, before: int) -> bool:
    return bool(read_node_events(recording, "output_holder")[-1]["pid"] != before)


def test_a_holder_that_is_killed_or_stopped_costs_no_byte(tmp_path: Path) -> None:
    count = 3000
    code = f"import time\nfor i in range({count}): print('line', i, flush=True); time.sleep(0.001)"
    command = [*AGENT, "--foreground", str(tmp_path), "--", *build_python_command(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"line 0\n"
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            pid = wait_for(lambda: read_node_events(tmp_path, "output_holder"))[-1]["pid"]
            os.kill(pid, number)
            if number == signal.SIGKILL:
                wait_for(partial(has_new_holder, tmp_path, pid))
        lines = process.stdout.read().splitlines()
        assert process.wait(20) == 0
    assert lines == [b"line %d" % i for i in range(1, count)]
    assert join_output_bytes(tmp_path, "stdout").splitlines()[1:] == lines


def test_output_is_recorded_after_the_sampler_was_killed_and_replaced(tmp_path: Path) -> None:
    flag = tmp_path / "go on"
    recording = tmp_path / "recording"
    recording.mkdir()
    code = f"""
import os, time
for i in range(100): print("first", i)
while not os.path.exists({str(flag)!r}): time.sleep(0.02)
for i in range(100): print("second", i)
while os.path.exists({str(flag)!r}): time.sleep(0.02)
"""
    first = agent.launch_in_background(str(recording), [sys.executable, "-c", code])
    wait_for(lambda: list(recording.glob("output-*.rec")) and b"first 99\n" in join_output_bytes(recording, "output"))
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: not first.is_alive())
    flag.touch()
    second = agent.watch_in_background(str(recording))
    assert second is not None
    expected = b"".join(b"%s %d\n" % (word, i) for word in (b"first", b"second") for i in range(100))

    wait_for(lambda: join_output_bytes(recording, "output") == expected)
    assert agent.watch_in_background(str(recording)) is None
    flag.unlink()
    wait_for(lambda: not second.is_alive())
    (end,) = read_node_events(recording, "job_ended")
    assert end["exit_code"] is None
    assert "not known" in str(end["text"])


def test_a_full_disk_costs_the_recording_not_the_job(tmp_path: Path) -> None:
    code = "import sys\nfor i in range(20000): print('a line of output', i)\nsys.exit(7)"
    with small_disk(tmp_path / "small", "256k") as recording:
        done = run_python_code(recording, code, capture_output=True)
        recorded = join_output_bytes(recording, "stdout")
        (ended,) = read_node_events(recording, "sampler_ended")
    assert done.returncode == 7
    assert done.stdout == b"".join(b"a line of output %d\n" % i for i in range(20000))
    assert recorded
    assert done.stdout.startswith(recorded[:4096])
    assert ended["lost_output_bytes"] == len(done.stdout) - len(recorded)


# Fills the disk of its recording, then has more ranks than one page of events can tell of (blind ones, at that).
FILLER = """
import glob, os, subprocess, sys, time
time.sleep(0.5)
with open(sys.argv[1], "wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)): pass
    except OSError: pass
command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
ranks = [subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "RANK": str(rank)}) for rank in range(16)]
time.sleep(1.5)  # samples are lost meanwhile
(told,), deadline = glob.glob(sys.argv[2]), time.monotonic() + 30
while time.monotonic() < deadline and (os.stat(told).st_size < 4096 or open(told).read().count('"rank_found"') < 16):
    time.sleep(0.1)
for rank in ranks: rank.communicate()
raise SystemExit(7)
"""


def test_the_end_and_what_was_lost_are_recorded_on_a_disk_that_others_have_filled(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "512k") as disk:
        recording = disk / "recording"
        recording.mkdir()
        done = run_in_foreground(
            recording, *build_python_command(FILLER), str(disk / "filler"), f"{recording}/events-node-*", capture_output=True
        )
        (file,) = recording.glob("events-node-*.jsonl")
        assert (done.returncode, done.stderr) == (7, b"")
        assert file.stat().st_size > 4096
        assert len(read_node_events(recording, "rank_found")) == 16
        assert [event["exit_code"] for event in read_node_events(recording, "job_ended")] == [7]
        assert read_node_events(recording, "sampler_ended")[0]["lost_records"] > 0
        assert [event["where"] for event in read_node_events(recording, "sampler_error")] == ["samples"]
        assert file.stat().st_blocks * 512 < file.stat().st_size + 4096, "what was kept and not needed is given back"


def test_recorded_output_is_redacted_on_request(tmp_path: Path) -> None:
    """Also a line that comes in two pieces, or never ends; the reader gets what the job printed."""
    (tmp_path / "session.json").write_text('{"redact_output": true}')
    code = """
import os, time
for piece in (b"start\\n--api-key 12", b"3456 end\\n", b"password: hunter22"):
    os.write(1, piece)
    time.sleep(0.05)
"""
    done = run_python_code(tmp_path, code, capture_output=True)
    assert done.stdout == b"start\n--api-key 123456 end\npassword: hunter22"
    assert join_output_bytes(tmp_path, "stdout") == b"start\n--api-key <redacted> end\npassword: <redacted>"
