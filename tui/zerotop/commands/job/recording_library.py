"""The start screen's library: the recordings in the state directory and this node's running jobs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from zerotop.analysis.formatting import format_count
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.reports.measures import Comparison
from zerotop.analysis.reports.recording_index import ListedRecording, Overviews
from zerotop.commands.common import deletion
from zerotop.commands.common.errors import Problem, describe_error
from zerotop.commands.common.model_config import find_shape
from zerotop.commands.recordings import open_overviews
from zerotop.recording import catalog
from zerotop.recording.packed.packing import SUFFIX
from zerotop.recording.reader import Recording, RecordingError
from zerotop.recording.sweeps import Sweep, find_point_recording, list_sweeps
from zerotop.recording.sweeps import find_default_folder as find_sweeps_folder
from zerotop.ui.base.start_interfaces import LibraryItem, OpenedRecording, RefusedError, RunningJob
from zerotop_probe.outside.attaching.jobs import FoundJob, find_jobs, read_zero_stage
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording.directory import SESSION_FILE

_POLL_S, _JOBS_S = 1.0, 3.0
# Pauses last this many times as long as a scan, which keeps scanning below 5 % of a core; but a change is seen after this.
_REST_FACTOR, _LONGEST_REST_S = 20, 10.0


class UserLibrary:
    """Scans in its own thread and publishes immutable values."""

    def __init__(self, overviews: Overviews | None = None, job_finder: Callable[[], Sequence[FoundJob]] = find_jobs) -> None:
        self.folder_name = _shorten_home(catalog.find_default_folder())
        self.recordings: tuple[ListedRecording, ...] = ()
        self.running_jobs: tuple[RunningJob, ...] = ()
        self._overviews = overviews or open_overviews()
        self._job_finder = job_finder
        self._stopped = threading.Event()
        self._wake = threading.Event()

    def start(self) -> None:
        """List the recordings, then read changed ones in a thread."""
        self._publish_recordings(self._overviews.list_recordings())
        threading.Thread(target=self._read_changes, name="recordings", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread and save the summaries."""
        self._stopped.set()
        self._wake.set()
        self._overviews.save_cache()

    def _read_changes(self) -> None:
        jobs_due_s = 0.0
        while not self._stopped.is_set():
            begin_s = time.thread_time()
            self._wake.clear()
            self._overviews.list_recordings()
            while not self._stopped.is_set() and self._overviews.read_next() is not None:
                self._publish_recordings(self._overviews.recordings)
            self._publish_recordings(self._overviews.recordings)
            if time.monotonic() >= jobs_due_s:
                self._find_jobs()
                jobs_due_s = time.monotonic() + _JOBS_S
            rest_s = min(max(_POLL_S, _REST_FACTOR * (time.thread_time() - begin_s)), _LONGEST_REST_S)
            self._wake.wait(_POLL_S if self._search_findings() else rest_s)

    def _search_findings(self) -> bool:
        """Search the findings of recordings for a while, resting as long as each takes; return whether more are left."""
        deadline_s = time.monotonic() + _JOBS_S
        while not self._stopped.is_set() and time.monotonic() < deadline_s:
            begin_s = time.monotonic()
            if self._overviews.judge_next() is None:
                return False
            self._publish_recordings(self._overviews.recordings)
            self._stopped.wait(min(_POLL_S, time.monotonic() - begin_s))
        return True

    def _publish_recordings(self, recordings: tuple[ListedRecording, ...]) -> None:
        if recordings != self.recordings:
            self.recordings = recordings

    def _find_jobs(self) -> None:
        live = [job_control.read_facts(str(recording.path)) for recording in self.recordings if recording.is_live]
        recorded = {process for facts in live for process in (facts.job, *facts.ranks)}
        self.running_jobs = tuple(
            _make_job(job)
            for job in self._job_finder()
            if not _is_recorded(job) and not recorded & {job.root, *(rank.process for rank in job.ranks)}
        )

    def open(self, item: LibraryItem) -> OpenedRecording:
        """Open a recording at its end, or start recording a running job."""
        from zerotop.commands.job.open_recording import open_recording, start_recording

        with _refuse_errors():
            return open_recording(start_recording(item.pid) if isinstance(item, RunningJob) else item.path)

    def export(self, recording: ListedRecording) -> str:
        """Write the steps as CSV to the current folder; return a message."""
        from zerotop.commands.common.new_files import find_free_path
        from zerotop.commands.export import write_file

        with _refuse_errors():
            path = find_free_path(Path(f"{recording.path.name.removesuffix(SUFFIX)}-steps.csv").absolute())
            rows = write_file(Recording.open(recording.path), "steps", "csv", path)
        return f"{path}: {format_count(rows, 'row')}, one per step and rank"

    def pack(self, recording: ListedRecording) -> str:
        """Pack the recording into the current folder; return a message."""
        from zerotop.commands.pack import pack_recording

        with _refuse_errors():
            message, _ = pack_recording(recording.path, str(Path(recording.path.name + SUFFIX).absolute()))
        return message

    def list_sweeps(self) -> Sequence[Sweep]:
        """Return the sweeps in the default folder, the newest first."""
        return list_sweeps(find_sweeps_folder())

    def find_shape(self, sweep: Sweep) -> ModelShape | None:
        """Return the shape of a sweep's model; None if it is not known."""
        return find_shape(sweep.plan.model)

    def open_point(self, sweep: Sweep, number: int) -> OpenedRecording | None:
        """Open the recording of a point; None if it has none. Raises RecordingError."""
        from zerotop.commands.job.open_recording import open_recording

        path = find_point_recording(sweep.path, sweep.points[number].result)
        return None if path is None else open_recording(path)

    def describe_obstacle(self, recording: ListedRecording) -> str:
        """Return why the recording cannot be deleted; "" if it can."""
        return deletion.describe_obstacle(recording)

    def delete(self, recording: ListedRecording) -> str:
        """Delete the recording permanently; return a message."""
        with _refuse_errors():
            obstacle = self.describe_obstacle(recording)
            if obstacle:
                raise RefusedError(obstacle)
            deletion.delete_recording(recording)
            self._overviews.list_recordings()
            self._publish_recordings(self._overviews.recordings)
        from zerotop.ui.drawing.formatting import format_size

        return f"{recording.name} deleted: {format_size(recording.stamp.bytes)} freed."

    def compare(self, recordings: Sequence[ListedRecording]) -> Comparison:
        """Compare whole recordings."""
        from zerotop.commands.compare import compare_recordings

        with _refuse_errors():
            return compare_recordings([recording.path for recording in recordings])


@contextlib.contextmanager
def _refuse_errors() -> Iterator[None]:
    """Turn errors into a sentence for the screen."""
    try:
        yield
    except (Problem, RecordingError, OSError) as error:
        raise RefusedError(describe_error(error)) from error


def _is_recorded(job: FoundJob) -> bool:
    return bool(job.recording_path) and os.path.isfile(os.path.join(job.recording_path, SESSION_FILE))


def _make_job(job: FoundJob) -> RunningJob:
    return RunningJob(job.root.pid, job.launcher, len(job.ranks), (), job.age_s, read_zero_stage(job), job.script_path)


def _shorten_home(path: Path) -> str:
    home = os.path.expanduser("~")
    return f"~{str(path)[len(home) :]}" if str(path).startswith(home + os.sep) else str(path)
