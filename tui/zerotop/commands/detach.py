"""``zerotop detach``: remove the probe from a job's ranks and stop a recording that ``attach`` began; the job continues."""

from __future__ import annotations

import argparse
from pathlib import Path

from zerotop.commands.common.errors import FAILED, USAGE, Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.node_orders import DETACH, await_answers, has_nodes, order_nodes
from zerotop.commands.common.recording_lookup import find_recording, find_recording_or_job
from zerotop.commands.job import remote_nodes
from zerotop.recording.reader import Recording
from zerotop_probe.outside.attaching.jobs import FoundJob
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording import directory


def detach(options: argparse.Namespace) -> int:
    """Detach. Return 0, or 1 if the probe remains in a rank."""
    remote_nodes.check_options(options)
    path = _find_recording(options.recording)
    facts = job_control.read_facts(str(path))
    names = remote_nodes.find_hosts(options.hosts, path) if options.hosts is not None else facts.reached_hosts
    here: list[tuple[list[str], bool]] = []
    is_over = (facts.collected or facts.ended) and Recording.open(path).is_over
    number = None
    # First: nodes detach meanwhile. Those that were attached to from here are asked over ssh.
    if has_nodes(path) and not names and not facts.attached and not is_over:
        number = order_nodes(path, DETACH)
    remote_messages, done = remote_nodes.leave_hosts(path, names, lambda: here.append(remote_nodes.detach_here(str(path))))
    if number is not None:
        try:
            remote_messages, done = await_answers(path, number)
        except Problem as error:
            remote_messages, done = [f"{error}."], False
    local_messages, done_here = here[0]
    for text in [*local_messages, *remote_messages, _describe_recording(path, facts, is_over=is_over)]:
        print(escape_unprintable(text))
    return 0 if done and done_here else FAILED


def _describe_recording(path: Path, facts: job_control.JobFacts, *, is_over: bool) -> str:
    if facts.collected and not is_over:
        return f"Recorded in {path}; where zerotop run started the job, it continues to record from outside"
    if (facts.ended or is_over) and not facts.attached:
        return f"The job of {path} has ended: there is nothing to detach from"
    if facts.joined:
        return f"Recorded in {path}; to stop recording on other nodes, detach on the node that attached to them"
    return f"Recorded in {path}" if facts.attached else f"zerotop run continues to record from outside in {path}"


def _find_recording(text: str) -> Path:
    target = find_recording_or_job(text)
    path = find_recording(target) if isinstance(target, FoundJob) else target
    if path is None:
        raise Problem(f"PID {text} is not being recorded; zerotop attach lists jobs and their recordings", USAGE)
    if not (path / directory.SESSION_FILE).is_file():
        Recording.open(path)  # raises RecordingError if it is none
        raise Problem(f"{path} is a packed recording, which belongs to no running job")
    return path
