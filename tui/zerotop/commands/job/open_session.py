"""Opening a recording for a screen: a running job's with what steers it, any other as it is."""

from __future__ import annotations

from pathlib import Path

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.live_session import RunningSession
from zerotop.commands.common.session_lookup import find_recording
from zerotop.commands.job.controller import JobController
from zerotop.session.reader import Session
from zerotop.ui.base.start_interfaces import OpenedRecording
from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import find_job
from zerotop_probe.outside.job import daemon, job_control


def open_recording(path: Path) -> OpenedRecording:
    """A recording at its end, which for one of a running job is now. Raises SessionError."""
    if path.is_dir():
        running = RunningSession.open(path)
        if running.is_live or job_control.is_job_alive(str(path)):
            return OpenedRecording(RecordingSource(running), JobController(running.path), running.name)
    session = Session.open(path)
    return OpenedRecording(RecordingSource(session), None, session.name)


def start_recording(pid: int) -> Path:
    """The session that records a job from outside, a new one where nobody does. Raises Problem or OSError."""
    job = find_job(pid)
    if job is None:
        raise Problem(f"Process {pid} has ended, or is no Python of a job here")
    known = find_recording(job)
    if known is not None:
        return known
    path = Path(attaching.begin_session(job))
    try:
        daemon.watch_in_background(str(path))
    except daemon.AgentError as error:
        raise Problem(f"The job's sampler cannot be started: {error}") from error
    return path
