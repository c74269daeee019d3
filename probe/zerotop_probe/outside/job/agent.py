"""The agent, a process beside the job: launches it, records its output, samples it and records how it ended.

The job never depends on it. If the agent is killed the job continues, and the recording ends at that moment.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from zerotop_probe.outside.job import daemon
from zerotop_probe.outside.job import job as jobs
from zerotop_probe.outside.job.daemon import AgentError, watch_in_background
from zerotop_probe.outside.job.event_loop import JOB_SIGNALS, STOP_SIGNALS, Agent
from zerotop_probe.outside.job.job import CommandError, Job, JobResult, WatchedJob, check_command
from zerotop_probe.outside.job.job_control import CANNOT_WRITE, read_facts
from zerotop_probe.outside.job.output_buffer import count_recorded_bytes
from zerotop_probe.outside.job.passthrough import Echo, fill_standard_descriptors, is_same_file
from zerotop_probe.outside.job.shutdown import GRACE_S, LEAVE_REQUEST, STOP_REQUEST
from zerotop_probe.outside.job.stream import Stream
from zerotop_probe.outside.procfs import Process
from zerotop_probe.recording import clock

__all__ = [
    "AgentError",
    "CommandError",
    "JobResult",
    "check_command",
    "launch_in_background",
    "run_in_foreground",
    "watch_in_background",
    "watch_job",
]


def launch_in_background(session: str, command: Sequence[str], *, grace_s: tuple[float, float] = GRACE_S) -> Process:
    """Start ``command`` and its agent in their own sessions, so that they survive the caller and its terminal.

    Return the agent once the job runs. ``grace_s`` is the time between stop signals, see ``shutdown.Stopper``. Raises
    CommandError if the command cannot be executed, AgentError if the agent fails; nothing runs in either case.
    """
    check_command(command)
    grace = [str(seconds) for seconds in grace_s]
    return daemon.start_agent(["--grace", *grace, os.path.abspath(session), "--", *command])


def run_in_foreground(session: str, command: Sequence[str], *, grace_s: tuple[float, float] = GRACE_S) -> JobResult:
    """Run ``command`` in our terminal and process group; return how it ended.

    Its output is passed through byte for byte. Call this from the main thread of a process without other threads: signals
    are blocked and waited for. Raises CommandError if the command cannot be executed.
    """
    check_command(command)
    fill_standard_descriptors()
    names = ("output",) if is_same_file(1, 2) else ("stdout", "stderr")
    streams = [Stream.create_stream(name) for name in names]
    signals = _drop_ignored(JOB_SIGNALS) | {signal.SIGCHLD, STOP_REQUEST}
    with _signals_blocked(signals) as mask:
        job = _launch_job(session, command, streams, mask, own_session=False)
        echoes = [Echo(stream, number) for number, stream in enumerate(streams, 1)]
        agent = Agent(session, job, streams, signals=signals, echoes=echoes, grace_s=grace_s)
        agent.note_start(command)
        return agent.run()


@contextmanager
def _signals_blocked(numbers: Collection[int]) -> Iterator[Collection[int]]:
    """Block signals; yield the previous mask, which is restored at the end."""
    ignored = _unignore_children()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _unignore_children() -> bool:
    """Stop ignoring SIGCHLD, and return whether it was ignored.

    Some parents leave it ignored, and then the kernel discards the exit status of children.
    """
    ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return ignored


def prepare_in_background(
    session: str, command: Sequence[str], *, grace_s: tuple[float, float] = GRACE_S
) -> Callable[[], JobResult]:
    """Launch ``command`` in its own session; return a function that records it to its end. Raises CommandError."""
    streams = [Stream.create_stream("output")]
    signals = _list_background_signals()
    _unignore_children()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    job = _launch_job(session, command, streams, mask, own_session=True)
    agent = Agent(session, job, streams, signals=signals, grace_s=grace_s)
    agent.note_start(command)
    return agent.run


def prepare_watch(session: str, root: Process) -> Callable[[], JobResult]:
    """Take over a running job; return a function that records it to its end.

    Raises ProcessLookupError if the job has ended, CommandError if nothing can be written, since then no other process could
    find this agent.
    """
    if not root.is_alive():
        raise ProcessLookupError(f"The job of {session}, process {root.pid}, has ended")
    signals = _list_background_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    streams, facts = _adopt_streams(session, root), read_facts(session)
    ranks = facts.ranks if facts.attached else None
    agent = Agent(session, WatchedJob(root), streams, signals=signals, attached_ranks=ranks, joined=facts.joined)
    if not agent.is_known:
        raise CommandError(errno.ENOSPC, CANNOT_WRITE.format(folder=session))
    return agent.run


def watch_job(session: str, root_pid: int) -> JobResult:
    """Record the running job whose root is ``root_pid`` until it ends, with its output if an agent started it.

    Output printed since that agent died has stayed in memory; it is recorded now, with the current time. Output of a job in
    the foreground is recorded but no longer passed through. The exit code is unknown, as the job is not our child. Raises
    ProcessLookupError if there is no such process.
    """
    root = Process.from_pid(root_pid)
    if root is None:
        raise ProcessLookupError(f"There is no process {root_pid}")
    with _signals_blocked(_list_background_signals()):
        return prepare_watch(session, root)()


def _adopt_streams(session: str, root: Process) -> list[Stream]:
    streams = []
    for name, number in (("output", 1), ("stdout", 1), ("stderr", 2)):
        stream = Stream.adopt_stream(name, root, number, count_recorded_bytes(session, clock.read_hostname(), name))
        if stream is not None:
            streams.append(stream)
    return streams


def _drop_ignored(numbers: Sequence[signal.Signals]) -> set[int]:
    """Return the signals that our parent did not set to be ignored, as nohup does with SIGHUP."""
    return {number for number in numbers if signal.getsignal(number) != signal.SIG_IGN}


def _list_background_signals() -> set[int]:
    return {*STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD, STOP_REQUEST, LEAVE_REQUEST}


def _launch_job(
    session: str, command: Sequence[str], streams: Sequence[Stream], mask: Collection[int], *, own_session: bool
) -> Job:
    writers = [stream.open_writer() for stream in streams]
    try:
        environ = jobs.build_environment(os.path.abspath(session), os.environ)
        return jobs.spawn_job(
            command, environ, stdout=writers[0], stderr=writers[-1], signal_mask=mask, own_session=own_session
        )
    except CommandError:
        for stream in streams:
            stream.close()
        raise
    finally:
        for writer in writers:
            os.close(writer)
