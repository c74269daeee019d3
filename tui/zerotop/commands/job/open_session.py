"""Opening a recording for a screen: a running job's with what steers it, any other as it is."""

from __future__ import annotations

from pathlib import Path

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.live_session import RunningSession
from zerotop.commands.common.session_lookup import recording_of
from zerotop.commands.job.controller import JobController
from zerotop.session.reader import Session
from zerotop.ui.base.start_interfaces import Opened
from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import job_of
from zerotop_probe.outside.job import daemon, job_control


def opened(path: Path) -> Opened:
    """A recording at its end, which for one of a running job is now. Raises SessionError."""
    if path.is_dir():
        running = RunningSession.open(path)
        if running.live or job_control.job_alive(str(path)):
            return Opened(RecordingSource(running), JobController(running.path), running.name)
    session = Session.open(path)
    return Opened(RecordingSource(session), None, session.name)


def begun(pid: int) -> Path:
    """The session that records a job from outside, a new one where nobody does. Raises Problem or OSError."""
    job = job_of(pid)
    if job is None:
        raise Problem(f"Process {pid} has ended, or is no Python of a job here")
    known = recording_of(job)
    if known is not None:
        return known
    path = Path(attaching.begin(job))
    try:
        daemon.watch_in_background(str(path))
    except daemon.AgentError as error:
        raise Problem(f"The job's sampler cannot be started: {error}") from error
    return path
