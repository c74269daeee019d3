"""Asking a Python from 3.14 on to execute a script: what is written where, and when nothing is."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agents import wait_for
from machine import small_disk
from zerotop_probe.outside import procfs
from zerotop_probe.outside.attaching import payload, remote_exec
from zerotop_probe.outside.attaching.probe_entry import enter_processes
from zerotop_probe.outside.attaching.python_process import REMOTE_EXEC_VERSION, CannotEnter, Target, examine_process
from zerotop_probe.outside.procfs import ProcessHandle

# A process whose memory looks like a Python of a version: tables, two interpreters, a thread. It tells where they lie, and
# at each line what has become of them.
LOOKALIKE = """
import ctypes, sys
version, support, enabled, size, initialized = (int(word, 0) for word in sys.argv[1:])
runtime, newest, oldest, thread = (ctypes.create_string_buffer(4096) for _ in range(4))
def put(memory, offset, *values):
    memory[offset:offset + 8 * len(values)] = b"".join(value.to_bytes(8, "little") for value in values)
put(runtime, 0, int.from_bytes(b"xdebugpy", "little"), version)
put(runtime, 40, 1000, 0, 8, 16, 0, 24)
put(runtime, support, 8, 256, 32, 0, 4, size)
put(runtime, support + 64, initialized)
put(runtime, 1000, ctypes.addressof(newest))
put(newest, 8, 1, ctypes.addressof(oldest))
put(oldest, 8, 0, 0, ctypes.addressof(thread), enabled)
put(newest, 32, 1)
thread[8] = 0b11
thread[9] = 0x77
print(ctypes.addressof(runtime), flush=True)
for line in sys.stdin:
    print(thread[256:260].hex(), thread[260:260 + size].split(b"\\0")[0].decode() or "-", thread[8:10].hex(), flush=True)
"""
UNTOUCHED = "00000000 - 0377\n"
PYTHON_3_14, PYTHON_3_15 = 0x030E0AF0, 0x030F02F0


class Lookalike:
    """That process."""

    def __init__(self, process: subprocess.Popen[str], version: int) -> None:
        self._process = process
        target = ProcessHandle.from_pid(process.pid)
        assert target is not None
        self.target = Target(target, (version >> 24, version >> 16 & 0xFF), "", runtime=int(self._read_line()))

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def read_state(self) -> str:
        """Pending mark, path, the two lowest bytes of the eval breaker."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read_line()

    def check_refusal(self, path: str = "/a") -> str:
        """Why it is not asked; its memory is as before then."""
        with pytest.raises(CannotEnter) as caught:
            remote_exec.request_script(self.target, path)
        assert self.read_state() == UNTOUCHED
        return str(caught.value)


