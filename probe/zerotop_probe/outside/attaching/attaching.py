"""Recordings of jobs that zerotop attached to: creating and ending them, and recording which ranks were entered."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import time
from collections.abc import Mapping, Sequence

from zerotop_probe.outside import procfs
from zerotop_probe.outside.attaching.jobs import FoundJob
from zerotop_probe.outside.attaching.probe_entry import Entry, enter_processes, leave_processes
from zerotop_probe.outside.job import daemon, job_control
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording import clock, directory, events, redact
from zerotop_probe.recording.writer import EventWriter, Identity

_MISSING_TEXT = (
    "Attached to a job that had been running for {age}: earlier data and its output are not recorded. Phases, steps and "
    "PyTorch memory are recorded for ranks that the probe has entered"
)

# How long a sampler may take to exit.
_ENDING_S = 3.0
_POLL_S = 0.02
_NO_HEADER: Mapping[str, object] = {}


def begin_recording(job: FoundJob, path: str | None = None, max_bytes: int | None = None, *, stacks: bool = True) -> str:
    """Create a recording for a running job; nothing records to it yet.

    Raises FileExistsError if ``path`` is not empty, else OSError with a sentence; no files remain then.
    """
    existed = path is not None and os.path.isdir(os.path.abspath(path))
    try:
        recording = _create_recording(job, path, {"max_bytes": max_bytes, directory.STACKS_SETTING: stacks})
    except OSError as error:
        if error.errno is None:
            raise
        raise _make_error(directory.find_default_root() if path is None else path, error.errno) from error
    if job_control.read_facts(recording).job is None:
        _discard_recording(recording, keep_folder=existed)
        raise _make_error(recording, errno.ENOSPC)
    return recording


def _create_recording(job: FoundJob, path: str | None, settings: Mapping[str, object]) -> str:
    recording = directory.create_recording(
        job.command,
        path=path,
        launcher=job.launcher,
        working_directory=job.working_directory,
        **settings,
        attached={"pid": job.root.pid, "start": job.root.start, "age_s": job.age_s},
    )
    note_attached(recording, job)
    return recording


def _make_error(folder: str, number: int) -> OSError:
    return OSError(number, f"Cannot record to {folder}: {os.strerror(number)}. Choose another folder with --recording DIR")


def _discard_recording(recording: str, *, keep_folder: bool) -> None:
    """Remove a new recording."""
    with contextlib.suppress(OSError):
        for name in os.listdir(recording):
            os.unlink(os.path.join(recording, name))
        if not keep_folder:
            os.rmdir(recording)


def note_attached(recording: str, job: FoundJob) -> None:
    """Record that the recording of the job begins now, and which data is missing."""
    _note_job(recording, events.Attached, job)


def note_joined(recording: str, job: FoundJob, *, ahead_ns: int = 0) -> None:
    """Record that this node joins a job whose recording began on another node.

    ``ahead_ns``: how far this node's clock is ahead of the other's; readers correct this node's times by it.
    """
    pair = clock.read_clock_pair()
    aligned = {"clock": {**pair, "unix_ns": pair["unix_ns"] - ahead_ns}, "aligned": True}
    _note_job(recording, events.Joined, job, aligned if ahead_ns else {})


def note_reached(recording: str, name: str, *, host: str, ranks: int = 0, joined: bool) -> None:
    """Record that another node has joined or left."""
    _write_event(recording, events.Reached, name=name, host=host, ranks=ranks, joined=joined)


def note_not_reached(recording: str, name: str, why: str) -> None:
    """Record that another node did not join."""
    _write_event(recording, events.NotReached, name=name, why=why)


def _note_job(recording: str, event: type[events.Event], job: FoundJob, header: Mapping[str, object] = _NO_HEADER) -> None:
    _write_event(
        recording,
        event,
        header,
        pid=job.root.pid,
        start=job.root.start,
        command=redact.redact_command(job.command),
        launcher=job.launcher,
        age_s=job.age_s,
        ranks=[{"rank": rank.rank, "pid": rank.process.pid, "start": rank.process.start} for rank in job.ranks],
        text=f"{_MISSING_TEXT.format(age=format_age(job.age_s))}.",
    )


def find_sampled_recording(job: FoundJob) -> str | None:
    """Return the recording to which a sampler on this node records this job; None if there is none."""
    root = [str(job.root.pid), str(job.root.start)]
    for pid, attributes in procfs.iter_processes("cmdline"):
        arguments: list[str] = attributes["cmdline"] or []
        if daemon.WATCH_OPTION in arguments[-4:-3] and arguments[-3:-1] == root:
            recording = arguments[-1]
            if ProcessHandle.from_pid(pid) in job_control.read_facts(recording).samplers:
                return recording
    return None


def enter_ranks(recording: str, ranks: Sequence[tuple[int | None, ProcessHandle]]) -> list[Entry]:
    """Enter these ranks; record why a rank was not entered. See :func:`probe_entry.enter_processes`."""
    numbers = {process: number for number, process in ranks}
    entries = enter_processes(numbers, recording)
    for entry in entries:
        if entry.why_not:
            _write_event(
                recording, events.NotEntered, rank=numbers[entry.process], pid=entry.process.pid, why=entry.why_not,
                pending=entry.is_pending,
            )  # fmt: skip
    return entries


def end_recording(recording: str) -> list[Entry]:
    """Unload the probe from all ranks, and end the recording if it began by attaching. The job continues.

    Return the result for each rank that may hold the probe.
    """
    facts = job_control.read_facts(recording)
    alive = [process for process in dict.fromkeys(facts.ranks) if process.is_alive()]
    entries = leave_processes([process for process in alive if may_hold_probe(recording, facts, process.pid)], recording)
    if facts.attached:
        stop_recording(recording, joined=facts.joined)
    return entries


def stop_recording(recording: str, *, joined: bool = False) -> None:
    """End the recording of a running job, without the probe; ``joined``: this node's part of it."""
    job_control.end_recording(recording)
    deadline_s = time.monotonic() + _ENDING_S
    while job_control.is_sampler_alive(recording) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    _write_event(recording, events.Parted if joined else events.Detached)


def find_rank_files(recording: str, pid: int) -> list[str]:
    """Return the events files that the probe in a process of this node has written."""
    pattern = f"events-rank*-{glob.escape(clock.read_hostname())}-{pid}[.]*"
    return glob.glob(os.path.join(glob.escape(recording), pattern))


def may_hold_probe(recording: str, facts: job_control.JobFacts, pid: int) -> bool:
    """Whether the probe is in a process or may be loaded at any moment. Other processes are left alone."""
    # Left by a command that ended before the answer came.
    unanswered = glob.glob(os.path.join(glob.escape(recording), f"answer-{pid}-*"))
    return bool(pid in facts.pending_pids or unanswered or find_rank_files(recording, pid))


def _write_event(
    recording: str, event: type[events.Event], header: Mapping[str, object] = _NO_HEADER, /, **facts: object
) -> None:
    writer = EventWriter(recording, Identity.for_this_process("control"), **header)
    writer.write(time.monotonic_ns(), event, **facts)
    writer.close()


def format_age(seconds: float) -> str:
    """Return for example "9 h 12 min" or "40 s"."""
    minutes = int(seconds) // 60
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
