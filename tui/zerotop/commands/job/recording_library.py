"""The user's recordings for the start screen: ``start_interfaces.Desk`` over the usual place and this node's processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from zerotop.analysis.reports.measures import Comparison
from zerotop.analysis.reports.recording_index import Overviews, Recording
from zerotop.commands.common.errors import Problem, describe_error
from zerotop.commands.sessions import open_overviews
from zerotop.session import catalog
from zerotop.session.packing import SUFFIX
from zerotop.session.reader import Session, SessionError
from zerotop.ui.base.start_interfaces import LibraryItem, OpenedRecording, RefusedError, RunningJob
from zerotop_probe.outside.attaching.jobs import FoundJob, find_jobs, read_zero_stage
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording.directory import SESSION_FILE

_POLL_S, _JOBS_S = 1.0, 3.0
_REST_FACTOR = 20  # so many times as long as looking takes nothing is looked at: below 5 % of a core


class UserLibrary:
    """Reads in a thread of its own; everything that it hands out is a value."""

    def __init__(self, overviews: Overviews | None = None, job_finder: Callable[[], Sequence[FoundJob]] = find_jobs) -> None:
        self.folder_name = _shorten_home(catalog.find_default_folder())
        self.recordings: tuple[Recording, ...] = ()
        self.running_jobs: tuple[RunningJob, ...] = ()
        self._overviews = overviews or open_overviews()
        self._job_finder = job_finder
        self._stopped = threading.Event()
        self._wake = threading.Event()

    def start(self) -> None:
        """Lists the recordings at once, and from now on reads what changes."""
        self._publish_recordings(self._overviews.list_recordings())
        threading.Thread(target=self._read_changes, name="recordings", daemon=True).start()

    def stop(self) -> None:
        """Stops that, and keeps what was found out."""
        self._stopped.set()
        self._wake.set()
        self._overviews.save_cache()

    def _read_changes(self) -> None:
        jobs_due_s = 0.0
        while not self._stopped.is_set():
            begin_s = time.monotonic()
            self._wake.clear()
            self._overviews.list_recordings()
            while not self._stopped.is_set() and self._overviews.read_next() is not None:
                self._publish_recordings(self._overviews.recordings)
            self._publish_recordings(self._overviews.recordings)
            if time.monotonic() >= jobs_due_s:
                self._find_jobs()
                jobs_due_s = time.monotonic() + _JOBS_S
            self._wake.wait(max(_POLL_S, _REST_FACTOR * (time.monotonic() - begin_s)))

    def _publish_recordings(self, found: tuple[Recording, ...]) -> None:
        if found != self.recordings:
            self.recordings = found

    def _find_jobs(self) -> None:
        known = [job_control.read_facts(str(recording.path)) for recording in self.recordings if recording.is_live]
        recorded = {process for facts in known for process in (facts.job, *facts.ranks)}
        found = [
            _make_job(job) for job in self._job_finder() if not _is_recorded(job) and not recorded & _collect_processes(job)
        ]
        self.running_jobs = tuple(found)

    def open(self, item: LibraryItem) -> OpenedRecording:
        """Opens it at its end; of a job that nobody records a recording is begun."""
        from zerotop.commands.job.open_session import open_recording, start_recording

        with _refuse_errors():
            return open_recording(start_recording(item.pid) if isinstance(item, RunningJob) else item.path)

    def export(self, recording: Recording) -> str:
        """Writes the steps as CSV to the current folder."""
        from zerotop.commands.export import write_file

        with _refuse_errors():
            path = Path(f"{recording.path.name.removesuffix(SUFFIX)}-steps.csv").absolute()
            rows = write_file(Session.open(recording.path), "steps", "csv", path)
        return f"{rows} rows, a row for each step of each rank: {path}"

    def pack(self, recording: Recording) -> str:
        """Writes it as one small file to the current folder."""
        from zerotop.commands.pack import pack_session

        with _refuse_errors():
            said, _ = pack_session(recording.path, str(Path(recording.path.name + SUFFIX).absolute()))
        return said

    def describe_obstacle(self, recording: Recording) -> str:
        """Why it cannot be deleted; "" where it can."""
        path, root = recording.path.absolute(), catalog.find_default_folder().absolute()
        if recording.is_live or (path.is_dir() and job_control.is_job_alive(str(path))):
            return f"{recording.name} is live: its job has to end before it can be deleted."
        if path.parent != root:
            return f"{path} does not lie in {root}: delete it yourself."
        if path.is_symlink():
            return f"{path} is a link to another place: delete it yourself."
        if path.is_dir() and not (path / SESSION_FILE).is_file():
            return f"{path} holds no recording any more."
        return ""

    def delete(self, recording: Recording) -> str:
        """Deletes it for good."""
        with _refuse_errors():
            why_not = self.describe_obstacle(recording)
            if why_not:
                raise RefusedError(why_not)
            if recording.path.is_dir():
                shutil.rmtree(recording.path)
            else:
                recording.path.unlink()
            self._overviews.list_recordings()
            self._publish_recordings(self._overviews.recordings)
        from zerotop.ui.drawing.formatting import format_size

        return f"{recording.name} is deleted: {format_size(recording.stamp.bytes)} are free again."

    def compare(self, recordings: Sequence[Recording]) -> Comparison:
        """Reads them whole."""
        from zerotop.commands.compare import compare_recordings

        with _refuse_errors():
            return compare_recordings([recording.path for recording in recordings])


@contextlib.contextmanager
def _refuse_errors() -> Iterator[None]:
    """What goes wrong is a sentence for the screen."""
    try:
        yield
    except (Problem, SessionError, OSError) as error:
        raise RefusedError(describe_error(error)) from error


def _collect_processes(job: FoundJob) -> set[object]:
    return {job.root, *(rank.process for rank in job.ranks)}


def _is_recorded(job: FoundJob) -> bool:
    return bool(job.session_path) and os.path.isfile(os.path.join(job.session_path, SESSION_FILE))


def _make_job(job: FoundJob) -> RunningJob:
    return RunningJob(job.root.pid, job.launcher, len(job.ranks), (), job.age_s, read_zero_stage(job), job.script_path)


def _shorten_home(path: Path) -> str:
    home = os.path.expanduser("~")
    return f"~{str(path)[len(home) :]}" if str(path).startswith(home + os.sep) else str(path)
