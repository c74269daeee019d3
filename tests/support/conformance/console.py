"""A terminal with something running on it, read and typed at. Uses no fork, as tests run in several threads."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from conformance.places import Place, describe_ending, drop_own_lines

_PATIENCE_S = 20.0
# A session leader that opens a terminal makes it its controlling terminal.
_OPEN_TERMINAL = 'terminal=$0; exec 0<>"$terminal" 1>&0 2>&0; exec "$@"'


class Console:
    """The master side of a pseudo-terminal, and the session leader on the other side."""

    def __init__(self, place: Place, *command: str, rows: int = 24, columns: int = 80) -> None:
        self._master, slave = os.openpty()
        self.resize(rows, columns)
        self.process = place.start_command(
            "/bin/sh", "-c", _OPEN_TERMINAL, os.ttyname(slave), *command, stdout=None, stderr=None
        )
        self._slave = slave
        self._output = b""

    @property
    def output(self) -> bytes:
        """The output so far, without zerotop's own lines."""
        return drop_own_lines(self._output)

    def wait_for_pattern(self, pattern: bytes, seconds: float = _PATIENCE_S) -> bool:
        """Read until ``pattern`` was seen; return whether it came in time."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self._output):
            if time.monotonic() > deadline or not self._read(0.05):
                return re.search(pattern, self._output) is not None
        return True

    def _read(self, seconds: float) -> bool:
        """Read the output that is there; return False if nobody can write any more."""
        waiting = select.poll()
        waiting.register(self._master, select.POLLIN)
        if not waiting.poll(1000 * seconds):
            return True
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:
            return False
        self._output += data
        return bool(data)

    def forget_output(self) -> None:
        """Forget the output so far."""
        self._output = b""

    def type_keys(self, keys: bytes) -> None:
        """Type keys."""
        os.write(self._master, keys)

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the terminal."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_modes(self) -> list[object]:
        """Return the terminal's modes, as termios has them."""
        return termios.tcgetattr(self._master)

    def hang_up(self) -> None:
        """Close the terminal, as a lost connection does."""
        for descriptor in (self._slave, self._master):
            if descriptor >= 0:
                os.close(descriptor)
        self._slave = self._master = -1

    def read_to_end(self) -> str:
        """Read until the session leader has ended; return how it ended."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                return f"not ended after {_PATIENCE_S:.0f} s"
            if self._master < 0:
                time.sleep(0.02)
            else:
                self._read(0.05)
        before = b""
        while self._master >= 0 and before != self._output:
            before = self._output
            self._read(0.05)
        return describe_ending(self.process.returncode)


@contextmanager
def open_console(place: Place, *command: str, **options: int) -> Iterator[Console]:
    """Run a command line on a terminal of its own; kill the remaining processes at the end of the block."""
    console = Console(place, *command, **options)
    try:
        yield console
    finally:
        place.end_everything()
        with suppress(ProcessLookupError):
            console.process.kill()
        console.process.wait()
        console.hang_up()


@contextmanager
def interactive_shell(place: Place) -> Iterator[Console]:
    """Run an interactive bash, which has job control, on a terminal."""
    with open_console(place, "bash", "--norc", "--noprofile", "--noediting", "-i") as console:
        console.type_keys(b"PS1=; stty -echo; echo shell is re''ady\n")
        console.wait_for_pattern(rb"shell is ready\r\n")
        console.forget_output()
        yield console
