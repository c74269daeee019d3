"""Following a job without a terminal: progress lines and a closing summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from zerotop.analysis.formatting import format_count
from zerotop.analysis.live_view import Progress
from zerotop.analysis.reports.headline import summarize_recording
from zerotop.analysis.views.job_exit import Losses, read_ending
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.errors import FAILED
from zerotop.commands.common.escape import print_escaped
from zerotop.commands.common.live_recording import RunningRecording
from zerotop_probe.outside.job import job_control

_POLL_S = 2.0
# The longest time without a line, so that a log shows that the job is not stuck.
_QUIET_S = 30.0
_LAST_LINES = 20


def follow_job(path: Path) -> int:
    """Print progress until the job ends, then a summary. Return the job's exit code, 1 if it is unknown."""
    recording = RunningRecording.open(path)
    source = RecordingSource(recording)
    reporter = ProgressReporter(time.monotonic)
    while job_control.is_job_alive(str(path)) or job_control.is_sampler_alive(str(path)):
        try:
            time.sleep(_POLL_S)
            source.refresh()
            if line := reporter.format_news(source):
                print(line, flush=True)
        except KeyboardInterrupt:
            job_control.request_stop(str(path))
    source.refresh()
    end = read_ending(recording)
    if end.exit_code != 0:
        print(*source.view_at(None).output[-_LAST_LINES:], sep="\n", file=sys.stderr)
    print_escaped(summarize_recording(recording))
    if loss := Losses(end.lost_records, end.lost_output_bytes).loss_sentence:
        print(loss)
    return FAILED if end.exit_code is None else end.exit_code


class ProgressReporter:
    """Formats a progress line whenever there is news since the previous one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_text = ""
        self._last_text_s = clock()

    def format_news(self, source: RecordingSource) -> str:
        """Return elapsed time, step and rate; "" if nothing changed and the last line is recent."""
        view = source.view_at(None)
        progress = view.progress
        text = view.job.exit_text or "Starting." if progress.step is None else _format_steps(progress)
        now_s = self._clock()
        if text == self._last_text and now_s - self._last_text_s < _QUIET_S:
            return ""
        self._last_text, self._last_text_s = text, now_s
        rate = f"  {1 / progress.iteration_s:.2f} it/s" if progress.iteration_s > 0 else ""
        return f"{progress.elapsed_s:4.0f} s  {text}{rate}"


def _format_steps(progress: Progress) -> str:
    if progress.total_steps is not None:
        return f"{progress.finished_steps} of {format_count(progress.total_steps, 'step')}"
    return format_count(progress.finished_steps, "step")
