"""The thread that reads a recording and makes pictures of it, while the app's thread answers keys."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

_CLOSE_TIMEOUT_S = 2.0


class _Job(NamedTuple):
    run: Callable[[], Any]
    deliver: Callable[[Any], object] | None
    slot: str


class FrameWorker:
    """Runs jobs one by one on its own thread, and handles their results in the thread that submits them.

    Only the app's thread calls the methods. A job with a slot replaces a waiting one of the same slot, so that the newest
    request wins. Only jobs read the recording; they return immutable values.
    """

    def __init__(
        self, call_app: Callable[[Callable[[], None]], object], handle_error: Callable[[BaseException], bool]
    ) -> None:
        """``call_app`` runs a function in the app's thread; an exception in that function must end the app.

        ``handle_error`` is called there with the error of a job; unless it returns True the error is raised.
        """
        self._call_app = call_app
        self._handle_error = handle_error
        self._urgent: dict[object, _Job] = {}  # by slot, in the order of their submission
        self._routine: dict[object, _Job] = {}
        self._changed = threading.Condition()
        self._pending: Counter[str] = Counter()  # jobs by slot, submitted and not delivered
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the result of any job is still to be delivered."""
        return self._pending.total() > 0

    def is_pending(self, slot: str) -> bool:
        """Whether the result of a job of this slot is still to be delivered."""
        return self._pending[slot] > 0

    def is_waiting(self, slot: str) -> bool:
        """Whether a job of this slot has not begun. Any thread may ask."""
        with self._changed:
            return slot in self._urgent or slot in self._routine

    def submit(
        self,
        run: Callable[[], Any],
        deliver: Callable[[Any], object] | None = None,
        *,
        slot: str = "",
        routine: bool = False,
    ) -> None:
        """Call ``run`` on the worker's thread, and then ``deliver`` with its result in the app's thread.

        Args:
            slot: replaces the job of this slot that has not begun; without a slot every job is run.
            routine: runs when nothing else is to be done.
        """
        queue = self._routine if routine else self._urgent
        job = _Job(run, deliver, slot)
        with self._changed:
            if self._is_closed:
                return
            replaced = queue.pop(slot, None) if slot else None
            queue[slot or object()] = job
            self._pending[slot] += replaced is None
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_jobs, name="frames", daemon=True)
            self._thread.start()

    def close(self, *, wait: bool = False) -> None:
        """Deliver no more results; ``wait``: block until the running job is done, for a few seconds at most."""
        with self._changed:
            self._is_closed = True
            self._urgent.clear()
            self._routine.clear()
            self._pending.clear()
            self._changed.notify()
        if wait and self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run_jobs(self) -> None:
        while (job := self._take_job()) is not None:
            try:
                result = job.run()
            except BaseException as error:  # handled in the app, or raised again there, which ends it as any other error
                self._deliver(self._make_raiser(job, error))
            else:
                self._deliver(self._make_delivery(job, result))
            del job

    def _deliver(self, delivery: Callable[[], None]) -> None:
        try:
            self._call_app(delivery)
        except RuntimeError:  # the app has ended, without waiting for a long job
            if not self._is_closed:
                raise

    def _take_job(self) -> _Job | None:
        with self._changed:
            while not (self._urgent or self._routine or self._is_closed):
                self._changed.wait()
            queue = self._urgent or self._routine
            return None if self._is_closed else queue.pop(next(iter(queue)))

    def _make_delivery(self, job: _Job, result: Any) -> Callable[[], None]:
        def deliver_frame() -> None:
            if not self._is_closed:
                self._pending[job.slot] -= 1
                if job.deliver is not None:
                    job.deliver(result)

        return deliver_frame

    def _make_raiser(self, job: _Job, error: BaseException) -> Callable[[], None]:
        def raise_error() -> None:
            if not self._is_closed:
                self._pending[job.slot] -= 1
                if not self._handle_error(error):
                    raise error

        return raise_error
