"""``%load_ext zerotop_probe``: record this Jupyter kernel, as ``zerotop attach --enter`` does it from outside."""

from __future__ import annotations

import importlib
import os

from zerotop_probe.outside.attaching import attaching
from zerotop_probe.outside.attaching.jobs import find_job
from zerotop_probe.outside.job import daemon
from zerotop_probe.recording.directory import SESSION_VARIABLE

_BEGUN = "This kernel is recorded to {recording}.\nWatch it in a terminal with: zerotop attach {name}"
_ENDED = "The recording of this kernel has ended. See it with: zerotop replay {name}"
_EXISTING = "This kernel is recorded already, to {recording}."


def begin_recording() -> str:
    """Create a recording for this process, and let a sampler and the probe write to it; return a sentence about that.

    Raises OSError or daemon.AgentError if that is impossible; nothing is recorded then.
    """
    importlib.import_module("torch.optim")  # which the probe hooks

    from zerotop_probe.inside.hooks import hook_installer

    existing = os.environ.get(SESSION_VARIABLE) or hook_installer.PROBE.recording
    if existing:
        return _EXISTING.format(recording=existing)
    job = find_job(os.getpid())
    if job is None:
        raise OSError("Cannot record this process: /proc does not show it as a Python process.")
    recording = attaching.begin_recording(job)
    starting = daemon.spawn_watcher(recording)
    if starting is not None:
        starting.await_agent()
    hook_installer.enter(recording)
    return _BEGUN.format(recording=recording, name=os.path.basename(recording))


def end_recording() -> str:
    """Remove the probe from this process and end its recording; return a sentence about that."""
    from zerotop_probe.inside.hooks import hook_installer

    recording = hook_installer.PROBE.recording
    if not recording:
        return "This kernel is not being recorded."
    hook_installer.leave()
    attaching.stop_recording(recording)
    return _ENDED.format(name=os.path.basename(recording))
