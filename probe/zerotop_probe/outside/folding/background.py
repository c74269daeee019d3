"""Folding from time to time while a job is recorded, in a separate process with the lowest priority."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from zerotop_probe.outside import own_python
from zerotop_probe.outside.folding.folding import read_limits

# Folding this often per time of full detail lets little more than that remain.
_TIMES_PER_DETAIL = 30
_MAX_PERIOD_NS = 120_000_000_000


class BackgroundFolding:
    """Starts the folding process when it is due; never waits for it."""

    def __init__(self, recording: str, on_error: Callable[[str, BaseException], None]) -> None:
        """``on_error`` is called once, when folding has failed."""
        self._recording = recording
        self._on_error = on_error
        self._has_failed = False
        self._pid: int | None = None
        self._period_ns = _MAX_PERIOD_NS
        with contextlib.suppress(OSError, ValueError):
            self._period_ns = min(_MAX_PERIOD_NS, read_limits(recording).full_detail_ns // _TIMES_PER_DETAIL)
        self._due_ns: int | None = None

    def poll(self, now_ns: int) -> None:
        """Start folding if it is due, and note the end of the last time. Never raises."""
        if self._due_ns is None:
            self._due_ns = now_ns + self._period_ns
        if self._pid is not None:
            self._check_end()
        elif now_ns >= self._due_ns:
            self._due_ns = now_ns + self._period_ns
            self._start()

    def _check_end(self) -> None:
        assert self._pid is not None
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:
            self._pid = None
            return
        if pid:
            self._pid = None
            if status and not self._has_failed:
                self._has_failed = True
                text = f"old records could not be folded (status {os.waitstatus_to_exitcode(status)}); is the disk full?"
                self._on_error("folding", OSError(text))

    def _start(self) -> None:
        module = "zerotop_probe.outside.folding.__main__"
        command = own_python.build_bare_command(module, os.path.abspath(self._recording))
        null = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
        try:
            self._pid = os.posix_spawn(
                command[0], command, own_python.build_environment(), file_actions=null, setsid=True, setsigmask=()
            )
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._on_error("folding", error)
