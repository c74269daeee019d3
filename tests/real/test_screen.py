"""The program in a real terminal: started, read, typed at, left."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from pathlib import Path

from zerotop.session.reader import Session

ROWS, COLUMNS = 30, 100
PATIENCE_S = 60
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")


class Terminal:
    """A child on a pseudo-terminal."""

    def __init__(self, *arguments: str, environment: dict[str, str]) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "zerotop", *arguments], environment)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.seen = b""

    def wait_for(self, text: str) -> None:
        """Reads what is drawn until ``text`` was among it."""
        deadline = time.monotonic() + PATIENCE_S
        while text.encode() not in _ESCAPES.sub(b"", self.seen):
            assert time.monotonic() < deadline, _ESCAPES.sub(b"", self.seen).decode("utf-8", "replace")[-3000:]
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 65536)

    def type(self, keys: str) -> None:
        """Types; what was drawn before is forgotten."""
        self.seen = b""
        os.write(self.master, keys.encode())

    def exit_code(self) -> int:
        """Waits for the child, draining what it still draws."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            try:
                if select.select([self.master], [], [], 0.1)[0]:
                    os.read(self.master, 65536)
            except OSError:
                continue
        raise AssertionError("the program did not end")


def opened(folder: Path, *arguments: str) -> Terminal:
    """The program on a terminal; sessions without a path of their own lie in ``folder``."""
    environment = os.environ | {"XDG_STATE_HOME": str(folder), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    return Terminal(*arguments, environment=environment)


def running(folder: Path, script: str) -> tuple[Terminal, Path]:
    """The program watching a job that it launched, and the job's session."""
    session = folder / "session"
    return opened(folder, "run", "--session", str(session), "--", sys.executable, "-c", script), session


def test_job_is_watched_to_its_end_and_its_exit_code_is_ours(tmp_path: Path) -> None:
    script = "import time; print('loss', 6 * 7, flush=True); time.sleep(2); raise SystemExit(3)"
    terminal, session = running(tmp_path, script)
    terminal.wait_for("loss 42")
    terminal.wait_for("exit code 3")
    terminal.type("q")
    assert terminal.exit_code() == 3
    assert Session.open(session).output_tail(time.time_ns()) == b"loss 42\n"


def test_detached_job_goes_on_and_is_attached_again(tmp_path: Path) -> None:
    script = "import time; print('at work', flush=True); time.sleep(8); print('work done', flush=True)"
    terminal, session = running(tmp_path, script)
    terminal.wait_for("at work")
    terminal.type("q")
    terminal.wait_for("Detach")
    terminal.type("d")
    assert terminal.exit_code() == 0
    assert Session.open(session).live
    again = opened(tmp_path, "attach", str(session))
    again.wait_for("work done")
    again.wait_for("exit code 0")
    again.type("q")
    again.exit_code()
    assert not Session.open(session).live
