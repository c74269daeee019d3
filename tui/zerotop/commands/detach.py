"""``zerotop detach``: takes the probe out of a job's ranks and ends a recording that ``attach`` began; the job goes on."""

from __future__ import annotations

import argparse
from pathlib import Path

from zerotop.commands import hosts
from zerotop.commands.named import recording_of, session_or_job
from zerotop.commands.problems import FAILED, USAGE, Problem
from zerotop_probe.outside import control
from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import FoundJob


def detach(options: argparse.Namespace) -> int:
    """Returns 0, or 1 if a rank could not be left."""
    hosts.set_command(options)
    path = _find(options.session)
    facts = control.read_facts(str(path))
    names = hosts.named(options.hosts, path) if options.hosts is not None else facts.reached
    failed = False
    for entry in attaching.end(str(path)):
        failed = failed or bool(entry.why_not and not entry.pending)
        for text in hosts.left(f"Process {entry.process.pid}", entry.said, entry.why_not, entry.pending):
            print(text)
    if names:
        told, done = hosts.leave(path, names)
        failed = failed or not done
        for text in told:
            print(text)
    print(_where(path, facts))
    return FAILED if failed else 0


def _where(path: Path, facts: control.Facts) -> str:
    if facts.joined:
        return f"Recorded in {path}; to end the parts of other nodes, detach where they were attached to"
    return f"Recorded in {path}" if facts.attached else f"What zerotop run records from outside goes on in {path}"


def _find(text: str) -> Path:
    found = session_or_job(text)
    path = recording_of(found) if isinstance(found, FoundJob) else found
    if path is None:
        raise Problem(f"Nobody records a job of process {text}; zerotop attach lists what is recorded", USAGE)
    return path
