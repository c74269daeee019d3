"""Resolving the PID or RECORDING argument of ``attach`` and ``detach``."""

from __future__ import annotations

from pathlib import Path

from zerotop.recording import catalog
from zerotop.recording.reader import RecordingError
from zerotop_probe.outside.attaching import attaching
from zerotop_probe.outside.attaching.jobs import FoundJob, find_job
from zerotop_probe.outside.job import job_control


def find_recording_or_job(text: str) -> Path | FoundJob | None:
    """Return the recording with this name, prefix or path, or the job of the process with this number.

    Return None if the process belongs to no job. Raises RecordingError for text that is neither a recording nor a number.
    """
    try:
        return catalog.find_recording(text)
    except RecordingError:
        if not text.isdecimal():
            raise
    return find_job(int(text))


def find_recording(job: FoundJob) -> Path | None:
    """Return the recording that records this job or can resume recording it."""
    if job.recording_path and (Path(job.recording_path) / "session.json").is_file():
        return Path(job.recording_path)
    processes = {job.root, *(rank.process for rank in job.ranks)}
    for path in catalog.list_recordings():
        if path.is_dir():
            facts = job_control.read_facts(str(path))
            if facts.job in processes and not facts.ended and not facts.detached:
                return path
    sampled = attaching.find_sampled_recording(job)
    return None if sampled is None else Path(sampled)
