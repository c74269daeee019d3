"""The program in a real terminal: started, read, typed at, left."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte

from patience import lengthen

PATIENCE_S = 60
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")


class Terminal:
    """A child on a pseudo-terminal of its own."""

    def __init__(
        self, command: Sequence[str], *, environment: dict[str, str], folder: Path, rows: int = 30, columns: int = 100
    ) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.chdir(folder)
            # The size is the terminal's own: workers of pytest-xdist have COLUMNS=80, which would come before it.
            sizes = ("COLUMNS", "LINES")
            own = {name: value for name, value in environment.items() if name not in sizes}
            os.execve(command[0], list(command), own)
        self._drawn = b""
        self._shown = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._shown)
        self._status: int | None = None

    @property
    def text(self) -> str:
        """The text drawn since the last key, without escapes, in the order of drawing."""
        return _ESCAPES.sub(b"", self._drawn).decode("utf-8", "replace")

    @property
    def screen(self) -> str:
        """The current screen, a line for each row."""
        return "\n".join(self._shown.display)

    @property
    def drawn(self) -> bytes:
        """The bytes drawn since the last key."""
        return self._drawn

    def wait_for(self, *texts: str) -> None:
        """Read the output until all of ``texts`` are drawn."""
        self.wait_until(lambda drawn: all(text in drawn for text in texts))

    def wait_until(self, seen: Callable[[str], bool]) -> None:
        """Read the output until ``seen`` is true of the drawn text."""
        begin_s = time.monotonic()
        while not seen(self.text):
            assert time.monotonic() - begin_s < lengthen(PATIENCE_S), f"{self.text[-3000:]}\n{self.screen}"
            assert self._read_output(), f"it ended: {self.text[-3000:]}"

    def watch_output(self, seconds: float) -> None:
        """Read the output for some seconds; earlier output is forgotten."""
        self._drawn = b""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self._read_output(), f"it ended: {self.text[-3000:]}"

    def _read_output(self) -> bool:
        """Read the available output; return False once nobody can write any more."""
        if self.master < 0:
            return False
        if not self._is_readable(0.2):
            return True
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # all of the other side is closed
            return False
        self._drawn += data
        self._stream.feed(data)
        return bool(data)

    def _is_readable(self, seconds: float) -> bool:
        """Return whether there is output or the other side is closed. select() knows no descriptors over 1,024."""
        waiting = select.poll()
        waiting.register(self.master, select.POLLIN)
        return bool(waiting.poll(1000 * seconds))

    def type_keys(self, keys: str) -> None:
        """Type keys; earlier output is forgotten."""
        self._drawn = b""
        os.write(self.master, keys.encode())

    def exit_code(self) -> int:
        """Read until the child has ended; return its exit code. Kill it after PATIENCE_S."""
        begin_s = time.monotonic()
        while not self.has_ended():
            if time.monotonic() - begin_s > lengthen(PATIENCE_S):
                os.kill(self.pid, signal.SIGKILL)
            self._read_output()
        while self._read_output() and self._is_readable(0.0):
            pass
        assert self._status is not None
        return os.waitstatus_to_exitcode(self._status)

    def has_ended(self) -> bool:
        """Return whether the child has ended."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None

    def hang_up(self) -> None:
        """Close the terminal, as a lost connection does."""
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def close(self) -> None:
        """End the child."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.hang_up()
