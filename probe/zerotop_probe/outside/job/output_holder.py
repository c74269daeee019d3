"""The holder, a process that reads the job's output, passes it on and records it, as ``tee`` does.

The job writes to a pipe or pseudo-terminal, as it would without zerotop. Its reader must not die with a viewer or sampler,
so it is this small process, which imports little and ignores all signals but SIGKILL. Where the user's descriptor is a file
on disk, the job writes to that file itself and the holder records what is added to it.

Arguments: a socket to the agent, a file with numbers that survive the holder (see ``output_log``), the recording,
the stem of the output files, the header of an index, the limit in bytes, 1 to redact the recorded output or 0, and the
streams as ``outlets.Outlet`` describes them, empty for those that have ended.

Messages from the agent: ``signal N``, answered by ``signal N 1`` if this process has also received signal N, else by
``signal N 0``; ``job PID START``; ``stopped``, when it stops because its job has: it is continued once the job was;
``continued``; ``finish``, answered by ``finished`` once all output so far is passed on. Messages to the agent: ``ready``;
``ended I ERROR`` when stream I has ended.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress

from zerotop_probe.outside.job.held_streams import FILE_PERIOD_S, FileStream, Stream
from zerotop_probe.outside.job.output_log import STATE_BYTES, OutputLog

_STOPPED_PERIOD_S = 0.05


class Holder:
    """The holder of one job's output."""

    def __init__(self, agent: int, streams: list[Stream | FileStream], log: OutputLog) -> None:
        self._agent = agent
        self._streams = streams
        self._log = log
        self._job = (0, b"")

    def run(self) -> None:
        """Copy the output, answer the agent; end with the output once there is no agent."""
        for stream in self._streams:
            threading.Thread(target=self._run_stream, args=(stream,), daemon=True).start()
        self._send(b"ready")
        while message := self._receive():
            word, _, rest = message.partition(b" ")
            if word == b"signal":
                self._send(b"signal %s %d" % (rest, _take_signal(int(rest))))
            elif word == b"job":
                pid, start = rest.split()
                self._job = int(pid), start
            elif word == b"stopped":
                self._watch_stopped_job()
            elif word == b"continued":
                for stream in self._streams:
                    if isinstance(stream, Stream):
                        stream.renew_modes()
            elif word == b"finish":
                self._finish()
                self._send(b"finished")
        self._await_end()

    def _run_stream(self, stream: Stream) -> None:
        stream.run()
        self._send(b"ended %d %s" % (stream.number, stream.error.encode()))

    def _receive(self) -> bytes:
        try:
            return os.read(self._agent, 256)
        except OSError:
            return b""

    def _send(self, message: bytes) -> None:
        with suppress(OSError):
            os.write(self._agent, message)

    def _watch_stopped_job(self) -> None:
        """Continue the agent when the job, but not the agent, was continued. It waits for the job to tell its caller."""
        waiting = select.poll()
        waiting.register(self._agent, select.POLLIN)
        while not waiting.poll(1000 * _STOPPED_PERIOD_S):
            if self._read_job_state() not in b"Tt":
                os.kill(os.getppid(), signal.SIGCONT)
                return

    def _finish(self) -> None:
        for stream in self._streams:
            if isinstance(stream, FileStream):
                stream.finish()
        quiet = 0
        while quiet < 2:  # a terminal hands output over with a delay
            quiet = quiet + 1 if all(stream.has_passed_all() for stream in self._streams) else 0
            if quiet < 2 and not all(stream.is_over for stream in self._streams):
                time.sleep(0.005)
        self._log.flush()

    def _await_end(self) -> None:
        """Wait for the end of all streams. The agent is gone; if it was killed the job may still run."""
        while not all(stream.is_over for stream in self._streams):
            if self._read_job_state() in b"ZX":
                for stream in self._streams:
                    if isinstance(stream, FileStream):
                        stream.finish()
            time.sleep(FILE_PERIOD_S)
        self._log.flush()
        # Ranks that were killed after the agent may have left records in shared memory.
        from zerotop_probe.outside.sampling.ring_collector import adopt_leftovers  # takes as long to import as all else here

        adopt_leftovers()

    def _read_job_state(self) -> bytes:
        """Return the letter of the job's state, which is X if it is gone."""
        pid, start = self._job
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            return fields[0] if fields[19] == start else b"X"
        except (OSError, IndexError):
            return b"X"


def _take_signal(number: int) -> bool:
    """Return whether this process has received a signal since the last call. All signals are blocked, so it is pending."""
    return signal.sigtimedwait([number], 0) is not None


def _close_others(used: set[int]) -> None:
    """Close descriptors that zerotop's caller passed on to the job: their other end waits for the job to close them."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in used:
            with suppress(OSError):
                os.close(int(name))


def main() -> None:
    """Run as the holder."""
    agent, state_file, folder, stem, header, limit, redaction, *texts = sys.argv[1:]
    _close_others({int(agent), int(state_file), *(int(number) for text in texts for number in text.split(":")[2:])})
    state = memoryview(mmap.mmap(int(state_file), STATE_BYTES)).cast("q")
    log_class = OutputLog
    if int(redaction):
        from zerotop_probe.outside.job.redacted_log import RedactedLog  # takes as long to import as all else here

        log_class = RedactedLog
    log = log_class(folder, stem, header.encode(), int(limit), state)
    streams: list[Stream | FileStream] = []
    for number, text in enumerate(texts):
        if text:
            name, begin, *descriptors = map(int, text.split(":"))
            streams.append(
                FileStream(number, name, descriptors[0], begin, log, state)
                if len(descriptors) == 1
                else Stream(number, name, descriptors, log, state)
            )
    os.chdir("/")
    Holder(int(agent), streams, log).run()
