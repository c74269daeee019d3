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
from zerotop.commands.common.errors import Problem, sentence
from zerotop.commands.sessions import recordings
from zerotop.session import catalog
from zerotop.session.packing import SUFFIX
from zerotop.session.reader import Session, SessionError
from zerotop.ui.base.start_interfaces import Item, Opened, Refused, RunningJob
from zerotop_probe.outside.attaching.jobs import FoundJob, find_jobs, zero_stage
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording.directory import SESSION_FILE

_LOOK_S, _JOBS_S = 1.0, 3.0
_RESTS = 20  # so many times as long as looking takes nothing is looked at: below 5 % of a core


class UserDesk:
    """Reads in a thread of its own; everything that it hands out is a value."""

    def __init__(self, overviews: Overviews | None = None, find: Callable[[], Sequence[FoundJob]] = find_jobs) -> None:
        self.place = _with_tilde(catalog.usual_place())
        self.recordings: tuple[Recording, ...] = ()
        self.jobs: tuple[RunningJob, ...] = ()
        self._overviews = overviews or recordings()
        self._find = find
        self._over = threading.Event()
        self._look_again = threading.Event()

    def begin(self) -> None:
        """Lists the recordings at once, and from now on reads what changes."""
        self._publish(self._overviews.look())
        threading.Thread(target=self._read, name="recordings", daemon=True).start()

    def end(self) -> None:
        """Stops that, and keeps what was found out."""
        self._over.set()
        self._look_again.set()
        self._overviews.save()

    def _read(self) -> None:
        jobs_due_s = 0.0
        while not self._over.is_set():
            begin_s = time.monotonic()
            self._look_again.clear()
            self._overviews.look()
            while not self._over.is_set() and self._overviews.read_next() is not None:
                self._publish(self._overviews.recordings)
            self._publish(self._overviews.recordings)
            if time.monotonic() >= jobs_due_s:
                self._find_jobs()
                jobs_due_s = time.monotonic() + _JOBS_S
            self._look_again.wait(max(_LOOK_S, _RESTS * (time.monotonic() - begin_s)))

    def _publish(self, found: tuple[Recording, ...]) -> None:
        if found != self.recordings:
            self.recordings = found

    def _find_jobs(self) -> None:
        known = [job_control.read_facts(str(recording.path)) for recording in self.recordings if recording.live]
        recorded = {process for facts in known for process in (facts.job, *facts.ranks)}
        found = [_job(job) for job in self._find() if not _is_recorded(job) and not recorded & _processes(job)]
        self.jobs = tuple(found)

    def open(self, item: Item) -> Opened:
        """Opens it at its end; of a job that nobody records a recording is begun."""
        from zerotop.commands.job.open_session import begun, opened

        with _refusing():
            return opened(begun(item.pid) if isinstance(item, RunningJob) else item.path)

    def export(self, recording: Recording) -> str:
        """Writes the steps as CSV to the current folder."""
        from zerotop.commands.export import write_file

        with _refusing():
            path = Path(f"{recording.path.name.removesuffix(SUFFIX)}-steps.csv").absolute()
            rows = write_file(Session.open(recording.path), "steps", "csv", path)
        return f"{rows} rows, a row for each step of each rank: {path}"

    def pack(self, recording: Recording) -> str:
        """Writes it as one small file to the current folder."""
        from zerotop.commands.pack import packed

        with _refusing():
            said, _ = packed(recording.path, str(Path(recording.path.name + SUFFIX).absolute()))
        return said

    def kept_for(self, recording: Recording) -> str:
        """Why it cannot be deleted; "" where it can."""
        path, root = recording.path.absolute(), catalog.usual_place().absolute()
        if recording.live or (path.is_dir() and job_control.job_alive(str(path))):
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
        with _refusing():
            why_not = self.kept_for(recording)
            if why_not:
                raise Refused(why_not)
            if recording.path.is_dir():
                shutil.rmtree(recording.path)
            else:
                recording.path.unlink()
            self._overviews.look()
            self._publish(self._overviews.recordings)
        from zerotop.ui.drawing.formatting import size

        return f"{recording.name} is deleted: {size(recording.stamp.bytes)} are free again."

    def compare(self, recordings: Sequence[Recording]) -> Comparison:
        """Reads them whole."""
        from zerotop.commands.compare import compared

        with _refusing():
            return compared([recording.path for recording in recordings])


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What goes wrong is a sentence for the screen."""
    try:
        yield
    except (Problem, SessionError, OSError) as error:
        raise Refused(sentence(error)) from error


def _processes(job: FoundJob) -> set[object]:
    return {job.root, *(rank.process for rank in job.ranks)}


def _is_recorded(job: FoundJob) -> bool:
    return bool(job.session) and os.path.isfile(os.path.join(job.session, SESSION_FILE))


def _job(job: FoundJob) -> RunningJob:
    return RunningJob(job.root.pid, job.launcher, len(job.ranks), (), job.age_s, zero_stage(job), job.script)


def _with_tilde(path: Path) -> str:
    home = os.path.expanduser("~")
    return f"~{str(path)[len(home) :]}" if str(path).startswith(home + os.sep) else str(path)
