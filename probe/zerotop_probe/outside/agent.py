"""The process beside a job: launches it, records its output, samples, waits, records how it ended.

The job never depends on it: killed at any moment, it leaves a job that goes on and a recording that ends
there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from zerotop_probe.outside import daemon
from zerotop_probe.outside import job as jobs
from zerotop_probe.outside.control import read_facts, sampler_alive
from zerotop_probe.outside.daemon import AgentError
from zerotop_probe.outside.echo import Echo, same_file
from zerotop_probe.outside.job import CommandError, Job, WatchedJob, check_command
from zerotop_probe.outside.node import TICK_S, Node
from zerotop_probe.outside.output import OutputRecorder, recorded_bytes
from zerotop_probe.outside.proc import Process
from zerotop_probe.outside.stop import GRACE_S, STOP_REQUEST, Stopper
from zerotop_probe.outside.stream import Stream
from zerotop_probe.recording import clock, events, redact
from zerotop_probe.recording.writer import EventWriter, Identity

__all__ = [
    "AgentError",
    "CommandError",
    "check_command",
    "launch_in_background",
    "run_in_foreground",
    "watch",
    "watch_in_background",
]

# Output is looked at twice a tick.
_PERIOD_S = TICK_S / 2
# How long the foreground stays for ranks that outlive their launcher, as DeepSpeed's do after Ctrl-C, to pass
# on their words.
_LINGER_S = 5.0

# In the foreground these belong to the job, which gets those that were sent to us. In the background they ask
# for a stop.
_TO_JOB = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_TO_STOP = (signal.SIGTERM, signal.SIGINT)
# What the terminal or the kernel sent has reached the whole process group, the job with it.
_SI_KERNEL = 0x80


def launch_in_background(
    session: str, command: Sequence[str], *, grace_s: tuple[float, float] = GRACE_S
) -> Process:
    """Starts ``command`` and its agent in sessions of their own: they survive the caller and its terminal.

    Returns the agent once the job runs. ``grace_s`` is the time a stopped job gets between signals, see
    ``stop.Stopper``. Raises CommandError if the command cannot be executed, AgentError if the agent fails;
    nothing runs then.
    """
    check_command(command)
    grace = [str(seconds) for seconds in grace_s]
    return daemon.start(["--grace", *grace, os.path.abspath(session), "--", *command])


def watch_in_background(session: str) -> Process | None:
    """Starts a new agent for a job whose agent has died; None if that lives or the job has ended."""
    root = read_facts(session).job
    if root is None or not root.alive() or sampler_alive(session):
        return None
    return daemon.start(["--watch", str(root.pid), str(root.start), os.path.abspath(session)])


def run_in_foreground(session: str, command: Sequence[str], *, grace_s: tuple[float, float] = GRACE_S) -> int:
    """Runs ``command`` in our terminal and process group; returns its exit code, 128 + n after signal n.

    Its output is passed on byte for byte. To be called from the main thread of a process that has no other
    threads: signals are blocked and waited for meanwhile. Raises CommandError if it cannot be executed.
    """
    check_command(command)
    apart = not same_file(1, 2)
    streams = [Stream.create(name) for name in (("stdout", "stderr") if apart else ("output",))]
    wanted = _not_ignored(_TO_JOB) | {signal.SIGCHLD, STOP_REQUEST}
    with _signals_blocked(wanted) as mask:
        job = _launch(session, command, streams, mask, own_session=False)
        echoes = [Echo(stream, number) for number, stream in enumerate(streams, 1)]
        agent = Agent(session, job, streams, signals=wanted, echoes=echoes, grace_s=grace_s)
        agent.note_start(command)
        return agent.run()


@contextmanager
def _signals_blocked(numbers: Collection[int]) -> Iterator[Collection[int]]:
    """Blocks signals; gives the mask of before, which comes back at the end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def prepare_in_background(
    session: str, command: Sequence[str], *, grace_s: tuple[float, float] = GRACE_S
) -> Callable[[], int]:
    """Launches ``command`` in a session of its own; the result records it to its end. Raises CommandError."""
    streams = [Stream.create("output")]
    wanted = _background_signals()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    job = _launch(session, command, streams, mask, own_session=True)
    agent = Agent(session, job, streams, signals=wanted, grace_s=grace_s)
    agent.note_start(command)
    return agent.run


def prepare_watch(session: str, root: Process) -> Callable[[], int]:
    """Takes up a running job; the result records it to its end. Raises ProcessLookupError if it has ended."""
    if not root.alive():
        raise ProcessLookupError(f"There is no process {root.pid} that started when the job of {session} did")
    wanted = _background_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    return Agent(session, WatchedJob(root), _adopt_streams(session, root), signals=wanted).run


def watch(session: str, root_pid: int) -> int:
    """Samples the running job whose root is ``root_pid`` until it ends; takes up its output if that is ours.

    What the job printed since its agent died has stayed in memory and is recorded now, dated now. What it
    printed in the foreground is recorded but no longer passed on. The exit code of a job that somebody else
    started is not known: 0 is returned. Raises ProcessLookupError if there is no such process.
    """
    root = Process.of(root_pid)
    if root is None:
        raise ProcessLookupError(f"There is no process {root_pid}")
    with _signals_blocked(_background_signals()):
        return prepare_watch(session, root)()


def _adopt_streams(session: str, root: Process) -> list[Stream]:
    streams = []
    for name, number in (("output", 1), ("stdout", 1), ("stderr", 2)):
        stream = Stream.adopt(name, root, number, recorded_bytes(session, clock.hostname(), name))
        if stream is not None:
            streams.append(stream)
    return streams


