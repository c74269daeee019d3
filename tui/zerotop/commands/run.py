"""``zerotop run``: starts a job, records it, and shows it where there is a terminal."""

from __future__ import annotations

import argparse
import sys

from zerotop.commands.launching import new_session
from zerotop_probe.outside import agent


def has_terminal() -> bool:
    """Whether a screen can be shown and keys be read."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()


def run(options: argparse.Namespace) -> int:
    """Returns the job's exit code; 0 when it was left running."""
    if options.headless or not has_terminal():
        return _headless(options)
    with new_session(options.command, options.session) as session:
        agent.launch_in_background(session, options.command)
    from zerotop.commands.screen import watch_job

    return watch_job(session)


def _headless(options: argparse.Namespace) -> int:
    # Nothing with threads may be imported here: the agent waits for signals in this very process.
    with new_session(options.command, options.session) as session:
        code = agent.run_in_foreground(session, options.command)
    print(f"zerotop: recorded in {session}", file=sys.stderr)
    return code
