"""Querying and stopping the job of a recording, from any process of the same user on the same node."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerotop_probe.outside.job.shutdown import LEAVE_REQUEST, STAGES, STOP_REQUEST, signal_job
from zerotop_probe.outside.procfs import ProcessHandle, read_environment, read_owner
from zerotop_probe.recording import clock, events
from zerotop_probe.recording.directory import COLLECTED, SESSION_VARIABLE, read_recording_info
from zerotop_probe.recording.node_part import read_session_value
from zerotop_probe.recording.plain_files import open_plain_file
from zerotop_probe.recording.writer import EventWriter, Identity

CANNOT_WRITE = "nothing can be written to {folder}: make room there, or choose another folder with --recording"

_MAX_LINE_BYTES = 1 << 22  # of an event

# Raised by events with missing or invalid facts.
_DAMAGE_ERRORS = (ValueError, TypeError, AttributeError, LookupError, OverflowError)


class JobUnreachable(ProcessLookupError):
    """The job of this recording cannot be reached from here; the text is a sentence that says why."""


@dataclass
class JobFacts:
    """The processes of a recording's job on this node, according to its events."""

    samplers: list[ProcessHandle] = field(default_factory=list)  # those that have not ended normally
    job: ProcessHandle | None = None
    ranks: list[ProcessHandle] = field(default_factory=list)
    without_probe: dict[ProcessHandle, int | None] = field(default_factory=dict)  # ranks, and their numbers if known
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
    collected: bool = False  # the recording came over the network

    def is_alive(self) -> bool:
        """Whether the job's root, or a rank that outlived it, runs."""
        return any(process.is_alive() for process in ([self.job] if self.job is not None else []) + self.ranks)


def read_facts(recording: str) -> JobFacts:
    """Read the events that samplers and commands of this node wrote since its last boot."""
    facts = JobFacts()
    info = read_recording_info(recording)
    if COLLECTED in info:  # what came over the network names no process here
        facts.other_host, facts.collected = str(info.get("host") or "another node"), True
        return facts
    unsorted: list[tuple[dict[str, Any], _Author]] = []
    here = (clock.read_hostname(), clock.read_boot_id())
    for path in sorted(glob.glob(os.path.join(glob.escape(recording), "events-[nc]*.jsonl"))):
        writer, author = _read_writer(path, recording)
        if (writer.get("host"), writer.get("boot")) != here:
            facts.other_host = str(writer.get("host") or "")
            continue
        if f"-{here[0]}-" not in os.path.basename(path):  # it came over the network, and names no process here
            continue
        found = [(event, author) for event in iter_events(path)]
        has_ended = any(event.get("event") == events.SamplerEnded.event_name for event, _ in found)
        if writer.get("role") == "node" and not has_ended:
            with contextlib.suppress(*_DAMAGE_ERRORS):
                facts.samplers += author.keep_believable([ProcessHandle(int(writer["pid"]), int(writer["start"]))])
        unsorted += found
    # Attaching and detaching write separate files; the times of one boot are comparable.
    for event, author in sorted(unsorted, key=_get_time_ns):
        with contextlib.suppress(*_DAMAGE_ERRORS):
            _apply_event(facts, event, author)
    return facts


@dataclass(frozen=True)
class _Author:
    """The user who owns a file of events, and the claims of that user that are trusted.

    A file may say that processes belong to a job, and ours can be signalled because of it. In a folder where others may
    write, only files of this user or of root are trusted. Root trusts other users about their own processes.
    """

    user: int
    recording: str

    @property
    def is_trusted(self) -> bool:
        """Whether everything in the file is believed."""
        return self.user in (os.geteuid(), 0)

    def keep_believable(self, processes: Iterable[ProcessHandle]) -> list[ProcessHandle]:
        """Return the processes that the file may name."""
        return [process for process in processes if self.is_trusted or self._may_name(process)]

    def _may_name(self, process: ProcessHandle) -> bool:
        if os.geteuid() == 0 and read_owner(process.pid) == self.user:
            return True
        # The launcher says so itself. On a network file system the files of root may belong to nobody.
        return read_environment(process.pid).get(SESSION_VARIABLE) == read_session_value(self.recording)


_WRITER_BY_PATH: dict[str, tuple[dict[str, Any], _Author]] = {}  # a cache for processes that poll


def _read_writer(path: str, recording: str) -> tuple[dict[str, Any], _Author]:
    """Return the writer of a file from its first line, which never changes once it is written, and the file's owner."""
    if path not in _WRITER_BY_PATH:
        writer = next(iter_events(path), {}).get("writer")
        author = _Author(_read_file_owner(path), os.path.abspath(recording))
        if not writer or not isinstance(writer, dict):
            return {}, author
        _WRITER_BY_PATH[path] = writer, author
    return _WRITER_BY_PATH[path]


def _read_file_owner(path: str) -> int:
    """Return the user who owns a file; -1 if it is gone."""
    try:
        return os.lstat(path).st_uid
    except OSError:
        return -1


def _get_time_ns(item: tuple[dict[str, Any], _Author]) -> int:
    time_ns = item[0].get("time_ns")
    return time_ns if isinstance(time_ns, int) else 0