def _not_ignored(numbers: Sequence[signal.Signals]) -> set[int]:
    """Those that our starter does not want ignored, as nohup wants SIGHUP."""
    return {number for number in numbers if signal.getsignal(number) != signal.SIG_IGN}


def _background_signals() -> set[int]:
    return {*_TO_STOP, signal.SIGHUP, signal.SIGCHLD, STOP_REQUEST}


def _launch(
    session: str,
    command: Sequence[str],
    streams: Sequence[Stream],
    mask: Collection[int],
    *,
    own_session: bool,
) -> Job:
    writers = [stream.writer() for stream in streams]
    try:
        environ = jobs.environment(os.path.abspath(session), os.environ)
        return jobs.spawn(
            command, environ, stdout=writers[0], stderr=writers[-1], signal_mask=mask, own_session=own_session
        )
    except CommandError:
        for stream in streams:
            stream.close()
        raise
    finally:
        for writer in writers:
            os.close(writer)


class Agent:
    """One job's agent: the loop and what it needs."""

    def __init__(
        self,
        session: str,
        job: Job,
        streams: Sequence[Stream],
        *,
        signals: set[int],
        echoes: Sequence[Echo] = (),
        grace_s: tuple[float, float] = GRACE_S,
    ) -> None:
        """``signals`` are blocked by the caller; with ``echoes``, in the foreground, the job gets them."""
        self._job = job
        self._streams = streams
        self._signals = signals
        self._echoes = echoes
        self._started_ns = time.monotonic_ns()
        self._ended_ns: int | None = None
        for echo in echoes:
            echo.start()
        identity = Identity.of_this_process("node")
        self._events = EventWriter(session, identity)
        self._output = OutputRecorder(session, identity, streams, on_error=self._note_output_lost)
        self._node = Node(session, identity, job.root, self._events)
        self._stopper = Stopper(job.root, session, grace_s=grace_s, on_sent=self._note_stop)

    def _write(self, event: str, **facts: object) -> None:
        self._events.write(time.monotonic_ns(), event, **facts)

    def _note_output_lost(self, reason: str) -> None:
        self._write(events.SAMPLER_ERROR, where="output", error=reason)

    def _note_stop(self, name: str) -> None:
        self._write(events.STOP_SENT, signal=name)

    def note_start(self, command: Sequence[str]) -> None:
        """Records that the job was started by us."""
        pid, start = self._job.root
        self._write(events.JOB_STARTED, pid=pid, start=start, command=redact.command(command))

    def run(self) -> int:
        """Stays as long as the job; returns its exit code."""
        next_s = time.monotonic()
        half_ticks = 0
        while not self._over():
            now_ns = time.monotonic_ns()
            more = self._output.poll(now_ns)
            if now_ns >= next_s * 1e9:
                self._node.half_tick(now_ns, half_ticks)
                half_ticks += 1
                # After a pause (Ctrl-Z, a suspended machine) what was missed is not made up for.
                next_s = max(next_s + _PERIOD_S, now_ns / 1e9)
            self._stopper.poll(time.monotonic())
            self._wait(0.0 if more else next_s - time.monotonic())
        return self._finish()

    def _wait(self, seconds: float) -> None:
        info = signal.sigtimedwait(self._signals, max(seconds, 0.0))
        if info is None or info.si_signo == signal.SIGCHLD:
            return
        if info.si_signo == STOP_REQUEST or (not self._echoes and info.si_signo in _TO_STOP):
            self._stopper.request(time.monotonic())
        elif self._echoes and info.si_code != _SI_KERNEL:
            self._job.root.send(info.si_signo)

    def _over(self) -> bool:
        """Whether the root has ended, and with it the ranks, which may live on when it was a launcher."""
        if not self._job.ended():
            return False
        if self._ended_ns is None:
            self._ended_ns = time.monotonic_ns()
        waited_s = (time.monotonic_ns() - self._ended_ns) / 1e9
        return not self._node.ranks.alive() or bool(self._echoes and waited_s > _LINGER_S)

    def _finish(self) -> int:
        while self._output.poll(time.monotonic_ns()):
            pass
        self._node.finish()
        self._note_end()
        self._finish_echo()
        self._write(
            events.SAMPLER_ENDED,
            lost_records=self._node.lost_records + self._output.lost_records,
            lost_output_bytes=self._output.lost_bytes,
        )
        self._close()
        return jobs.exit_code(self._job.returncode or 0)

    def _close(self) -> None:
        self._output.close()
        self._events.close()
        if not any(echo.is_alive() for echo in self._echoes):
            for stream in self._streams:
                stream.close()

    def _note_end(self) -> None:
        returncode = self._job.returncode
        kills, where = self._node.oom_kills()
        ended_ns = self._ended_ns or time.monotonic_ns()
        self._events.write(
            ended_ns,
            events.JOB_ENDED,
            exit_code=None if returncode is None else jobs.exit_code(returncode),
            signal=jobs.signal_name(returncode),
            seconds=(ended_ns - self._started_ns) / 1e9,
            oom_kills=kills,
            text=jobs.describe_end(returncode, kills, where, asked=self._stopper.requested),
        )

    def _finish_echo(self) -> None:
        """Passes on what is left. A signal meanwhile, when a paused terminal keeps it waiting, ends that."""
        for echo in self._echoes:
            echo.finish()
        while any(echo.is_alive() for echo in self._echoes):
            info = signal.sigtimedwait(self._signals, _PERIOD_S / 5)
            if info is not None and info.si_signo in _TO_JOB:
                return
