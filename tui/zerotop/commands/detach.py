"""``zerotop detach``: takes the probe out of a job's ranks and ends a recording that ``attach`` began; the job goes on."""

from __future__ import annotations

import argparse
from pathlib import Path

from zerotop.commands.common.errors import FAILED, USAGE, Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.session_lookup import find_recording, find_session_or_job
from zerotop.commands.job import remote_nodes
from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import FoundJob
from zerotop_probe.outside.attaching.probe_entry import Entry
from zerotop_probe.outside.job import job_control


def detach(options: argparse.Namespace) -> int:
    """Returns 0, or 1 if a rank could not be left."""
    remote_nodes.check_options(options)
    path = _find_session(options.session)
    facts = job_control.read_facts(str(path))
    names = remote_nodes.find_hosts(options.hosts, path) if options.hosts is not None else facts.reached_hosts
    entries: list[Entry] = []
    told, done = remote_nodes.leave_hosts(path, names, lambda: entries.extend(attaching.end_session(str(path))))
    ours = [
        text
        for one in entries
        for text in remote_nodes.describe_leaving(f"Process {one.process.pid}", one.reply, one.why_not, one.is_pending)
    ]
    for text in [*ours, *told, _describe_recording(path, facts)]:
        print(escape_unprintable(text))
    failed = not done or any(entry.why_not and not entry.is_pending for entry in entries)
    return FAILED if failed else 0


def _describe_recording(path: Path, facts: job_control.JobFacts) -> str:
    if facts.joined:
        return f"Recorded in {path}; to end the parts of other nodes, detach where they were attached to"
    return f"Recorded in {path}" if facts.attached else f"What zerotop run records from outside goes on in {path}"


def _find_session(text: str) -> Path:
    found = find_session_or_job(text)
    path = find_recording(found) if isinstance(found, FoundJob) else found
    if path is None:
        raise Problem(f"Nobody records a job of process {text}; zerotop attach lists what is recorded", USAGE)
    return path
