"""``zerotop attach``: the live screen of a recorded job that was left running."""

from __future__ import annotations

import argparse
from pathlib import Path

from zerotop.commands.closing import say
from zerotop.commands.problems import Problem
from zerotop.commands.run import has_terminal
from zerotop.commands.sessions import is_live, live_names
from zerotop.session import catalog
from zerotop.session.reader import Session, SessionError
from zerotop_probe.outside import agent


def attach(options: argparse.Namespace) -> int:
    """Returns the job's exit code if it has ended when the screen is left, else 0."""
    if options.session is None:
        raise _not_a_session()
    try:
        path = catalog.find(options.session)
    except SessionError as error:
        if options.session.isdecimal():
            raise _not_a_session() from error
        raise
    session = Session.open(path)
    if path.is_file():
        raise Problem(f"{path} is a packed recording, in which nothing runs; look back with: zerotop replay {path}")
    if not is_live(session):
        raise Problem(f"The job of {path.name} has ended; look back with: zerotop replay {path.name}")
    _have_sampler(path)
    if not has_terminal():
        raise Problem("The live screen needs a terminal")
    from zerotop.commands.screen import watch_job

    return watch_job(path)


def _have_sampler(path: Path) -> None:
    """Starts another sampler where a running job has lost its own."""
    try:
        if agent.watch_in_background(str(path)) is not None:
            say("The job's sampler had died: another one records it from now on.")
    except (agent.AgentError, OSError) as error:
        say(f"The job's sampler has died, and another one cannot be started: {error}")


def _not_a_session() -> Problem:
    names = live_names()
    listed = f"live sessions: {', '.join(names)}" if names else "no session is live"
    return Problem(f"Only jobs started by zerotop run can be attached to, by their session's name; {listed}")
