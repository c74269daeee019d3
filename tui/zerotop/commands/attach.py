"""``zerotop attach``: watch a running job, even if zerotop did not start it, and inject the probe into its ranks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from zerotop.commands.common.errors import USAGE, Problem

# The screen is imported after the sampler has been started: both take about as long, and so overlap.
from zerotop.commands.common.exit_messages import write_messages
from zerotop.commands.common.gc_pause import freeze_imports
from zerotop.commands.common.recording_lookup import find_recording, find_recording_or_job
from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.job.attach_probe import enter_local_ranks, enter_ranks, start_entering
from zerotop_probe.outside.attaching import attaching
from zerotop_probe.outside.attaching.jobs import FoundJob, find_job
from zerotop_probe.outside.causes import check_needs
from zerotop_probe.outside.job import daemon, job_control

_POLL_S = 0.2
_NO_TERMINAL = "The live screen needs a terminal; --headless records without one"


def attach(options: argparse.Namespace) -> int:
    """Watch the job. Return its exit code if it is known when the screen closes, else 0."""
    if options.there is not None:
        from zerotop_probe.outside.attaching.remote_agent import print_answer

        return print_answer(options.there)
    if options.recording is None:
        if options.hosts is not None:
            raise Problem("--hosts needs a PID or RECORDING: name a process or the recording of the job on this node", USAGE)
        from zerotop.commands.job.job_list import print_jobs

        check_needs()
        return print_jobs(as_json=options.json)
    if not (options.headless or has_terminal()) and options.recording.isdecimal() and find_job(int(options.recording)):
        raise Problem(_NO_TERMINAL)
    if options.hosts is not None or options.ssh is not None:
        from zerotop.commands.job import remote_nodes

        remote_nodes.check_options(options)
    check_needs()
    path, await_sampler = _find_recording(options)
    if options.headless or options.hosts is not None or not has_terminal():
        await_sampler()
        _enter_without_screen(path, options)
        if options.headless:
            return _await_end(path)
        if not has_terminal():
            raise Problem(_NO_TERMINAL)
    await_entry = start_entering(path) if options.enter and options.hosts is None else None
    with freeze_imports():
        from zerotop.commands.job.watch import watch_job

    await_sampler()
    return watch_job(path, await_entry)


def _enter_without_screen(path: Path, options: argparse.Namespace) -> None:
    if options.hosts is not None:
        write_messages(*_join_hosts(path, options))
    elif options.enter:
        write_messages(*enter_ranks(path)[1])


def _find_recording(options: argparse.Namespace) -> tuple[Path, Callable[[], None]]:
    """Return the recording of a PID or RECORDING, and a function that waits for its sampler to start.

    Create a recording, in ``options.folder`` if given, for a job that is not being recorded.
    """
    text, folder = options.recording, options.folder
    target = find_recording_or_job(text)
    if target is None:
        from zerotop.commands.recordings import list_live_names

        names = list_live_names()
        live = f". Live recordings: {', '.join(names)}" if names else ""
        raise Problem(f"Process {text} is not a Python process of a job here. zerotop attach lists the jobs{live}", USAGE)
    existing = find_recording(target) if isinstance(target, FoundJob) else target
    if existing is not None:
        if folder is not None and existing.absolute() != Path(folder).absolute():
            raise Problem(f"The job is already recorded in {existing}: omit --recording, or detach first")
        return existing, _resume_sampler(existing)
    assert isinstance(target, FoundJob)
    path = Path(attaching.begin_recording(target, folder, options.max_size, stacks=not options.no_stacks))
    return path, _start_sampler(path, new=True)


def _resume_sampler(path: Path) -> Callable[[], None]:
    """Start a sampler for a recording without one; return a function that waits for it."""
    from zerotop.commands.recordings import is_live
    from zerotop.recording.reader import Recording

    recording = Recording.open(path)
    if path.is_file():
        raise Problem(f"{path} is a packed recording; watch it with: zerotop replay {path}")
    if is_live(recording):
        return _start_sampler(path)
    if _resume_detached(path):
        return _start_sampler(path, new=True)
    raise Problem(f"The job of {path.name} has ended; watch the recording with: zerotop replay {path.name}")


def _join_hosts(path: Path, options: argparse.Namespace) -> list[str]:
    """Have the job's other nodes take part; return messages. A failure there does not affect this node."""
    from zerotop.commands.job import remote_nodes

    local_messages: list[str] = []

    def enter_local() -> None:
        if options.enter:
            local_messages.extend(enter_local_ranks(path)[1])

    try:
        names = remote_nodes.find_hosts(options.hosts, path)
    except Problem as error:
        enter_local()
        return [*local_messages, f"{error}."]
    try:
        messages = remote_nodes.join_hosts(path, names, enter=options.enter, meanwhile=enter_local)[1]
    except Problem as error:
        messages = [f"{error}."]
    return local_messages + messages


def _resume_detached(path: Path) -> bool:
    """Resume a detached recording if its job still runs here; return whether it does."""
    facts = job_control.read_facts(str(path))
    job = find_job(facts.job.pid) if facts.detached and facts.job is not None and facts.job.is_alive() else None
    if job is None:
        return False
    attaching.note_attached(str(path), job)
    return True


def _start_sampler(path: Path, *, new: bool = False) -> Callable[[], None]:
    """Start a sampler, a ``new`` one or one that replaces a dead one; return a function that waits for it."""
    failure = "Cannot start the job's sampler" if new else "The job's sampler died and cannot be restarted"
    try:
        starting = daemon.spawn_watcher(str(path))
    except OSError as error:
        write_messages(f"{failure}: {error}")
        return lambda: None

    def await_answer() -> None:
        if starting is None:
            return
        try:
            starting.await_agent()
        except (daemon.AgentError, OSError) as error:
            write_messages(f"{failure}: {error}")
        else:
            write_messages(*[] if new else ["The job's sampler had died: a new one records from now on."])

    return await_answer


def _await_end(path: Path) -> int:
    """Wait without a screen until the recording ends; Ctrl-C leaves it running. Raises Problem without a sampler."""
    folder = str(path)
    if not job_control.is_sampler_alive(folder):
        raise Problem("The job is not being recorded")
    write_messages(f"recording in {path}")
    try:
        while job_control.is_sampler_alive(folder):
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        write_messages(f"The job and its recording continue. Stop recording with: zerotop detach {path.name}")
    return 0
