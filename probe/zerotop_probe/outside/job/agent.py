"""The agent, a process beside the job: launches it, records its output, samples it and records how it ended.

The job never depends on it. If the agent is killed the job continues, and the recording ends at that moment.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from zerotop_probe.outside.causes import describe_cause
from zerotop_probe.outside.job import daemon, job_signals
from zerotop_probe.outside.job import job as jobs
from zerotop_probe.outside.job.daemon import AgentError, watch_in_background
from zerotop_probe.outside.job.event_loop import Agent
from zerotop_probe.outside.job.job import ChildJob, CommandError, JobResult, WatchedJob, check_command
from zerotop_probe.outside.job.job_control import CANNOT_WRITE, JobFacts, read_facts
from zerotop_probe.outside.job.outlets import (
    adopt_outlets,
    fill_standard_descriptors,
    leave_outputs,
    open_background_outlet,
    open_outlets,
    release_standard_descriptors,
)
from zerotop_probe.outside.job.output_recording import OutputRecording, find_holder
from zerotop_probe.outside.job.shutdown import GRACE_S
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording.node_part import read_session_value
from zerotop_probe.recording.writer import Identity

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


def launch_in_background(
    recording: str,
    command: Sequence[str],
    *,
    grace_s: tuple[float, float] = GRACE_S,
) -> ProcessHandle:
    """Start ``command`` and its agent in their own sessions, so that they survive the caller and its terminal.

    Return the agent once the job runs. ``grace_s`` is the time between stop signals, see ``shutdown.Stopper``. Raises
    CommandError if the command cannot be executed, AgentError if the agent fails; nothing runs in either case.
    """
    check_command(command)
    grace = [str(seconds) for seconds in grace_s]
    return daemon.start_agent(["--grace", *grace, os.path.abspath(recording), "--", *command])


def run_in_foreground(
    recording: str,
    command: Sequence[str],
    *,
    grace_s: tuple[float, float] = GRACE_S,
    on_message: Callable[[str], None] | None = None,
    record_output: bool = True,
) -> JobResult:
    """Run ``command`` in our terminal and process group; return how it ended.

    Without ``record_output`` it has our standard descriptors itself, for programs that use the whole terminal.
    Its output is passed through byte for byte. Call this from the main thread of a process without other threads: signals
    are blocked and waited for. Once the job runs, our standard input and output are /dev/null and descriptors that we had
    inherited for it are closed: whoever is at their other ends sees it when the job closes them. ``on_message`` receives
    sentences for the user. Raises CommandError if the command cannot be executed, AgentError if its output cannot be read.
    """
    check_command(command)
    closed: list[int] = []
    # Those that our parent ignores, too: the job inherits that, but may have set a handler of its own since.
    signals = job_signals.list_signals()
    with _signals_blocked(signals) as mask:
        try:
            passed_on = _list_inherited_descriptors()
            fill_standard_descriptors(closed)
            outlets, writers = open_outlets(closed) if record_output else leave_outputs(closed)
            output = OutputRecording(recording, Identity.for_this_process("node"), outlets)
            job = _launch_job(recording, command, output, writers, mask, own_session=False)
        except (OSError, AgentError) as error:
            for number in closed:
                os.close(number)
            if isinstance(error, (AgentError, CommandError)):
                raise
            raise AgentError(f"The job's output cannot be read: {describe_cause(error)}") from error
        release_standard_descriptors(passed_on)
        agent = Agent(recording, job, output, foreground=True, grace_s=grace_s, on_message=on_message)
        agent.note_start(command)
        return agent.run()


def _list_inherited_descriptors() -> list[int]:
    """Return the caller's descriptors, besides the standard ones, that the job inherits."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    inherited = []
    for number in numbers:
        with suppress(OSError):  # that of the listing itself
            if os.get_inheritable(number):
                inherited.append(number)
    return inherited


@contextmanager
def _signals_blocked(numbers: Collection[int]) -> Iterator[Collection[int]]:
    """Block signals; yield the previous mask, which is restored at the end."""
    ignored = _unignore_children()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in job_signals.PYTHON_IGNORES:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield mask
    finally:
        for number in job_signals.PYTHON_IGNORES:
            signal.signal(number, signal.SIG_IGN)
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
    recording: str, command: Sequence[str], *, grace_s: tuple[float, float] = GRACE_S
) -> Callable[[], JobResult]:
    """Launch ``command`` in its own session; return a function that records it to its end.

    Raises CommandError, AgentError.
    """
    signals = job_signals.list_handled_signals()
    _unignore_children()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    outlet = open_background_outlet()
    output = OutputRecording(recording, Identity.for_this_process("node"), [outlet])
    job = _launch_job(recording, command, output, [outlet.writer, outlet.writer], mask, own_session=True)
    agent = Agent(recording, job, output, grace_s=grace_s)
    agent.note_start(command)
    return agent.run


def prepare_watch(recording: str, root: ProcessHandle) -> Callable[[], JobResult]:
    """Take over a running job; return a function that records it to its end.

    Raises ProcessLookupError if the job has ended, CommandError if nothing can be written, since then no other process could
    find this agent.
    """
    if not root.is_alive():
        raise ProcessLookupError(f"The job of {recording}, process {root.pid}, has ended")
    signals = job_signals.list_handled_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    facts = read_facts(recording)
    output = _resume_output(recording, root, facts)
    agent = Agent(recording, WatchedJob(root), output, facts=facts)
    if not agent.is_known:
        raise CommandError(errno.ENOSPC, CANNOT_WRITE.format(folder=recording))
    return agent.run


def _resume_output(recording: str, root: ProcessHandle, facts: JobFacts) -> OutputRecording:
    """Return the recording of a running job's output, by its living holder or by a new one.

    A holder that passes output on also notices when the job's reader is gone, so there must be no other reader beside it.
    """
    holder = find_holder(facts.pipes.values())
    outlets = adopt_outlets(root, facts.pipes) if holder is None or not facts.passes_on else []
    return OutputRecording(recording, Identity.for_this_process("node"), outlets, holder=holder)


def watch_job(recording: str, root_pid: int) -> JobResult:
    """Record the running job whose root is ``root_pid`` until it ends, with its output if an agent started it.

    Its output is recorded by the holder that the agent has left, or else by a new one. The exit code is unknown, as the job
    is not our child. Raises ProcessLookupError if there is no such process.
    """
    root = ProcessHandle.from_pid(root_pid)
    if root is None:
        raise ProcessLookupError(f"There is no process {root_pid}")
    with _signals_blocked(job_signals.list_handled_signals()):
        return prepare_watch(recording, root)()


def _launch_job(
    recording: str,
    command: Sequence[str],
    output: OutputRecording,
    writers: Sequence[int | None],
    mask: Collection[int],
    *,
    own_session: bool,
) -> ChildJob:
    """Start the holder, then the job, which writes to ``writers``. Raises CommandError, AgentError."""
    try:
        output.start_holder()
        # In the background the job's output is a pipe, though the user looks at it on a terminal.
        environ = jobs.build_environment(read_session_value(os.path.abspath(recording)), os.environ, unbuffered=own_session)
        # A signal that has come meanwhile, before there is a job, takes its effect on us.
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_SETMASK, mask))
        job = jobs.spawn_job(command, environ, writers=writers, signal_mask=mask, own_session=own_session)
    except BaseException:
        output.close()
        raise
    output.note_job(job.root)
    return job
