"""The job's output through a real agent: every byte is passed on and recorded, whatever readers do."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from agents import AGENT, events, in_foreground, python, recorded, wait_for
from machine import small_disk
from zerotop_probe.outside.job import agent
from zerotop_probe.recording import clock


def foreground(session: Path, code: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return in_foreground(session, *python(code), **options)


def test_streams_apart_and_byte_exact(tmp_path: Path) -> None:
    code = """
import os, sys
for i in range(300):
    os.write(1, bytes(range(256)) + b"\\r%d%%" % i)
    os.write(2, b"\\x1b[31mwarning %d\\x1b[0m [red]\\xff\\n" % i)
"""
    done = foreground(tmp_path, code, capture_output=True)
    assert done.returncode == 0
    assert done.stdout == b"".join(bytes(range(256)) + b"\r%d%%" % i for i in range(300))
    assert done.stderr == b"".join(b"\x1b[31mwarning %d\x1b[0m [red]\xff\n" % i for i in range(300))
    assert recorded(tmp_path, "stdout") == done.stdout
    assert recorded(tmp_path, "stderr") == done.stderr
    assert recorded(tmp_path, "output") == b""


def test_one_file_for_both_keeps_their_order(tmp_path: Path) -> None:
    code = "import os\nfor i in range(500): os.write(1 + i % 2, b'line %d\\n' % i)"
    done = foreground(tmp_path, code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.stdout == b"".join(b"line %d\n" % i for i in range(500))
    assert recorded(tmp_path, "output") == done.stdout


def peak_kib_of_agent(session: Path, megabytes: int) -> tuple[int, bytes]:
    """The agent's highest resident memory, and what it passed on."""
    session.mkdir()
    code = f"import os\npiece = os.urandom(1 << 20)\nfor _ in range({megabytes}): os.write(1, piece)"
    script = (
        "import re, sys\nfrom zerotop_probe.outside.job.agent import run_in_foreground\n"
        f"run_in_foreground({str(session)!r}, [sys.executable, '-c', {code!r}])\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60)
    return int(done.stderr), done.stdout


def test_fifty_megabytes_pass_through_little_memory(tmp_path: Path) -> None:
    little, _ = peak_kib_of_agent(tmp_path / "little", 1)
    much, output = peak_kib_of_agent(tmp_path / "much", 50)
    assert len(output) == 50 << 20
    assert hashlib.sha256(output).digest() == hashlib.sha256(recorded(tmp_path / "much", "stdout")).digest()
    assert much < little + (8 << 10)


def test_memory_of_copied_output_is_given_back(tmp_path: Path) -> None:
    """The job asks what its own output occupies, once the agent has had time to copy it."""
    code = """
import os, time
for _ in range(20): os.write(1, b"x" * (1 << 20))
deadline = time.monotonic() + 20
while os.fstat(1).st_blocks * 512 > 1 << 20 and time.monotonic() < deadline: time.sleep(0.05)
os.write(2, b"%d %d" % (os.fstat(1).st_size, os.fstat(1).st_blocks * 512))
"""
    done = foreground(tmp_path, code, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    size, occupied = map(int, done.stderr.split())
    assert size == 20 << 20
    assert occupied <= 1 << 20


def test_a_closed_downstream_ends_the_echo_only(tmp_path: Path) -> None:
    code = "import time\nfor i in range(20): print('word', i); time.sleep(0.05)"
    command = [*AGENT, "--foreground", str(tmp_path), "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"word 0\n"
        process.stdout.close()
        assert process.wait(30) == 0
    assert recorded(tmp_path, "stdout") == b"".join(b"word %d\n" % i for i in range(20))


def test_a_stuck_downstream_keeps_nothing_else_waiting(tmp_path: Path) -> None:
    """Nobody reads the pipe: the job ends and is recorded all the same; later all of it can be read."""
    size = 1 << 20
    code = f"import os\nos.write(1, b'y' * {size})"
    command = [*AGENT, "--foreground", str(tmp_path), "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: events(tmp_path, "job_ended"))
        assert len(recorded(tmp_path, "stdout")) == size
        assert process.poll() is None
        assert process.stdout is not None
        assert process.stdout.read() == b"y" * size
        assert process.wait(10) == 0


def test_a_job_that_truncates_its_output_goes_on_being_recorded(tmp_path: Path) -> None:
    code = """
import os, time
def copied(): return os.path.getsize(log) if (log := next(iter(logs()), None)) else 0
def logs(): return [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".log")]
folder = os.environ["PYTHONZEROTOP_SESSION"]
os.write(1, b"before " * 100)
while copied() < 700: time.sleep(0.02)
os.close(os.open("/dev/stdout", os.O_WRONLY | os.O_TRUNC))
os.write(1, b"after")
"""
    assert foreground(tmp_path, code, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    assert recorded(tmp_path, "output") == b"before " * 100 + b"after"


def test_a_restarted_sampler_takes_the_output_up_where_the_dead_one_was(tmp_path: Path) -> None:
    flag = tmp_path / "go on"
    session = tmp_path / "session"
    session.mkdir()
    code = f"""
import os, time
for i in range(100): print("first", i)
while not os.path.exists({str(flag)!r}): time.sleep(0.02)
for i in range(100): print("second", i)
while os.path.exists({str(flag)!r}): time.sleep(0.02)
"""
    first = agent.launch_in_background(str(session), [sys.executable, "-c", code])
    wait_for(lambda: list(session.glob("output-*.rec")) and b"first 99\n" in recorded(session, "output"))
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: not first.is_alive())
    # What another one leaves that finds the disk full.
    (session / f"output-node-{clock.read_hostname()}-1.rec").touch()
    flag.touch()
    second = agent.watch_in_background(str(session))
    assert second is not None
    expected = b"".join(b"%s %d\n" % (word, i) for word in (b"first", b"second") for i in range(100))

    def both() -> bytes:
        logs = [next(session.glob(f"output-node-*-{who.pid}.log")) for who in (first, second)]
        return b"".join(log.read_bytes() for log in logs)

    wait_for(lambda: both() == expected)
    assert agent.watch_in_background(str(session)) is None
    flag.unlink()
    wait_for(lambda: not second.is_alive())
    (end,) = events(session, "job_ended")
    assert end["exit_code"] is None
    assert "not known" in str(end["text"])


def test_a_full_disk_costs_the_recording_not_the_job(tmp_path: Path) -> None:
    code = "import sys\nfor i in range(20000): print('a line of output', i)\nsys.exit(7)"
    with small_disk(tmp_path / "small", "256k") as session:
        done = foreground(session, code, capture_output=True)
        kept = recorded(session, "stdout")
        (ended,) = events(session, "sampler_ended")
    assert done.returncode == 7
    assert done.stdout == b"".join(b"a line of output %d\n" % i for i in range(20000))
    assert kept
    assert done.stdout.startswith(kept)
    assert ended["lost_output_bytes"] == len(done.stdout) - len(kept)


# Fills the disk of its recording, then has more ranks than one page of events can tell of (blind ones, at that).
FILLER = """
import os, subprocess, sys, time
time.sleep(0.5)
with open(sys.argv[1], "wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)): pass
    except OSError: pass
command = [sys.executable, "-S", "-c", "import time; time.sleep(1.5)"]
ranks = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank in range(16)]
for rank in ranks: rank.wait()
raise SystemExit(7)
"""


def test_the_end_and_what_was_lost_are_recorded_on_a_disk_that_others_have_filled(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "512k") as disk:
        session = disk / "session"
        session.mkdir()
        done = in_foreground(session, *python(FILLER), str(disk / "filler"), capture_output=True)
        (file,) = session.glob("events-node-*.jsonl")
        assert (done.returncode, done.stderr) == (7, b"")
        assert file.stat().st_size > 4096
        assert len(events(session, "rank_found")) == 16
        assert [event["exit_code"] for event in events(session, "job_ended")] == [7]
        assert events(session, "sampler_ended")[0]["lost_records"] > 0
        assert [event["where"] for event in events(session, "sampler_error")] == ["samples"]
        assert file.stat().st_blocks * 512 < file.stat().st_size + 4096, "what was kept and not needed is given back"
