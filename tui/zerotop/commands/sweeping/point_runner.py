"""The base class of sweeps and searches: points that run in one thread, shown or printed by another."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from zerotop.commands.common.errors import describe_error
from zerotop.commands.sweeping.point_run import Interrupted
from zerotop.recording.sweeps import PointAttempt, Sweep, find_point_recording
from zerotop_probe.recording.directory import SESSION_FILE

if TYPE_CHECKING:
    from zerotop.ui.base.start_interfaces import OpenedRecording


class PointRefused(Exception):
    """Nothing runs, for a reason that the message says in a sentence."""


class PointRunner(ABC):
    """Points in progress. One thread calls :meth:`run`; any thread may read the attributes and call :meth:`stop`."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.attempts: Mapping[int, PointAttempt] = {}  # by point, of those that run now; replaced, never changed
        self.begun_s = time.time()
        self.problem = ""  # a sentence: why it ended early
        self.was_interrupted = False
        self.is_over = False
        self._ended_s = 0.0
        self._changing = threading.Lock()
        self._stopping = threading.Event()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began, or went on."""
        return (self._ended_s or time.time()) - self.begun_s

    def stop(self) -> None:
        """Stop the jobs that run now; :meth:`run` returns soon."""
        self._stopping.set()

    def is_stopping(self) -> bool:
        """Return whether it was asked to stop."""
        return self._stopping.is_set()

    def open_point(self, number: int) -> OpenedRecording | None:
        """Open the recording of a point; None if it has none. Raises RecordingError."""
        attempt = self.attempts.get(number)
        path = attempt.recording if attempt is not None and (attempt.recording / SESSION_FILE).is_file() else None
        path = path or find_point_recording(self.sweep.path, self.sweep.points[number].result)
        if path is None:
            return None
        from zerotop.commands.job.open_recording import open_recording

        return replace(open_recording(path), controller=None)  # the sweep controls its jobs

    def run(self) -> None:
        """Run all points without a result."""
        try:
            self._run_points()
        except Interrupted:
            self.was_interrupted = True
            self.problem = "Interrupted."
        except PointRefused as refusal:
            self.problem = str(refusal)
        except BrokenPipeError:  # whoever read the lines is gone
            raise
        except OSError as error:
            self.problem = f"Nothing can be written to {self.sweep.path}: {describe_error(error)}."
        finally:
            self.attempts = {}
            self._ended_s = time.time()
            self.is_over = True

    @abstractmethod
    def _run_points(self) -> None:
        """Run all points. Raises Interrupted, Refused, and OSError if nothing can be written."""

    def note_attempt(self, attempt: PointAttempt) -> None:
        """Note that an attempt has begun."""
        with self._changing:
            self.attempts = {**self.attempts, attempt.point: attempt}

    def forget_attempt(self, number: int) -> None:
        """Note that no attempt of a point runs any more."""
        with self._changing:
            self.attempts = {point: attempt for point, attempt in self.attempts.items() if point != number}
