"""``zerotop attach``: the live screen of a job that runs already, whoever started it, and the probe into its ranks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from zerotop.commands.common.errors import USAGE, Problem

# What else is needed is imported where it is: the sampler is started before the screen is imported, since both take as long.
from zerotop.commands.common.exit_messages import write_messages
from zerotop.commands.common.gc_pause import freeze_imports
from zerotop.commands.common.session_lookup import find_recording, find_session_or_job
from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.job.attach_probe import enter_local_ranks, enter_ranks, start_entering
from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import FoundJob, find_job
from zerotop_probe.outside.job import daemon, job_control

_POLL_S = 0.2


def attach(options: argparse.Namespace) -> int:
    """Returns the job's exit code if it is known when the screen is left, else 0."""
    if options.there is not None:
        from zerotop_probe.outside.attaching.remote_agent import print_answer

        return print_answer(options.there)
    if options.session is None:
        if options.hosts is not None:
            raise Problem("Name a job of this node, by a process or its session, to find the same one on others", USAGE)
        from zerotop.commands.job.job_list import print_jobs

        return print_jobs(as_json=options.json)
    if not (options.headless or has_terminal()) and options.session.isdecimal():
        raise Problem("The live screen needs a terminal; --headless records without one")
    if options.hosts is not None or options.ssh is not None:
        from zerotop.commands.job import remote_nodes

        remote_nodes.check_options(options)
    path, await_sampler = _find_session(options.session, options.folder)
    if options.headless or options.hosts is not None or not has_terminal():
        await_sampler()
        if options.hosts is not None:
            write_messages(*_join_hosts(path, options))
        elif options.enter:
            write_messages(*enter_ranks(path)[1])
        if options.headless:
            return _await_end(path)
        if not has_terminal():
            raise Problem("The live screen needs a terminal; --headless records without one")
    entering = start_entering(path) if options.enter and options.hosts is None else None
    with freeze_imports():
        from zerotop.commands.job.watch import watch_job

    await_sampler()
    return watch_job(path, entering)


def _find_session(text: str, folder: str | None) -> tuple[Path, Callable[[], None]]:
    """The session that is meant; a new one, in ``folder`` if given, for a process whose job nobody records.

    And what waits for its sampler, which is being started where there is none.
    """
    found = find_session_or_job(text)
    if found is None:
        from zerotop.commands.sessions import list_live_names

        names = list_live_names()
        live = f"live sessions: {', '.join(names)}" if names else "no session is live"
        raise Problem(f"Process {text} is no Python of a job here; zerotop attach lists those that are; {live}", USAGE)
    known = find_recording(found) if isinstance(found, FoundJob) else found
    if known is not None:
        if folder is not None and known.absolute() != Path(folder).absolute():
            raise Problem(f"The job is recorded in {known} already; leave --session away, or detach from that first")
        return known, _resume_sampler(known)
    assert isinstance(found, FoundJob)
    path = Path(attaching.begin_session(found, folder))
    return path, _start_sampler(path, new=True)


def _resume_sampler(path: Path) -> Callable[[], None]:
    """Starts another sampler for a recording that has lost its own; returns what waits for it."""
    from zerotop.commands.sessions import is_live
    from zerotop.session.reader import Session

    session = Session.open(path)
    if path.is_file():
        raise Problem(f"{path} is a packed recording, in which nothing runs; look back with: zerotop replay {path}")
    if is_live(session):
        return _start_sampler(path)
    if _resume_detached(path):
        return _start_sampler(path, new=True)
    raise Problem(f"The job of {path.name} has ended; look back with: zerotop replay {path.name}")


def _join_hosts(path: Path, options: argparse.Namespace) -> list[str]:
    """Has the job's other nodes take part; what there is to say. What fails there leaves this node's part as it is."""
    from zerotop.commands.job import remote_nodes

    here: list[str] = []

    def enter_ours() -> None:
        if options.enter:
            here.extend(enter_local_ranks(path)[1])

    try:
        names = remote_nodes.find_hosts(options.hosts, path)
    except Problem as error:
        enter_ours()
        return [*here, f"{error}."]
    try:
        told = remote_nodes.join_hosts(path, names, enter=options.enter, meanwhile=enter_ours)[1]
    except Problem as error:
        told = [f"{error}."]
    return here + told


def _resume_detached(path: Path) -> bool:
    """Goes on with a recording that had been detached from, if its job still runs here."""
    facts = job_control.read_facts(str(path))
    job = find_job(facts.job.pid) if facts.detached and facts.job is not None and facts.job.is_alive() else None
    if job is None:
        return False
    attaching.note_attached(str(path), job)
    return True


def _start_sampler(path: Path, *, new: bool = False) -> Callable[[], None]:
    """Starts a sampler, or another one where a running job has lost its own; returns what waits for it."""
    began = "The job's sampler" if new else "The job's sampler has died, and another one"
    try:
        starting = daemon.spawn_watcher(str(path))
    except OSError as error:
        write_messages(f"{began} cannot be started: {error}")
        return lambda: None

    def await_answer() -> None:
        if starting is None:
            return
        try:
            starting.await_agent()
        except (daemon.AgentError, OSError) as error:
            write_messages(f"{began} cannot be started: {error}")
        else:
            write_messages(*[] if new else ["The job's sampler had died: another one records it from now on."])

    return await_answer


def _await_end(path: Path) -> int:
    """Without a screen: stays until the recording has ended. Ctrl-C leaves it, and leaves it to go on.

    Raises Problem where nobody records; why not was said.
    """
    folder = str(path)
    if not job_control.is_sampler_alive(folder):
        raise Problem("Nothing is recorded")
    write_messages(f"recording in {path}")
    try:
        while job_control.is_sampler_alive(folder):
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        write_messages(f"The job goes on, and so does its recording. To end that: zerotop detach {path.name}")
    return 0
