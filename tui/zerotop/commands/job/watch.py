"""Running the screen on a recording, and the messages after leaving it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from zerotop.analysis.views.job_exit import read_ending
from zerotop.analysis.views.notices import describe_missing_steps
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.errors import FAILED
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.exit_messages import describe_end, describe_place
from zerotop.commands.common.live_recording import RunningRecording
from zerotop.commands.common.past_runs import describe_past
from zerotop.commands.common.user_settings import load_settings
from zerotop.commands.job.controller import AwaitEntry, JobController
from zerotop.recording.reader import Recording, RecordingError
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.interfaces import Leaving
from zerotop_probe.outside.job import job_control

# How long to wait for the exit code after a stop.
_STOP_WAIT_S = 5.0

RunApp = Callable[[RecordingSource, JobController], ZerotopApp]


def _run_app(source: RecordingSource, controller: JobController) -> ZerotopApp:
    app = ZerotopApp(source, controller, title=source.recording.name, settings=load_settings())
    app.compare_past = app.viewer.builder.compare_past = describe_past
    app.enter_on_start = controller.is_entering
    app.run()
    return app


def watch_job(path: str | Path, await_entry: AwaitEntry | None = None, run_app: RunApp = _run_app) -> int:
    """Show a running job; ``await_entry`` waits for a probe entry that has already been started.

    Return the job's exit code, 0 if the job continues, 1 if the screen failed or the exit code is unknown.
    """
    recording = RunningRecording.open(Path(path))
    controller = JobController(recording.path, await_entry)
    app = run_app(RecordingSource(recording), controller)
    for text in controller.not_stopped:
        print(escape_unprintable(text))
    folder = str(recording.path)
    if app.return_value is Leaving.STOPPED or not job_control.is_job_alive(folder):
        _await_end(recording)
    with contextlib.suppress(RecordingError):  # the screen has said it
        recording.refresh()
    place = describe_place(recording.path)
    print(escape_unprintable(place[0].upper() + place[1:]))
    if job_control.is_job_alive(folder) if job_control.is_job_here(folder) else recording.is_live:
        print(escape_unprintable(f"Training continues. Reattach: {controller.attach_command}"))
        return app.return_code or 0
    end = read_ending(recording)
    for sentence in filter(None, [*describe_end(end), describe_missing_steps(recording)]):
        print(escape_unprintable(sentence))
    return FAILED if end.exit_code is None else end.exit_code


def _await_end(recording: Recording) -> None:
    """Wait while the end of the job may still be recorded."""
    folder = str(recording.path)
    deadline = time.monotonic() + _STOP_WAIT_S
    while time.monotonic() < deadline and not read_ending(recording).text:
        if not job_control.is_sampler_alive(folder) and not job_control.is_job_alive(folder):
            return
        time.sleep(0.1)
        recording.refresh()