@contextmanager
def start_lookalike(
    version: int = PYTHON_3_14, *, support: int = 712, enabled: int = 1, size: int = 512, initialized: int = 1
) -> Iterator[Lookalike]:
    """One that is ended afterwards."""
    command = [sys.executable, "-c", LOOKALIKE, *map(str, (version, support, enabled, size, initialized))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Lookalike(process, version)
        finally:
            process.kill()


@pytest.mark.parametrize(("version", "support"), [(PYTHON_3_14, 712), (PYTHON_3_15, 840)])
def test_the_main_thread_of_the_first_interpreter_is_asked(version: int, support: int) -> None:
    with start_lookalike(version, support=support) as one:
        remote_exec.request_script(one.target, "/tmp/scr\N{LATIN SMALL LETTER I WITH DIAERESIS}pt.py")
        assert one.read_state() == "01000000 /tmp/scr\N{LATIN SMALL LETTER I WITH DIAERESIS}pt.py 2377\n"


def test_one_that_forbids_it_is_left_alone() -> None:
    with start_lookalike(enabled=0) as one:
        assert "PYTHON_DISABLE_REMOTE_DEBUG or -X disable-remote-debug" in one.check_refusal()


def test_one_that_is_starting_is_left_alone() -> None:
    with start_lookalike(initialized=0) as one:
        assert "starting or exiting. Try again when it trains." in one.check_refusal()


def test_a_path_has_to_fit() -> None:
    with start_lookalike(size=16) as one:
        assert "--recording" in one.check_refusal("/" + 15 * "a")
        remote_exec.request_script(one.target, "/" + 14 * "a")
        assert "/" + 14 * "a" in one.read_state()


@pytest.mark.parametrize("version", [0x031000F0, 0x030E00B1, 0x030E00C2])
def test_an_unknown_or_unreleased_python_is_refused(version: int) -> None:
    with start_lookalike(version) as one:
        assert "This version of zerotop cannot enter the Python" in one.check_refusal()


def test_a_table_of_another_version_is_not_believed() -> None:
    with start_lookalike() as one:
        one.target = one.target._replace(version=(3, 15))
        assert "This version of zerotop cannot enter the Python" in one.check_refusal()
        one.target = one.target._replace(version=(3, 14), runtime=one.target.runtime + 8)
        assert "This version of zerotop cannot enter the Python" in one.check_refusal()
        one.target = one.target._replace(runtime=0)
        assert "This version of zerotop cannot enter the Python" in one.check_refusal()


def test_addresses_that_lead_nowhere_end_in_a_sentence() -> None:
    with start_lookalike() as one:
        with open(f"/proc/{one.target.process.pid}/mem", "r+b", buffering=0) as memory:
            os.pwrite(memory.fileno(), struct.pack("<Q", 2**64 - 8), one.target.runtime + 1000)
        assert "cannot be accessed" in one.check_refusal()


def test_one_that_has_ended_is_not_asked() -> None:
    with start_lookalike() as one:
        target = one.target
    with pytest.raises(CannotEnter, match="has ended"):
        remote_exec.request_script(target, "/a")


def test_files_that_a_process_sees_otherwise_are_no_way_to_it(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    hide = f"mount -t tmpfs none {tmp_path}/inner && echo ready && exec sleep 60"
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", hide], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                pytest.skip("no namespaces of mounts can be made here")
            target = ProcessHandle.from_pid(process.pid)
            assert target is not None
            payload.write_file(str(tmp_path / "outer"), "seen", target)
            with pytest.raises(CannotEnter, match=f"does not see {tmp_path}/inner, as it runs in a container"):
                payload.write_file(str(tmp_path / "inner" / "file"), "hidden", target)
        finally:
            process.kill()
    assert os.listdir(tmp_path / "inner") == []


def test_half_of_a_file_is_none(tmp_path: Path) -> None:
    ourselves = ProcessHandle.from_pid(os.getpid())
    assert ourselves is not None
    with small_disk(tmp_path / "small", "8k") as disk:
        (disk / "other").write_bytes(bytes(4096))
        with pytest.raises(CannotEnter, match=r"No space left on device\)\. Choose another folder with --recording"):
            payload.write_file(str(disk / "file"), "#" * 8192, ourselves)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_files_for_another_user_are_written_as_that_user(tmp_path: Path) -> None:
    open_folder, closed = Path("/dev/shm") / f"zerotop-open-{os.getpid()}", tmp_path / "closed"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    closed.mkdir(mode=0o700)
    try:
        with subprocess.Popen(["sleep", "60"], user=65534, group=65534, cwd="/") as process:
            target = ProcessHandle.from_pid(process.pid)
            assert target is not None
            payload.write_file(str(open_folder / "file"), "text", target)
            facts = (open_folder / "file").stat()
            assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o777) == (65534, 65534, 0o600)
            with pytest.raises(CannotEnter, match="cannot write to the recording's folder"):
                payload.write_file(str(closed / "file"), "text", target)
            process.kill()
        assert list(closed.iterdir()) == []
        (closed / "own").touch()  # we ourselves are who we were
        assert (closed / "own").stat().st_uid == 0
    finally:
        shutil.rmtree(open_folder)


def asked_pythons() -> list[str]:
    """Real ones of this machine."""
    this = [sys.executable] if sys.version_info[:2] >= REMOTE_EXEC_VERSION else []
    return this + [path for version in ("3.14", "3.15") if (path := shutil.which(f"python{version}"))]


@pytest.mark.parametrize("python", asked_pythons())
class TestRealOnes:
    """Each Python of this machine that is asked."""

    BUSY = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"

    @contextmanager
    def start_python(self, *command: str, code: str = BUSY) -> Iterator[tuple[subprocess.Popen[str], ProcessHandle]]:
        """It, at work."""
        with subprocess.Popen([*command, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                target = ProcessHandle.from_pid(process.pid)
                assert target is not None
                yield process, target
            finally:
                process.kill()

    def test_it_executes_a_script(self, python: str, tmp_path: Path) -> None:
        script, done = tmp_path / "script.py", tmp_path / "done"
        script.write_text(f"import threading\nopen({str(done)!r}, 'w').write(threading.current_thread().name)")
        with self.start_python(python) as (process, found):
            remote_exec.request_script(examine_process(found), str(script))
            wait_for(lambda: done.exists() and done.read_text() == "MainThread")
            assert process.poll() is None

    def test_it_is_asked_for_the_probe_and_nothing_is_left(self, python: str, tmp_path: Path) -> None:
        with self.start_python(python) as (process, found):
            for _ in range(2):
                (entry,) = enter_processes([found], str(tmp_path))
                assert (entry.reply, entry.stopped_s) == ("early", 0.0)
            assert process.poll() is None
        assert list(tmp_path.iterdir()) == []

    def test_a_process_that_forbids_entering_is_left_alone(self, python: str, tmp_path: Path) -> None:
        with self.start_python(python, "-X", "disable-remote-debug") as (_, found):
            (entry,) = enter_processes([found], str(tmp_path))
        assert "forbids entering it" in entry.why_not
        assert not entry.is_pending
        assert list(tmp_path.iterdir()) == []

    def test_one_in_a_long_call_does_it_afterwards(self, python: str, tmp_path: Path) -> None:
        long_call = "import time\nprint('ready', flush=True)\ntime.sleep(1.5)\nwhile True: time.sleep(0.01)"
        with self.start_python(python, code=long_call) as (process, found):
            wait_for(lambda: (seen := procfs.read_stat(process.pid)) is not None and seen.state == "S")
            (entry,) = enter_processes([found], str(tmp_path), patience_s=0.3)
            assert entry.is_pending
            assert [path.suffix for path in tmp_path.iterdir()] == [".py"]
            wait_for(lambda: not list(tmp_path.iterdir()))
            assert process.poll() is None
