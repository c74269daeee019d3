"""Querying and stopping the job of a session, from any process of the same user on the same node."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zerotop_probe.outside.job.shutdown import LEAVE_REQUEST, STAGES, STOP_REQUEST, signal_job
from zerotop_probe.outside.procfs import Process
from zerotop_probe.recording import clock, events
from zerotop_probe.recording.writer import EventWriter, Identity

CANNOT_WRITE = "nothing can be written to {folder}: make room there, or choose another folder with --session"

# Raised by events with missing or invalid facts.
_DAMAGE_ERRORS = (ValueError, TypeError, AttributeError, LookupError, OverflowError)


class JobUnreachable(ProcessLookupError):
    """The job of this session cannot be reached from here; the text is a sentence that says why."""


@dataclass
class JobFacts:
    """The processes of a session's job on this node, according to its events."""

    samplers: list[Process] = field(default_factory=list)
    job: Process | None = None
    ranks: list[Process] = field(default_factory=list)
    # The pipes that the job's output goes through, by stream, and whether their reader passes output on.
    pipes: dict[str, str] = field(default_factory=dict)
    passes_on: bool = False
    stops_sent: int = 0
    ended: bool = False
    # The recording began by attaching to a running job.
    attached: bool = False
    detached: bool = False
    # The recording began on another node and this node joined it.
    joined: bool = False
    # Other nodes that were joined from here, by their ssh names.
    reached_hosts: list[str] = field(default_factory=list)
    # Ranks that were asked to load the probe and had not answered: they will load it later.
    pending_pids: set[int] = field(default_factory=set)
    other_host: str = ""  # the host, if the job ran on another machine or before this one was restarted

    def is_alive(self) -> bool:
        """Whether the job's root, or a rank that outlived it, runs."""
        return any(process.is_alive() for process in ([self.job] if self.job is not None else []) + self.ranks)


def read_facts(session: str) -> JobFacts:
    """Read the events that samplers and commands of this node wrote since its last boot."""
    facts = JobFacts()
    unsorted: list[dict[str, Any]] = []
    here = (clock.read_hostname(), clock.read_boot_id())
    for path in sorted(glob.glob(os.path.join(glob.escape(session), "events-[nc]*.jsonl"))):
        writer = _read_writer(path)
        if (writer.get("host"), writer.get("boot")) != here:
            facts.other_host = str(writer.get("host") or "")
            continue
        if writer.get("role") == "node":
            with contextlib.suppress(*_DAMAGE_ERRORS):
                facts.samplers.append(Process(int(writer["pid"]), int(writer["start"])))
        unsorted += _iter_events(path)
    # Attaching and detaching write separate files; the times of one boot are comparable.
    for event in sorted(unsorted, key=_get_time_ns):
        with contextlib.suppress(*_DAMAGE_ERRORS):
            _apply_event(facts, event)
    return facts


_WRITER_BY_PATH: dict[str, dict[str, Any]] = {}  # a cache for processes that poll


def _read_writer(path: str) -> dict[str, Any]:
    """Return the writer of a file from its first line, which never changes once it is written."""
    if path not in _WRITER_BY_PATH:
        writer = next(_iter_events(path), {}).get("writer")
        if not writer or not isinstance(writer, dict):
            return {}
        _WRITER_BY_PATH[path] = writer
    return _WRITER_BY_PATH[path]


def _get_time_ns(event: dict[str, Any]) -> int:
    time_ns = event.get("time_ns")
    return time_ns if isinstance(time_ns, int) else 0


def _iter_events(path: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file; skip truncated and invalid lines."""
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(value, dict):
                    yield value
    except OSError:
        return


def _apply_event(facts: JobFacts, event: dict[str, Any]) -> None:
    name = event.get("event")
    if name in (events.ATTACHED, events.JOINED, events.DETACHED, events.PARTED):
        facts.detached = name in (events.DETACHED, events.PARTED)
    if name in (events.ATTACHED, events.JOINED):
        facts.attached = True
        facts.joined = name == events.JOINED
        facts.job = _parse_process(event)
        facts.ranks += map(_parse_process, event.get("ranks") or ())
    elif name == events.REACHED:
        _update_reached(facts, str(event.get("name")), joined=bool(event.get("joined")))
    elif name in (events.JOB_STARTED, events.RANK_FOUND):
        if name == events.JOB_STARTED:
            facts.job = _parse_process(event)
        else:
            facts.ranks.append(_parse_process(event))
    elif name == events.NOT_ENTERED and event.get("pending"):
        facts.pending_pids.add(int(event.get("pid") or 0))
    elif name == events.OUTPUT_HOLDER:
        facts.pipes = {str(stream): str(pipe) for stream, pipe in event.get("pipes", {}).items()}
        facts.passes_on = bool(event.get("passes_on"))
    elif name == events.STOP_SENT:
        facts.stops_sent += 1
    elif name == events.JOB_ENDED or (name == events.PARTED and "exit_code" in event):
        facts.ended = True


def _update_reached(facts: JobFacts, name: str, *, joined: bool) -> None:
    others = [other for other in facts.reached_hosts if other != name]
    facts.reached_hosts = [*others, name] if joined else others


def _parse_process(event: dict[str, Any]) -> Process:
    return Process(int(event.get("pid") or 0), int(event.get("start") or 0))


def is_sampler_alive(session: str) -> bool:
    """Whether a sampler of this session runs on this node."""
    return any(sampler.is_alive() for sampler in read_facts(session).samplers)


def is_job_alive(session: str) -> bool:
    """Whether the job's root, or a rank that outlived it, runs on this node."""
    return read_facts(session).is_alive()


def end_recording(session: str) -> bool:
    """Ask the samplers of an attached job to exit; return whether there was one. The job continues."""
    return sum(sampler.send_signal(LEAVE_REQUEST) for sampler in read_facts(session).samplers) > 0


def is_job_here(session: str) -> bool:
    """Whether the job runs or ran on this node since its last boot; else the other answers are meaningless."""
    return read_facts(session).job is not None


def request_stop(session: str) -> None:
    """Request that the job stop; each further call uses the next stronger signal.

    A living sampler does this and escalates by itself from SIGINT to SIGTERM to SIGKILL, see ``shutdown.Stopper``. Without
    one each call sends the next of these signals. Returns at once; does nothing to a job that has ended.

    Raises JobUnreachable if the session's job did not start on this machine, PermissionError if it belongs to another user.
    """
    facts = read_facts(session)
    for sampler in facts.samplers:
        if sampler.send_signal(STOP_REQUEST):
            return
    if facts.job is None:
        raise JobUnreachable(f"The job of {session} cannot be stopped from here: {_explain_unreachable(facts)}")
    _stop_without_sampler(session, facts, facts.job)


def _explain_unreachable(facts: JobFacts) -> str:
    if not facts.other_host:
        return "its recording does not say that it was started"
    if facts.other_host == clock.read_hostname():
        return "it ran before this machine was restarted"
    return f"it was started on {facts.other_host}; stop it there"


def _stop_without_sampler(session: str, facts: JobFacts, root: Process) -> None:
    number = STAGES[min(facts.stops_sent, len(STAGES) - 1)]
    if signal_job(root, session, number, facts.ranks):
        identity = Identity.for_this_process("control")
        writer = EventWriter(session, identity)
        writer.write(time.monotonic_ns(), events.STOP_SENT, signal=number.name)
        writer.close()
