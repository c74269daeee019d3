"""Running the screen on a session, and the messages after leaving it."""

from __future__ import annotations

import time
from pathlib import Path

from zerotop.analysis.views.job_exit import read_ending
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.errors import FAILED
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.exit_messages import describe_end
from zerotop.commands.common.live_session import RunningSession
from zerotop.commands.common.user_settings import load_settings
from zerotop.commands.job.controller import AwaitEntry, JobController
from zerotop.session.reader import Session
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.interfaces import Leaving
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording import directory

# How long to wait for the exit code after a stop.
_STOP_WAIT_S = 5.0


def watch_job(path: str | Path, await_entry: AwaitEntry | None = None) -> int:
    """Show a running job; ``await_entry`` waits for a probe entry that has already been started.

    Return the job's exit code, 0 if the job continues, 1 if the screen failed or the exit code is unknown.
    """
    session = RunningSession.open(Path(path))
    controller = JobController(session.path, await_entry)
    app = ZerotopApp(RecordingSource(session), controller, title=session.name, settings=load_settings())
    app.enter_on_start = await_entry is not None
    leaving = app.run()
    for text in controller.not_stopped:
        print(escape_unprintable(text))
    folder = str(session.path)
    if leaving is Leaving.STOPPED or not job_control.is_job_alive(folder):
        _await_end(session)
    session.refresh()
    is_there = directory.has_recording(folder)
    print(escape_unprintable(f"Recorded in {session.path}" if is_there else f"Not recorded: {session.path} was removed"))
    if job_control.is_job_alive(folder) if job_control.is_job_here(folder) else session.is_live:
        print(escape_unprintable(f"Training continues. Reattach: {controller.attach_command}"))
        return app.return_code or 0
    end = read_ending(session)
    for sentence in describe_end(end):
        print(escape_unprintable(sentence))
    return FAILED if end.exit_code is None else end.exit_code


def _await_end(session: Session) -> None:
    """Wait while the end of the job may still be recorded."""
    folder = str(session.path)
    deadline = time.monotonic() + _STOP_WAIT_S
    while time.monotonic() < deadline and not read_ending(session).text:
        if not job_control.is_sampler_alive(folder) and not job_control.is_job_alive(folder):
            return
        time.sleep(0.1)
        session.refresh()
