"""Starting an agent that outlives its parent and the terminal, and learning from it whether the job runs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from zerotop_probe.outside import own_python
from zerotop_probe.outside.job.job import CommandError, JobResult
from zerotop_probe.outside.job.job_control import is_sampler_alive, read_facts
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording import clock

_ANSWER_KEY = "zerotop_agent"
# Followed by the root's pid and start time, and the recording.
WATCH_OPTION = "--watch"


class AgentError(RuntimeError):
    """The agent could not be started, for a reason other than the command."""


class StartingAgent:
    """An agent that is being started while the caller continues."""

    def __init__(self, pid: int, answers: int) -> None:
        self._pid = pid
        self._answer_descriptor = answers

    def await_agent(self) -> ProcessHandle:
        """Wait until its job runs; may be called once. Raises the errors of :func:`start_agent`."""
        with open(self._answer_descriptor, "rb") as file:
            lines = [line.decode(errors="replace").rstrip("\n") for line in _iter_until_answer(file)]
        os.waitpid(self._pid, 0)
        return _parse_answer(lines)


def start_agent(arguments: Sequence[str]) -> ProcessHandle:
    """Start an agent with these arguments in its own session; return it once its job runs.

    Raises CommandError if the job's command could not be executed, AgentError if the agent itself failed.
    """
    return spawn_agent(arguments).await_agent()


def spawn_agent(arguments: Sequence[str]) -> StartingAgent:
    """Start an agent without waiting for it. Raises OSError if no process can be started."""
    reading, writing = os.pipe()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        # An error before the agent can answer, such as a failing import, arrives the same way as its answer.
        (os.POSIX_SPAWN_DUP2, writing, 2),
    ]
    command = own_python.build_command("zerotop_probe.outside.__main__", "--daemon", *arguments)
    try:
        pid = os.posix_spawn(command[0], command, own_python.build_environment(), file_actions=actions, setsid=True)
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return StartingAgent(pid, reading)


def spawn_watcher(recording: str) -> StartingAgent | None:
    """Start a new agent for a job whose agent has died, without waiting; None if the agent lives or the job has ended."""
    root = read_facts(recording).job
    if root is None or not root.is_alive() or is_sampler_alive(recording):
        return None
    return spawn_agent([WATCH_OPTION, str(root.pid), str(root.start), os.path.abspath(recording)])


def watch_in_background(recording: str) -> ProcessHandle | None:
    """Start a new agent as :func:`spawn_watcher` does, and wait until it runs. Raises AgentError, OSError."""
    starting = spawn_watcher(recording)
    return None if starting is None else starting.await_agent()


def _iter_until_answer(lines: Iterable[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield line
        if line.startswith(b'{"' + _ANSWER_KEY.encode()):
            return


def _parse_answer(lines: list[str]) -> ProcessHandle:
    try:
        answer = json.loads(lines[-1])[_ANSWER_KEY]
    except (IndexError, ValueError, KeyError, TypeError):
        reason = lines[-1] if lines else "it exited without an error message"
        raise AgentError(f"The sampler could not be started: {reason}") from None
    if "error" in answer:
        raise CommandError(answer["errno"], answer["error"])
    return ProcessHandle(answer["pid"], answer["start"])


def serve_agent(prepare: Callable[[], Callable[[], JobResult]]) -> None:
    """Run as the agent that :func:`spawn_agent` started: ``prepare`` launches the job and returns its loop."""
    if os.fork():
        os._exit(0)  # so that our parent need not wait for us
    try:
        run = prepare()
    except CommandError as error:
        _send_answer({"errno": error.errno, "error": error.strerror})
        return
    except AgentError as error:
        print(error, file=sys.stderr)
        return
    _send_answer({"pid": os.getpid(), "start": clock.read_process_start(os.getpid())})
    _detach_terminal()
    run()


def _send_answer(value: dict[str, object]) -> None:
    # The parent may have been killed meanwhile; the job runs all the same.
    with contextlib.suppress(OSError):
        os.write(2, json.dumps({_ANSWER_KEY: value}).encode() + b"\n")


def _detach_terminal() -> None:
    """Release the parent's pipe and working directory."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
    os.chdir("/")
