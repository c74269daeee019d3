"""Opening the screen on a session, and what is said after leaving it."""

from __future__ import annotations

import time
from pathlib import Path

from zerotop.analysis.source import RecordingSource
from zerotop.commands.controller import JobController
from zerotop.commands.problems import FAILED
from zerotop.session.reader import Session
from zerotop.ui.app import ZerotopApp
from zerotop.ui.ports import Leaving
from zerotop_probe.outside import control
from zerotop_probe.recording import events

# After a stop: how long we stay to learn the exit code.
_STOPPED_S = 5.0


def exit_code(session: Session) -> int | None:
    """The job's, as its sampler recorded it; None while it runs or where nobody knows."""
    for event in reversed(session.events):
        if event.name == events.JOB_ENDED:
            code = event.facts.get("exit_code")
            return code if isinstance(code, int) else None
    return None


def watch_job(path: str | Path) -> int:
    """Shows a job that runs. Returns its exit code, 0 if it goes on, 1 if the screen failed."""
    session = Session.open(Path(path))
    controller = JobController(session.path)
    app = ZerotopApp(RecordingSource(session), controller, title=session.name)
    leaving = app.run()
    if leaving is Leaving.STOPPED:
        _await_end(session)
    print(f"Recorded in {session.path}")
    if control.job_alive(str(session.path)):
        print(f"The job goes on. To come back: {controller.attach_command}")
        return app.return_code or 0
    session.refresh()
    code = exit_code(session)
    if code is None:
        return app.return_code or (0 if leaving is not None else FAILED)
    return code


def _await_end(session: Session) -> None:
    deadline = time.monotonic() + _STOPPED_S
    while time.monotonic() < deadline and exit_code(session) is None:
        time.sleep(0.1)
        session.refresh()
