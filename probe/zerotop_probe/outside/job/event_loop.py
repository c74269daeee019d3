"""The agent's loop: triggers samplers, keeps the holder of the output alive, handles signals and records the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

from zerotop_probe.outside.job import job as jobs
from zerotop_probe.outside.job import job_signals
from zerotop_probe.outside.job.job import Job, JobResult
from zerotop_probe.outside.job.job_control import JobFacts
from zerotop_probe.outside.job.job_signals import END_SIGNALS, STOP_SIGNALS
from zerotop_probe.outside.job.output_recording import OutputRecording
from zerotop_probe.outside.job.shutdown import GRACE_S, LEAVE_REQUEST, STOP_REQUEST, Stopper
from zerotop_probe.outside.sampling.node_sampler import TICK_S, NodeSampler
from zerotop_probe.recording import disk, events, redact
from zerotop_probe.recording.writer import EventWriter, Identity

# GPU counters that wrap quickly are read twice a tick.
_PERIOD_S = TICK_S / 2
# After this time a foreground agent says that it waits for ranks: after Ctrl-C most end sooner.
_SILENT_WAIT_S = 2.0
# How long the search for ranks that outlive the first process may take.
_SEARCH_S = 2.0
# How long to wait for the last output before the job's end is recorded.
_LAST_OUTPUT_S = 0.5
# A reader that takes nothing for this time is not waited for.
_STUCK_S = 2.0
# Disk space reserved for events, so that the job's end and any losses are recorded even on a full disk.
_ROOM_FOR_EVENTS = 1 << 16


class Agent:
    """The agent of one job."""

    def __init__(
        self,
        recording: str,
        job: Job,
        output: OutputRecording,
        *,
        foreground: bool = False,
        grace_s: tuple[float, float] = GRACE_S,
        facts: JobFacts | None = None,
        on_message: Callable[[str], None] | None = None,
    ) -> None:
        """Signals are blocked by the caller; in the foreground they are passed on to the job.

        ``facts``: those of a job that runs already. If we attached to it, stop signals end the recording, not the job; if
        its recording began on another node, the end of this part is not the job's end. ``on_message`` receives sentences
        for the user.
        """
        self._recording = recording
        self._attached = facts is not None and facts.attached
        self._joined = facts is not None and facts.joined
        self._has_left = False
        self._job = job
        self._output = output
        self._foreground = foreground
        handled = job_signals.list_handled_signals()
        self._signals = job_signals.SignalWaiter(job_signals.list_signals() if foreground else handled)
        self._end_signals = handled.intersection(END_SIGNALS)
        self._on_message = on_message
        self._started_ns = time.monotonic_ns()
        self._ended_ns: int | None = None
        self._is_waiting_noted = False
        self._loss_noted = False
        self._output_loss_noted = False
        identity = Identity.for_this_process("node")
        self._events = EventWriter(recording, identity)
        disk.reserve_blocks(self._events.fileno(), _ROOM_FOR_EVENTS)
        ranks = facts.ranks if facts is not None and facts.attached else None
        self._node = NodeSampler(recording, identity, job.root, self._events, attached_ranks=ranks, recorded=output.files)
        self._stopper = Stopper(
            job.root,
            recording,
            grace_s=grace_s,
            on_sent=lambda name: self._write_event(events.StopSent, signal=name),
            ranks=self._node.ranks.list_processes,
        )

    @property
    def is_known(self) -> bool:
        """Whether the recording identifies this agent, so that other processes can send it requests."""
        return not self._events.lost

    def _write_event(self, event: type[events.Event], **facts: object) -> None:
        self._events.write(time.monotonic_ns(), event, **facts)

    def _note_losses(self) -> None:
        """Record once, while the job runs, that its recording is incomplete."""
        if not self._loss_noted and self._node.lost_records:
            self._loss_noted = True
            self._write_event(
                events.SamplerError, where="samples", error="some samples could not be written; is the disk full?"
            )
        if not self._output_loss_noted and self._output.lost_bytes:
            self._output_loss_noted = True
            error = f"the job's output is not recorded: {self._output.reason}"
            self._write_event(events.SamplerError, where="output", error=error)

    def note_start(self, command: Sequence[str]) -> None:
        """Record that this agent started the job."""
        pid, start = self._job.root
        self._write_event(events.JobStarted, pid=pid, start=start, command=redact.redact_command(command))
        self._note_holder()

    def _note_holder(self) -> None:
        if self._output.holder is not None:
            pid, start = self._output.holder
            self._write_event(
                events.OutputHolder, pid=pid, start=start, pipes=self._output.pipes, passes_on=self._foreground
            )

    def run(self) -> JobResult:
        """Record the job until it ends; return how it ended."""
        next_s = time.monotonic() + _PERIOD_S  # the samplers have run once by then
        half_ticks = 0
        while not self._is_over():
            now_s = time.monotonic()
            if now_s >= next_s:
                self._node.request_samples(time.monotonic_ns(), half_ticks)
                half_ticks += 1
                self._note_losses()
                next_s += _PERIOD_S
                if not self._node.needs_samples(half_ticks):
                    half_ticks, next_s = half_ticks + 1, next_s + _PERIOD_S
                # Ticks missed during a pause (Ctrl-Z, a suspended machine) are skipped.
                next_s = max(next_s, now_s)
            if self._output.keep_holder():
                self._note_holder()
            self._stopper.poll(time.monotonic())
            self._wait_for_signal(next_s - time.monotonic())
        return self._finish_recording()

    def _wait_for_signal(self, seconds: float) -> None:
        info = self._signals.wait_for_signal(seconds, self._output.messages)
        if info is None:
            return
        number = info.si_signo
        if self._foreground:
            self._handle_foreground_signal(info)
        elif number == LEAVE_REQUEST or (self._attached and number in STOP_SIGNALS):
            self._has_left = True
        elif number == STOP_REQUEST or number in STOP_SIGNALS:
            self._stopper.request_stop(time.monotonic())

    def _handle_foreground_signal(self, info: signal.struct_siginfo) -> None:
        if self._is_waiting_noted and info.si_signo in self._end_signals:
            self._has_left = True
        elif info.si_signo == signal.SIGWINCH and self._output.copy_window_size():
            # The job has received it from the terminal, but may have asked for the size too early.
            os.killpg(0, signal.SIGWINCH)
        elif job_signals.pass_on(info, self._job.root, self._output):
            self._stopper.request_stop(time.monotonic())

    def _is_over(self) -> bool:
        """Whether the job has ended, or the agent was asked to leave it.

        A job has ended when its root and its ranks have, because ranks may outlive a launcher. The agent also leaves an
        attached job when its recording was deleted, because nobody could ask it to leave any more.
        """
        if self._has_left or (self._attached and _is_gone(self._recording)):
            self._has_left = True
            return True
        if not self._job.has_ended():
            stopped_by = self._job.take_stop_signal()
            if self._foreground and stopped_by in job_signals.TERMINAL_STOPS:
                job_signals.stop_like(stopped_by, self._output)
            return False
        if self._ended_ns is None:
            self._ended_ns = time.monotonic_ns()
            self._node.request_samples(self._ended_ns, 0)
        waited_s = (time.monotonic_ns() - self._ended_ns) / 1e9
        goes_on = self._node.ranks.has_outlived_root
        if goes_on is None:  # not searched yet
            return waited_s > _SEARCH_S
        if goes_on and waited_s > _SILENT_WAIT_S:
            self._note_waiting()
        return not goes_on

    def _note_waiting(self) -> None:
        if not self._is_waiting_noted and self._on_message is not None:
            self._on_message(
                "The job's first process has ended, but its training goes on. Recording until it ends, or Ctrl-C."
            )
        self._is_waiting_noted = True

    def _count_ranks(self) -> int:
        return sum(process.is_alive() for process in self._node.ranks.list_processes())

    def _finish_recording(self) -> JobResult:
        self._output.begin_finish()
        is_finished = self._output.await_finished(_LAST_OUTPUT_S)
        self._node.finish_sampling()
        left = self._count_ranks() if self._has_left else 0
        text = self._note_end() if self._ended_ns is not None else ""
        # A paused terminal or slow reader may take any time. The holder stays for the rest when we leave.
        while not is_finished and not self._output.is_stuck():
            is_finished = self._await_output()
        lost_records, lost_bytes = self._node.lost_records, self._output.lost_bytes
        self._output.close()
        self._write_event(events.SamplerEnded, lost_records=lost_records, lost_output_bytes=lost_bytes)
        disk.release_reserve(self._events.fileno())
        self._events.close()
        # A signal that the job has received as well must not end us now.
        while self._signals.take_signal() is not None:
            pass
        self._signals.close()
        returncode = self._job.returncode
        return JobResult(
            exit_code=None if returncode is None else jobs.compute_exit_code(returncode),
            signal=-returncode if returncode is not None and returncode < 0 else 0,
            text=text,
            lost_records=lost_records,
            lost_output_bytes=lost_bytes,
            echo_error=next(iter(self._output.errors), ""),
            left_ranks=left,
        )

    def _await_output(self) -> bool:
        deadline_s = time.monotonic() + _STUCK_S
        while not (is_finished := self._output.await_finished(_PERIOD_S)) and time.monotonic() < deadline_s:
            if self._is_interrupted():
                return True
        return is_finished

    def _is_interrupted(self) -> bool:
        """Whether a signal asks us to end."""
        info = self._signals.take_signal()
        return info is not None and info.si_signo in END_SIGNALS and self._foreground

    def _note_end(self) -> str:
        returncode = self._job.returncode
        kills, where = self._node.count_oom_kills()
        ended_ns = self._ended_ns or time.monotonic_ns()
        text = jobs.describe_end(returncode, kills, where, stop_requested=self._stopper.is_requested)
        self._events.write(
            ended_ns,
            events.Parted if self._joined else events.JobEnded,
            exit_code=None if returncode is None else jobs.compute_exit_code(returncode),
            signal=jobs.find_signal_name(returncode),
            seconds=(ended_ns - self._started_ns) / 1e9,
            oom_kills=kills,
            text=text,
        )
        return text


def _is_gone(folder: str) -> bool:
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    except OSError:  # a network filesystem that does not respond
        return False
    return False
