"""``zerotop attach``: the live screen of a job that runs already, whoever started it, and the probe into its ranks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from zerotop.commands.common.errors import USAGE, Problem

# What else is needed is imported where it is: the sampler is started before the screen is imported, since both take as long.
from zerotop.commands.common.exit_messages import say
from zerotop.commands.common.gc_pause import keeping
from zerotop.commands.common.session_lookup import recording_of, session_or_job
from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.job.attach_probe import begin, enter, enter_here
from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import FoundJob, job_of
from zerotop_probe.outside.job import daemon, job_control

_LOOK_S = 0.2


def attach(options: argparse.Namespace) -> int:
    """Returns the job's exit code if it is known when the screen is left, else 0."""
    if options.there is not None:
        from zerotop_probe.outside.attaching.remote_agent import tell

        return tell(options.there)
    if options.session is None:
        if options.hosts is not None:
            raise Problem("Name a job of this node, by a process or its session, to find the same one on others", USAGE)
        from zerotop.commands.job.job_list import print_jobs

        return print_jobs(as_json=options.json)
    if not (options.headless or has_terminal()) and options.session.isdecimal():
        raise Problem("The live screen needs a terminal; --headless records without one")
    if options.hosts is not None or options.ssh is not None:
        from zerotop.commands.job import remote_nodes

        remote_nodes.check(options)
    path, await_sampler = _find(options.session, options.folder)
    if options.headless or options.hosts is not None or not has_terminal():
        await_sampler()
        if options.hosts is not None:
            say(*_with_hosts(path, options))
        elif options.enter:
            say(*enter(path)[1])
        if options.headless:
            return _stay(path)
        if not has_terminal():
            raise Problem("The live screen needs a terminal; --headless records without one")
    entering = begin(path) if options.enter and options.hosts is None else None
    with keeping():
        from zerotop.commands.job.watch import watch_job

    await_sampler()
    return watch_job(path, entering)


def _find(text: str, folder: str | None) -> tuple[Path, Callable[[], None]]:
    """The session that is meant; a new one, in ``folder`` if given, for a process whose job nobody records.

    And what waits for its sampler, which is being started where there is none.
    """
    found = session_or_job(text)
    if found is None:
        from zerotop.commands.sessions import live_names

        names = live_names()
        live = f"live sessions: {', '.join(names)}" if names else "no session is live"
        raise Problem(f"Process {text} is no Python of a job here; zerotop attach lists those that are; {live}", USAGE)
    known = recording_of(found) if isinstance(found, FoundJob) else found
    if known is not None:
        if folder is not None and known.absolute() != Path(folder).absolute():
            raise Problem(f"The job is recorded in {known} already; leave --session away, or detach from that first")
        return known, _join(known)
    assert isinstance(found, FoundJob)
    path = Path(attaching.begin(found, folder))
    return path, _start_sampler(path, new=True)


def _join(path: Path) -> Callable[[], None]:
    """Starts another sampler for a recording that has lost its own; returns what waits for it."""
    from zerotop.commands.sessions import is_live
    from zerotop.session.reader import Session

    session = Session.open(path)
    if path.is_file():
        raise Problem(f"{path} is a packed recording, in which nothing runs; look back with: zerotop replay {path}")
    if is_live(session):
        return _start_sampler(path)
    if _taken_up(path):
        return _start_sampler(path, new=True)
    raise Problem(f"The job of {path.name} has ended; look back with: zerotop replay {path.name}")


def _with_hosts(path: Path, options: argparse.Namespace) -> list[str]:
    """Has the job's other nodes take part; what there is to say. What fails there leaves this node's part as it is."""
    from zerotop.commands.job import remote_nodes

    here: list[str] = []

    def enter_ours() -> None:
        if options.enter:
            here.extend(enter_here(path)[1])

    try:
        names = remote_nodes.named(options.hosts, path)
    except Problem as error:
        enter_ours()
        return [*here, f"{error}."]
    try:
        told = remote_nodes.join(path, names, enter=options.enter, meanwhile=enter_ours)[1]
    except Problem as error:
        told = [f"{error}."]
    return here + told


def _taken_up(path: Path) -> bool:
    """Goes on with a recording that had been detached from, if its job still runs here."""
    facts = job_control.read_facts(str(path))
    job = job_of(facts.job.pid) if facts.detached and facts.job is not None and facts.job.alive() else None
    if job is None:
        return False
    attaching.note_attached(str(path), job)
    return True


def _start_sampler(path: Path, *, new: bool = False) -> Callable[[], None]:
    """Starts a sampler, or another one where a running job has lost its own; returns what waits for it."""
    began = "The job's sampler" if new else "The job's sampler has died, and another one"
    try:
        starting = daemon.begin_watch(str(path))
    except OSError as error:
        say(f"{began} cannot be started: {error}")
        return lambda: None

    def wait() -> None:
        if starting is None:
            return
        try:
            starting.answer()
        except (daemon.AgentError, OSError) as error:
            say(f"{began} cannot be started: {error}")
        else:
            say(*[] if new else ["The job's sampler had died: another one records it from now on."])

    return wait


def _stay(path: Path) -> int:
    """Without a screen: stays until the recording has ended. Ctrl-C leaves it, and leaves it to go on.

    Raises Problem where nobody records; why not was said.
    """
    folder = str(path)
    if not job_control.sampler_alive(folder):
        raise Problem("Nothing is recorded")
    say(f"recording in {path}")
    try:
        while job_control.sampler_alive(folder):
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        say(f"The job goes on, and so does its recording. To end that: zerotop detach {path.name}")
    return 0
