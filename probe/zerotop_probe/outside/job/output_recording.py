"""The agent's side of the holder: starts it, replaces it if it was killed, asks it about signals and the end."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from zerotop_probe.outside import own_python
from zerotop_probe.outside.causes import describe_cause
from zerotop_probe.outside.job.daemon import AgentError
from zerotop_probe.outside.job.outlets import FILE, PIPE, Outlet
from zerotop_probe.outside.job.output_log import LOST, REASON, STATE_BYTES
from zerotop_probe.outside.procfs import ProcessHandle, read_file, read_stat
from zerotop_probe.recording import directory
from zerotop_probe.recording.tables import OUTPUT
from zerotop_probe.recording.writer import Identity, make_header

_MODULE = "zerotop_probe.outside.job.output_holder"
_CANNOT_START = "The process that reads the job's output cannot be started: {reason}"
_START_S = 20.0
_ANSWER_S = 0.3
_RETRY_S = 1.0
# Of the largest size of a recording; ``folding`` leaves this share.
_OUTPUT_SHARE = 0.12
_POSITION_DIGITS = 20
_HEADER_ALIGNMENT = 64  # so that memory-mapped fields are aligned


class OutputRecording:
    """The recording of one job's output by a holder."""

    def __init__(
        self,
        recording: str,
        identity: Identity,
        outlets: Sequence[Outlet],
        *,
        holder: ProcessHandle | None = None,
    ) -> None:
        """``holder``: that of an earlier agent, which is replaced once it has ended."""
        self.holder = holder
        self.errors: list[str] = []
        """Why output could not be passed on. A reader that closed its pipe is no error."""
        self._folder = os.path.abspath(recording)
        self._stem = f"{OUTPUT.name}-{identity.file_stem}"
        self._header = _make_header(identity)
        info = directory.read_recording_info(recording)
        self._limit = int(float(info.get("max_bytes") or directory.MAX_BYTES) * _OUTPUT_SHARE)
        self._redaction = int(bool(info.get("redact_output")))
        self._outlets = dict(enumerate(outlets))
        self._all_outlets = tuple(outlets)
        self._has_started_holder = False
        self._count = len(outlets)
        self._state_file = _create_state_file()
        self._socket: socket.socket | None = None
        self._retry_s = 0.0
        self._waiting: list[int] = []

    @property
    def holder_pid(self) -> int:
        """The holder's PID; 0 without one."""
        return self.holder.pid if self.holder is not None else 0

    @property
    def files(self) -> frozenset[tuple[int, int]]:
        """Device and inode of the files that the job itself writes its output to."""
        status = [os.fstat(outlet.source) for outlet in self._outlets.values() if outlet.kind == FILE]
        return frozenset((one.st_dev, one.st_ino) for one in status)

    @property
    def messages(self) -> int:
        """The descriptor that can be read when the holder has sent a message or has ended; -1 without one."""
        return self._socket.fileno() if self._socket is not None else -1

    @property
    def lost_bytes(self) -> int:
        """Bytes of output that could not be recorded so far."""
        return self._read_number(LOST)

    @property
    def reason(self) -> str:
        """Why the first bytes were lost."""
        return os.strerror(self._read_number(REASON))

    def _read_number(self, place: int) -> int:
        return int.from_bytes(os.pread(self._state_file, 8, 8 * place), sys.byteorder)

    @property
    def pipes(self) -> dict[str, str]:
        """The kernel's names of the pipes that the job writes to, by stream."""
        outlets = [outlet for outlet in self._outlets.values() if outlet.kind == PIPE]
        return {outlet.name: os.readlink(f"/proc/self/fd/{outlet.source}") for outlet in outlets}

    def start_holder(self) -> None:
        """Start a holder and wait until it reads. Raises AgentError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = self._spawn_holder(theirs.fileno())
            except OSError as error:
                ours.close()
                raise AgentError(_CANNOT_START.format(reason=describe_cause(error))) from error
        stat = read_stat(pid)
        self.holder = ProcessHandle(pid, stat.start if stat else 0)
        self._has_started_holder = True
        self._socket = ours
        if self._await_answer(b"ready", _START_S) is None:
            self._drop_holder()
            raise AgentError(
                _CANNOT_START.format(reason="it ended at once; are memory or processes limited (ulimit -v, -u)?")
            )

    def _spawn_holder(self, agent: int) -> int:
        outlets = self._outlets.values()
        used = [agent, self._state_file, *(number for outlet in outlets for number in outlet.descriptors)]
        # Streams keep their numbers, though some may have ended.
        streams = [self._outlets[number].describe() if number in self._outlets else "" for number in range(self._count)]
        numbers = [str(self._limit), str(self._redaction)]
        texts = [str(agent), str(self._state_file), self._folder, self._stem, self._header, *numbers, *streams]
        command = own_python.build_bare_command(_MODULE, *texts)
        null = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        return os.posix_spawn(
            command[0],
            command,
            own_python.build_environment(),
            # Onto itself: the descriptor is inherited.
            file_actions=[*null, *((os.POSIX_SPAWN_DUP2, number, number) for number in used)],
            # A blocked signal stays pending, which shows that it was sent to the whole group.
            setsigmask=signal.valid_signals(),
        )

    def note_job(self, job: ProcessHandle) -> None:
        """Tell the holder which process is the job, and close our copies of the job's output descriptors."""
        self._send(b"job %d %d" % job)
        self._close_writers()

    def keep_holder(self) -> bool:
        """Read messages, continue a holder that was stopped, replace one that was killed; return whether it is new."""
        self._read_messages()
        stat = read_stat(self.holder.pid) if self.holder is not None else None
        if self.holder is not None and stat is None and os.path.exists(f"/proc/{self.holder.pid}"):
            return False  # it cannot be read: no descriptor is free
        if self.holder is not None and stat is not None and stat.start == self.holder.start and not stat.is_dead:
            if stat.state == "T":
                self.holder.send_signal(signal.SIGCONT)
                self._send(b"signal %d" % signal.SIGCONT)  # it takes ours, so that the next one counts
            return False
        # Without outlets it is there only to notice signals, if at all.
        is_needed = bool(self._outlets) or (self._has_started_holder and not self._all_outlets)
        if not is_needed or time.monotonic() < self._retry_s:
            return False
        self._drop_holder()
        try:
            self.start_holder()
        except AgentError:
            self._retry_s = time.monotonic() + _RETRY_S
            return False
        return True

    def took_signal(self, number: int) -> bool:
        """Return whether the holder, which is in our process group, has received a signal since the last call."""
        self._read_messages()  # an answer that came too late belongs to an earlier call
        self._send(b"signal %d" % number)
        answer = self._await_answer(b"signal %d " % number, _ANSWER_S)
        if answer is not None:
            return answer.endswith(b"1")
        # It is stopped or the machine is very busy, but the kernel knows.
        status = read_file(f"/proc/{self.holder.pid}/status") if self.holder is not None else b""
        pending = next((line.split()[1] for line in status.splitlines() if line.startswith(b"ShdPnd:")), b"0")
        return bool(int(pending, 16) >> (number - 1) & 1)

    def note_stop(self) -> None:
        """Ask the holder to continue us once the job, which was stopped, was continued alone."""
        self._send(b"stopped")

    def note_continuing(self) -> None:
        """Tell the holder that we were continued."""
        self._send(b"continued")

    def copy_window_size(self) -> bool:
        """Give the job's terminals the size of the user's; return whether it has changed."""
        changed = [outlet.copy_window_size() for outlet in self._outlets.values()]
        return any(changed)

    def begin_finish(self) -> None:
        """Ask the holder for a message when all output so far is passed on and recorded."""
        self._send(b"finish")

    def await_finished(self, seconds: float) -> bool:
        """Wait for the answer to :meth:`begin_finish`; return whether there is nothing left to wait for."""
        if self._await_answer(b"finished", seconds) is not None:
            return True
        return self._socket is None or self.holder is None or not self.holder.is_alive()

    def is_stuck(self) -> bool:
        """Whether only the readers of pipes are waited for, and none has read since the last call."""
        waiting = [outlet.count_waiting() for outlet in self._outlets.values()]
        is_stuck = any(waiting) and waiting == self._waiting
        self._waiting = waiting
        return is_stuck

    def close(self) -> None:
        """Leave the holder, which ends with the output, and close all files."""
        for outlet in self._outlets.values():
            outlet.close_reader()
        self._outlets.clear()
        self._close_writers()
        self._close_socket()
        os.close(self._state_file)

    def _close_writers(self) -> None:
        for outlet in self._all_outlets:
            outlet.close_writer()

    def _drop_holder(self) -> None:
        """Forget a holder that has ended or does not answer."""
        if self.holder is None:
            return
        self._close_socket()
        self.holder.send_signal(signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.holder.pid, 0)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: bytes) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.send(message, socket.MSG_DONTWAIT)

    def _read_messages(self) -> None:
        while self._await_answer(b"", 0.0) is not None:
            pass

    def _await_answer(self, begin: bytes, seconds: float) -> bytes | None:
        """Return the next message with this beginning, None if none arrives in time. Note ended streams while waiting."""
        deadline_s = time.monotonic() + seconds
        while self._socket is not None:
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            if not waiting.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                return None
            message = b""
            with suppress(OSError):
                message = self._socket.recv(4096)
            if not message:  # the holder has ended
                self._close_socket()
                return None
            if message.startswith(b"ended "):
                self._note_end(message)
            if message.startswith(begin):
                return message
        return None

    def _note_end(self, message: bytes) -> None:
        """Close our copies of a stream. Only then a job whose reader is gone gets SIGPIPE, and our reader an end of file.

        The job's own descriptor stays open until there is a job: the reader may be gone before.
        """
        _, number, error = message.split(b" ", 2)
        outlet = self._outlets.pop(int(number), None)
        if outlet is not None:
            outlet.close_reader()
        if error:
            self.errors.append(error.decode(errors="replace"))


def find_holder(pipes: Collection[str]) -> ProcessHandle | None:
    """Return a living holder that reads one of these pipes: its agent may have died before it could record it."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and _MODULE.encode() in read_file(f"/proc/{name}/cmdline"):
            with suppress(OSError):
                if any(os.readlink(f"/proc/{name}/fd/{number}") in pipes for number in os.listdir(f"/proc/{name}/fd")):
                    return ProcessHandle.from_pid(int(name))
    return None


def _make_header(identity: Identity) -> str:
    """Return the first line of an index, with room for the position of its first byte."""
    line = json.dumps(make_header(OUTPUT.name, identity, dtype=OUTPUT.dtype, first_byte=0))
    return line.ljust(-(-(len(line) + _POSITION_DIGITS) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT - 1) + "\n"


def _create_state_file() -> int:
    try:
        descriptor = os.memfd_create("zerotop-output", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:  # forbidden by a sandbox
        if getattr(error, "errno", None) == errno.EMFILE:
            raise
        with tempfile.TemporaryFile(prefix="zerotop-") as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, STATE_BYTES)
    return descriptor