def iter_events(path: str, kinds: Sequence[type[events.Event]] = ()) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, or the events of these kinds; skip truncated, invalid and overlong lines."""
    names = [kind.event_name for kind in kinds]
    try:
        with open(open_plain_file(path), "rb") as file:
            for line in iter(lambda: file.readline(_MAX_LINE_BYTES), b""):
                if names and not any(f'"{name}"'.encode() in line for name in names):
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(value, dict) and (not names or value.get("event") in names):
                    yield value
    except OSError:
        return


def _apply_event(facts: JobFacts, event: dict[str, Any], author: _Author) -> None:
    kind = events.EVENTS.get(str(event.get("event")))
    _update_attached(facts, event, author)
    if kind in (events.Attached, events.Joined, events.JobStarted):
        facts.job = next(iter(author.keep_believable([_parse_process(event)])), facts.job)
    elif kind is events.Reached and author.is_trusted:
        _update_reached(facts, str(event.get("name")), joined=bool(event.get("joined")))
    elif kind is events.RankFound:
        facts.ranks += author.keep_believable([_parse_process(event)])
    elif kind is events.ProbeMissing:
        _update_without_probe(facts, event, author.keep_believable([_parse_process(event)]))
    elif kind is events.NotEntered and event.get("pending"):
        facts.pending_pids.add(int(event.get("pid") or 0))
    elif kind is events.OutputHolder:
        _update_pipes(facts, event)
    elif kind is events.StopSent:
        facts.stops_sent += 1
    elif kind is events.JobEnded or (kind is events.Parted and "exit_code" in event):
        facts.ended = True


def _update_attached(facts: JobFacts, event: dict[str, Any], author: _Author) -> None:
    kind = events.EVENTS.get(str(event.get("event")))
    if kind in (events.Detached, events.Parted):
        facts.detached = True
    elif kind in (events.Attached, events.Joined):
        facts.attached, facts.detached = True, False
        facts.joined = kind is events.Joined
        facts.ranks += author.keep_believable(map(_parse_process, event.get("ranks") or ()))


def _update_pipes(facts: JobFacts, event: dict[str, Any]) -> None:
    facts.pipes = {str(stream): str(pipe) for stream, pipe in event.get("pipes", {}).items()}
    facts.passes_on = bool(event.get("passes_on"))


def _update_without_probe(facts: JobFacts, event: dict[str, Any], processes: Iterable[ProcessHandle]) -> None:
    for process in processes:
        facts.without_probe.pop(process, None)
        if event.get("is_rank"):
            facts.without_probe[process] = event.get("rank")


def _update_reached(facts: JobFacts, name: str, *, joined: bool) -> None:
    others = [other for other in facts.reached_hosts if other != name]
    facts.reached_hosts = [*others, name] if joined else others


def _parse_process(event: dict[str, Any]) -> ProcessHandle:
    return ProcessHandle(int(event.get("pid") or 0), int(event.get("start") or 0))


def is_sampler_alive(recording: str) -> bool:
    """Whether a sampler of this recording runs on this node."""
    return any(sampler.is_alive() for sampler in read_facts(recording).samplers)


def is_job_alive(recording: str) -> bool:
    """Whether the job's root, or a rank that outlived it, runs on this node."""
    return read_facts(recording).is_alive()


def end_recording(recording: str) -> bool:
    """Ask the samplers of an attached job to exit; return whether there was one. The job continues."""
    return sum(sampler.send_signal(LEAVE_REQUEST) for sampler in read_facts(recording).samplers) > 0


def is_recorded_no_more(recording: str) -> bool:
    """Whether nothing more will be recorded on this node: the job has ended, or was detached from."""
    facts = read_facts(recording)
    is_over = facts.detached or (facts.job is not None and not facts.is_alive())
    return not os.path.isdir(recording) or (is_over and not any(sampler.is_alive() for sampler in facts.samplers))


def is_job_here(recording: str) -> bool:
    """Whether the job runs or ran on this node since its last boot; else the other answers are meaningless."""
    return read_facts(recording).job is not None


def request_stop(recording: str) -> None:
    """Request that the job stop; each further call uses the next stronger signal.

    A living sampler does this and escalates by itself from SIGINT to SIGTERM to SIGKILL, see ``shutdown.Stopper``. Without
    one each call sends the next of these signals. Returns at once; does nothing to a job that has ended.

    Raises JobUnreachable if its job did not start on this machine, PermissionError if it belongs to another user.
    """
    facts = read_facts(recording)
    for sampler in facts.samplers:
        if sampler.send_signal(STOP_REQUEST):
            return
    if facts.job is None:
        raise JobUnreachable(f"The job of {recording} cannot be stopped from here: {_explain_unreachable(facts)}")
    _stop_without_sampler(recording, facts, facts.job)


def _explain_unreachable(facts: JobFacts) -> str:
    if not facts.other_host:
        return "its recording does not say that it was started"
    if facts.other_host == clock.read_hostname() and not facts.collected:
        return "it ran before this machine was restarted"
    return f"it was started on {facts.other_host}; stop it there"


def _stop_without_sampler(recording: str, facts: JobFacts, root: ProcessHandle) -> None:
    number = STAGES[min(facts.stops_sent, len(STAGES) - 1)]
    if signal_job(root, recording, number, facts.ranks):
        identity = Identity.for_this_process("control")
        writer = EventWriter(recording, identity)
        writer.write(time.monotonic_ns(), events.StopSent, signal=number.name)
        writer.close()
