"""What a user names to attach or detach: a session, or any process of a job and with it the session that records the job."""

from __future__ import annotations

from pathlib import Path

from zerotop.session import catalog
from zerotop.session.reader import SessionError
from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import FoundJob, find_job
from zerotop_probe.outside.job import job_control


def find_session_or_job(text: str) -> Path | FoundJob | None:
    """A session by its name, its beginning or its path, else the job that a process belongs to; None if it is no job's.

    Raises SessionError for what is neither a session nor a number.
    """
    try:
        return catalog.find_session(text)
    except SessionError:
        if not text.isdecimal():
            raise
    return find_job(int(text))


def find_recording(job: FoundJob) -> Path | None:
    """The session that records this job now, or could go on to: by the ranks' environment, or by what attached to it."""
    if job.session_path and (Path(job.session_path) / "session.json").is_file():
        return Path(job.session_path)
    processes = {job.root, *(rank.process for rank in job.ranks)}
    for path in catalog.list_sessions():
        if path.is_dir():
            facts = job_control.read_facts(str(path))
            if facts.job in processes and not facts.ended and not facts.detached:
                return path
    elsewhere = attaching.find_sampled_session(job)
    return None if elsewhere is None else Path(elsewhere)
