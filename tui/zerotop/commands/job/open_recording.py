"""Opening a recording for a screen, with job control if its job is running."""

from __future__ import annotations

from pathlib import Path

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.live_recording import RunningRecording
from zerotop.commands.common.recording_lookup import find_recording
from zerotop.commands.job.controller import JobController
from zerotop.recording.reader import Recording
from zerotop.ui.base.start_interfaces import OpenedRecording
from zerotop_probe.outside.attaching import attaching
from zerotop_probe.outside.attaching.jobs import find_job
from zerotop_probe.outside.job import daemon, job_control


def open_recording(path: Path) -> OpenedRecording:
    """Open a recording at its end, which is now for a running job. Raises RecordingError."""
    if path.is_dir():
        running = RunningRecording.open(path)
        if running.is_live or job_control.is_job_alive(str(path)):
            return OpenedRecording(RecordingSource(running), JobController(running.path), running.name)
    recording = Recording.open(path)
    return OpenedRecording(RecordingSource(recording), None, recording.name)


def start_recording(pid: int) -> Path:
    """Return the recording of the job of a process; start one if there is none. Raises Problem or OSError."""
    job = find_job(pid)
    if job is None:
        raise Problem(f"Process {pid} has ended, or is not a Python process of a job on this node")
    existing = find_recording(job)
    if existing is not None:
        return existing
    path = Path(attaching.begin_recording(job))
    try:
        daemon.watch_in_background(str(path))
    except daemon.AgentError as error:
        raise Problem(f"Cannot start the job's sampler: {error}") from error
    return path
