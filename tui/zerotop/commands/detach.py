"""``zerotop detach``: takes the probe out of a job's ranks and ends a recording that ``attach`` began; the job goes on."""

from __future__ import annotations

import argparse
from pathlib import Path

from zerotop.commands.named import recording_of, session_or_job
from zerotop.commands.problems import FAILED, USAGE, Problem
from zerotop_probe.outside import control
from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import FoundJob


def detach(options: argparse.Namespace) -> int:
    """Returns 0, or 1 if a rank could not be left."""
    path = _find(options.session)
    attached = control.read_facts(str(path)).attached
    failed = False
    for entry in attaching.end(str(path)):
        if entry.why_not:
            failed = failed or not entry.pending
            how = "still to be" if entry.pending else "not"
            print(f"Process {entry.process.pid} is {how} left: {entry.why_not.rstrip('.')}.")
        elif entry.said == "leaving":
            print(f"Process {entry.process.pid} lets the probe go at the end of its step.")
        elif entry.said == "left":
            print(f"Process {entry.process.pid} has let the probe go.")
    print(f"Recorded in {path}" if attached else f"What zerotop run records from outside goes on in {path}")
    return FAILED if failed else 0


def _find(text: str) -> Path:
    found = session_or_job(text)
    path = recording_of(found) if isinstance(found, FoundJob) else found
    if path is None:
        raise Problem(f"Nobody records a job of process {text}; zerotop attach lists what is recorded", USAGE)
    return path
