"""The agent's loop: copies output, triggers samplers, handles signals and records the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from zerotop_probe.outside.job import job as jobs
from zerotop_probe.outside.job.job import Job, JobResult
from zerotop_probe.outside.job.output_buffer import OutputRecorder
from zerotop_probe.outside.job.passthrough import Echo
from zerotop_probe.outside.job.shutdown import GRACE_S, LEAVE_REQUEST, STOP_REQUEST, Stopper
from zerotop_probe.outside.job.stream import Stream
from zerotop_probe.outside.procfs import Process
from zerotop_probe.outside.sampling.node_sampler import TICK_S, NodeSampler
from zerotop_probe.recording import disk, events, redact
from zerotop_probe.recording.writer import EventWriter, Identity

# Output is copied twice a tick.
_PERIOD_S = TICK_S / 2
# How long a foreground agent waits for ranks that outlive their launcher, as DeepSpeed's do after Ctrl-C, to pass on their
# output.
_LINGER_S = 5.0
# Disk space reserved for events, so that the job's end and any losses are recorded even on a full disk.
_ROOM_FOR_EVENTS = 1 << 16

# In the foreground these are passed on to the job. In the background STOP_SIGNALS request a stop.
JOB_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A signal from the terminal or the kernel has reached the whole process group, including the job.
_SI_KERNEL = 0x80


class Agent:
    """The agent of one job."""

    def __init__(
        self,
        session: str,
        job: Job,
        streams: Sequence[Stream],
        *,
        signals: set[int],
        echoes: Sequence[Echo] = (),
        grace_s: tuple[float, float] = GRACE_S,
        attached_ranks: Sequence[Process] | None = None,
        joined: bool = False,
    ) -> None:
        """``signals`` are blocked by the caller; with ``echoes``, in the foreground, they are passed on to the job.

        ``attached_ranks``: the ranks of a job that we attached to; stop signals then end the recording, not the job.
        ``joined``: this node's part of a job whose recording began elsewhere, so its end is not the job's end.
        """
        self._session = session
        self._attached = attached_ranks is not None
        self._joined = joined
        self._has_left = False
        self._job = job
        self._streams = streams
        self._signals = signals
        self._echoes = echoes
        self._started_ns = time.monotonic_ns()
        self._ended_ns: int | None = None
        self._loss_noted = False
        for echo in echoes:
            echo.start()
        identity = Identity.for_this_process("node")
        self._events = EventWriter(session, identity)
        disk.reserve_blocks(self._events.fileno(), _ROOM_FOR_EVENTS)
        self._output = OutputRecorder(session, identity, streams, on_error=self._note_output_lost)
        self._node = NodeSampler(session, identity, job.root, self._events, attached_ranks=attached_ranks)
        self._stopper = Stopper(
            job.root, session, grace_s=grace_s, on_sent=self._note_stop, ranks=self._node.ranks.list_processes
        )

    @property
    def is_known(self) -> bool:
        """Whether the recording identifies this agent, so that other processes can send it requests."""
        return not self._events.lost

    def _write_event(self, event: str, **facts: object) -> None:
        self._events.write(time.monotonic_ns(), event, **facts)

    def _note_output_lost(self, reason: str) -> None:
        self._write_event(events.SAMPLER_ERROR, where="output", error=reason)

    def _note_loss(self) -> None:
        """Record once, while the job runs, that its recording is incomplete."""
        if not self._loss_noted and (self._node.lost_records or self._output.lost_records):
            self._loss_noted = True
            self._write_event(
                events.SAMPLER_ERROR, where="samples", error="some samples could not be written; is the disk full?"
            )

    def _note_stop(self, name: str) -> None:
        self._write_event(events.STOP_SENT, signal=name)

    def note_start(self, command: Sequence[str]) -> None:
        """Record that this agent started the job."""
        pid, start = self._job.root
        self._write_event(events.JOB_STARTED, pid=pid, start=start, command=redact.redact_command(command))

    def run(self) -> JobResult:
        """Record the job until it ends; return how it ended."""
        next_s = time.monotonic() + _PERIOD_S  # the samplers have run once by then
        half_ticks = 0
        while not self._is_over():
            now_ns = time.monotonic_ns()
            has_more = self._output.poll(now_ns)
            if now_ns >= next_s * 1e9:
                self._node.request_samples(now_ns, half_ticks)
                half_ticks += 1
                self._note_loss()
                # Ticks missed during a pause (Ctrl-Z, a suspended machine) are skipped.
                next_s = max(next_s + _PERIOD_S, now_ns / 1e9)
            self._stopper.poll(time.monotonic())
            self._wait_for_signal(0.0 if has_more else next_s - time.monotonic())
        return self._finish_recording()

    def _wait_for_signal(self, seconds: float) -> None:
        info = signal.sigtimedwait(self._signals, max(seconds, 0.0))
        if info is None or info.si_signo == signal.SIGCHLD:
            return
        if info.si_signo == LEAVE_REQUEST or (self._attached and info.si_signo in STOP_SIGNALS):
            self._has_left = True
        elif info.si_signo == STOP_REQUEST or (not self._echoes and info.si_signo in STOP_SIGNALS):
            self._stopper.request_stop(time.monotonic())
        elif self._echoes and info.si_code != _SI_KERNEL:
            self._job.root.send_signal(info.si_signo)

    def _is_over(self) -> bool:
        """Whether the job has ended, or the agent was asked to leave it.

        A job has ended with its root and its ranks, which may outlive a launcher. A job that we attached to is also left
        when its recording was deleted, since nobody could ask us to leave any more.
        """
        if self._has_left or (self._attached and _is_gone(self._session)):
            self._has_left = True
            return True
        if not self._job.has_ended():
            return False
        if self._ended_ns is None:
            self._ended_ns = time.monotonic_ns()
        waited_s = (time.monotonic_ns() - self._ended_ns) / 1e9
        return not self._node.ranks.has_alive_rank() or bool(self._echoes and waited_s > _LINGER_S)

    def _finish_recording(self) -> JobResult:
        while self._output.poll(time.monotonic_ns()):
            pass
        self._node.finish_sampling()
        text = "" if self._has_left else self._note_end()
        self._finish_echo()
        lost_records, lost_bytes = self._node.lost_records + self._output.lost_records, self._output.lost_bytes
        self._write_event(events.SAMPLER_ENDED, lost_records=lost_records, lost_output_bytes=lost_bytes)
        self._close_files()
        returncode = self._job.returncode
        code = None if returncode is None else jobs.compute_exit_code(returncode)
        errors = [echo.error for echo in self._echoes if echo.error]
        return JobResult(code, text, lost_records, lost_bytes, errors[0] if errors else "")

    def _close_files(self) -> None:
        self._output.close()
        disk.release_reserve(self._events.fileno())
        self._events.close()
        if not any(echo.is_alive() for echo in self._echoes):
            for stream in self._streams:
                stream.close()

    def _note_end(self) -> str:
        returncode = self._job.returncode
        kills, where = self._node.count_oom_kills()
        ended_ns = self._ended_ns or time.monotonic_ns()
        text = jobs.describe_end(returncode, kills, where, stop_requested=self._stopper.is_requested)
        self._events.write(
            ended_ns,
            events.PARTED if self._joined else events.JOB_ENDED,
            exit_code=None if returncode is None else jobs.compute_exit_code(returncode),
            signal=jobs.find_signal_name(returncode),
            seconds=(ended_ns - self._started_ns) / 1e9,
            oom_kills=kills,
            text=text,
        )
        return text

    def _finish_echo(self) -> None:
        """Pass on the remaining output. A signal interrupts this, as a paused terminal may block it forever."""
        for echo in self._echoes:
            echo.request_finish()
        while any(echo.is_alive() for echo in self._echoes):
            info = signal.sigtimedwait(self._signals, _PERIOD_S / 5)
            if info is not None and info.si_signo in JOB_SIGNALS:
                return


def _is_gone(folder: str) -> bool:
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    except OSError:  # a network filesystem that does not respond
        return False
    return False
