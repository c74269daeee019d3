"""Opening a recording for a screen, with job control if its job is running."""

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
    """Open a recording at its end, which is now for a running job. Raises SessionError."""
    if path.is_dir():
        running = RunningSession.open(path)
        if running.is_live or job_control.is_job_alive(str(path)):
            return OpenedRecording(RecordingSource(running), JobController(running.path), running.name)
    session = Session.open(path)
    return OpenedRecording(RecordingSource(session), None, session.name)


def start_recording(pid: int) -> Path:
    """Return the session that records the job of a process; start recording if there is none. Raises Problem or OSError."""
    job = find_job(pid)
    if job is None:
        raise Problem(f"Process {pid} has ended, or is not a Python process of a job on this node")
    existing = find_recording(job)
    if existing is not None:
        return existing
    path = Path(attaching.begin_session(job))
    try:
        daemon.watch_in_background(str(path))
    except daemon.AgentError as error:
        raise Problem(f"Cannot start the job's sampler: {error}") from error
    return path
