"""Resolving the PID or SESSION argument of ``attach`` and ``detach``."""

from __future__ import annotations

from pathlib import Path

from zerotop.session import catalog
from zerotop.session.reader import SessionError
from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import FoundJob, find_job
from zerotop_probe.outside.job import job_control


def find_session_or_job(text: str) -> Path | FoundJob | None:
    """Return the session with this name, prefix or path, or the job of the process with this number.

    Return None if the process belongs to no job. Raises SessionError for text that is neither a session nor a number.
    """
    try:
        return catalog.find_session(text)
    except SessionError:
        if not text.isdecimal():
            raise
    return find_job(int(text))


def find_recording(job: FoundJob) -> Path | None:
    """Return the session that records this job or can resume recording it."""
    if job.session_path and (Path(job.session_path) / "session.json").is_file():
        return Path(job.session_path)
    processes = {job.root, *(rank.process for rank in job.ranks)}
    for path in catalog.list_sessions():
        if path.is_dir():
            facts = job_control.read_facts(str(path))
            if facts.job in processes and not facts.ended and not facts.detached:
                return path
    sampled = attaching.find_sampled_session(job)
    return None if sampled is None else Path(sampled)
