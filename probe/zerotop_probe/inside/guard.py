"""Wrap functions of the job without changing them: same result, same exceptions, same signature.

The probe's work around a call runs under a guard. An error in it is reported once, disables that one part, and never reaches
the job. An exception of the job that arrives in it, as from a signal handler, is none: it goes on to the job, see
:mod:`~zerotop_probe.recording.interruptions`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.counting import StepCounting, make_counting, wrap_counted
from zerotop_probe.recording.interruptions import hide_frames, is_interruption
from zerotop_probe.recording.tables import FAILED

now: Callable[[], int] = time.monotonic_ns

# Called as ``before(time_ns, self, args, kwargs)``; returns a token, or None to ignore this call.
BeforeHook = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]
# Called as ``after(token, time_ns, flags, result)`` with the token; flags is FAILED or 0, result is None after a failure.
AfterHook = Callable[[Any, int, int, Any], None]

_WRAPPER_MARK = "__zerotop__"
NEVER_COUNTED = make_counting()
"""The state of calls that are never left out."""
# Where a wrapper is: in a call that it does not measure or only counts, or before, within or after one that it measures.
_UNMEASURED, _COUNTED, _BEFORE, _WITHIN, _AFTER = range(5)

# Functions that undo changes to the job, in the order of the changes.
_removals: list[Callable[[], object]] = []


def on_removal(undo: Callable[[], object]) -> None:
    """Register a function to call when the probe is removed from this process."""
    _removals.append(undo)


def remove_hooks() -> list[Exception]:
    """Undo all changes to the job, the last first. Never raises; return the errors."""
    errors: list[Exception] = []
    while _removals:
        try:
            _removals.pop()()
        except Exception as error:
            errors.append(error)
    return errors


class CostMeter:
    """The probe's cost and errors; ``report_error(where, error)`` receives the first error of each guard."""

    def __init__(self) -> None:
        # On the training thread.
        self.cost_ns = 0
        # Processor time of the probe's own threads, by their tasks: meanwhile they hold Python's lock.
        self.thread_ns: dict[str, int] = {}
        # Of facts that are recorded once; not in ``cost_ns``.
        self.one_time_ns = 0
        self.boundaries = 0
        self.errors = 0
        self.report_error: Callable[[str, BaseException], None] = lambda where, error: None
        # Called with the begin of a call that an exception leaves, and whether its hooks were interrupted: phases that began
        # since then and are still in progress have no end.
        self.forget_phases: Callable[[int, bool], None] = lambda begin_ns, interrupted: None

    def move_to_one_time(self, passed_ns: int) -> None:
        """Count a part of the hook in progress as a one-time cost."""
        self.one_time_ns += passed_ns
        self.cost_ns -= passed_ns

    @property
    def total_ns(self) -> int:
        """The time that the probe took from the training so far, without one-time costs."""
        return self.cost_ns + self.threads_ns

    @property
    def threads_ns(self) -> int:
        """The cost of the probe's threads so far."""
        return sum(self.thread_ns.values())


class Guard:
    """One part of the probe's work, which is disabled when it fails."""

    def __init__(self, name: str, meter: CostMeter) -> None:
        self.name = name
        self.is_on = True
        self._meter = meter

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function`` if this part is on, and add its time to the cost. Return None if it failed."""
        if not self.is_on:
            return None
        begin_ns = now()
        try:
            return function(*arguments)
        except BaseException as error:
            self.settle(error, begin_ns)
            return None
        finally:
            self._meter.cost_ns += now() - begin_ns

    def run_once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """As :meth:`run`, for a one-time cost within a hook, which does not count as the hook's."""
        before_ns = self._meter.cost_ns
        result = self.run(function, *arguments)
        passed_ns, self._meter.cost_ns = self._meter.cost_ns - before_ns, before_ns
        self._meter.move_to_one_time(passed_ns)
        return result

    def settle(self, error: BaseException, begin_ns: int | None = None) -> None:
        """Disable this part after an error of its own; raise an exception of the job again.

        ``begin_ns``: phases that began since then have been interrupted.
        """
        if is_interruption(error):
            if begin_ns is not None:
                self._meter.forget_phases(begin_ns, True)
            raise error
        self.switch_off(error)

    def switch_off(self, error: BaseException) -> None:
        """Disable this part and report the error."""
        self.is_on = False
        self._meter.errors += 1
        try:
            self._meter.report_error(self.name, error)
        except BaseException as other:
            if is_interruption(other):
                raise
            self._meter.errors += 1


def is_usual_end(error: BaseException) -> bool:
    """Whether an exception is no failure: an iterator has ended, or checkpointing has computed enough of a forward again."""
    return isinstance(error, StopIteration) or type(error).__name__ == "_StopRecomputationError"


def is_wrapped(function: Any) -> bool:
    """Return whether this is a wrapper of the probe, or wraps one with functools.wraps."""
    return hasattr(function, _WRAPPER_MARK)


def wrap_method(
    owner: Any,
    name: str,
    before: BeforeHook,
    after: AfterHook,
    meter: CostMeter,
    counting: StepCounting | None = None,
) -> bool:
    """Wrap a method of the class ``owner`` in ``before`` and ``after``. Return False if the class does not define it itself.

    The arguments are passed on unchanged, and ``after`` also runs when the method raises. ``counting``: neither is called in
    counted steps. With one, :data:`NEVER_COUNTED` included, C code calls the wrapper and hides its frame in every traceback.
    """
    original = vars(owner).get(name)
    if original is None or is_wrapped(original):
        return False
    wrapper = wrap_function(original, f"{owner.__name__}.{name}", before, after, meter, counting)
    setattr(owner, name, wrapper)
    on_removal(lambda: _restore_method(owner, name, wrapper, original))
    return True


def _restore_method(owner: Any, name: str, wrapper: Any, original: Any) -> None:
    # If another library has wrapped the wrapper since, it stays and does nothing.
    if vars(owner).get(name) is wrapper:
        setattr(owner, name, original)


def wrap_function(  # noqa: C901 as its inner function must be one
    original: Callable[..., Any],
    where: str,
    before: BeforeHook,
    after: AfterHook,
    meter: CostMeter,
    counting: StepCounting | None = None,
) -> Callable[..., Any]:
    """Return ``original`` wrapped in ``before`` and ``after``, which are left out in the steps that ``counting`` counts."""
    guard = Guard(where, meter)
    counts = counting if counting is not None else NEVER_COUNTED
    note_failure = make_failure_note(guard, before, after, counts)

    # Not split into functions: this runs at every boundary, and each further call would add to its cost.
    @functools.wraps(original)
    def call_original(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: C901
        place, begin_ns = _UNMEASURED, 0
        token = result = None
        try:
            if counts.is_on:
                place = _COUNTED
            if place or not guard.is_on:
                return original(self, *args, **kwargs)
            place, begin_ns = _BEFORE, now()
            token = before(begin_ns, self, args, kwargs)
            meter.cost_ns += now() - begin_ns
            place = _WITHIN
            result = original(self, *args, **kwargs)
            place = _AFTER
            if token is not None:
                end_ns = now()
                after(token, end_ns, 0, result)
                meter.cost_ns += now() - end_ns
            return result
        except BaseException as error:
            try:
                if place == _COUNTED:
                    if not is_usual_end(error):
                        note_failure(self, args, kwargs)
                elif place == _WITHIN:
                    if token is not None:
                        guard.run(after, token, now(), 0 if is_usual_end(error) else FAILED, None)
                elif place:
                    guard.settle(error)
            except BaseException as other:
                meter.forget_phases(begin_ns or now(), True)
                hide_frames(other)
                raise
            if place not in (_BEFORE, _AFTER):
                hide_frames(error)
                raise
        # The probe's part has failed.
        if place == _AFTER:
            return result
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise

    setattr(call_original, _WRAPPER_MARK, True)
    counted = wrap_counted(counts, original, call_original, note_failure) if counting is not None else None
    return call_original if counted is None else _mark_wrapper(counted, original, call_original)


def call_from_c(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls this one; made by C code, if there is any, it hides the probe's frames in tracebacks."""
    counted: Callable[..., Any] | None = wrap_counted(NEVER_COUNTED, function, function, _note_nothing)
    return function if counted is None else counted


def _note_nothing(*call: Any) -> None:
    pass


def _mark_wrapper(counted: Any, original: Callable[..., Any], call_original: Callable[..., Any]) -> Callable[..., Any]:
    wrapper: Callable[..., Any] = functools.update_wrapper(counted, call_original)
    setattr(wrapper, "__wrapped__", original)  # noqa: B010 as mypy knows no such attribute
    return wrapper


def make_failure_note(guard: Guard, before: BeforeHook, after: AfterHook, counting: StepCounting) -> Callable[..., None]:
    """Return a function that records a call that failed in a counted step, without its duration: its begin is unknown."""

    def note_failure(subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        counting.stop()
        token = guard.run(before, now(), subject, args, kwargs)
        if token is not None:
            guard.run(after, token, now(), FAILED, None)

    return note_failure


def wrap_plain_function(
    original: Callable[..., Any], where: str, before: BeforeHook, after: AfterHook, meter: CostMeter
) -> Callable[..., Any]:
    """Like :func:`wrap_function`, for functions that belong to no object: ``before`` gets None for it."""

    @functools.wraps(original)
    def call_original(subject: None, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    measured = wrap_function(call_original, where, before, after, meter)

    @functools.wraps(measured)
    def call_measured(*args: Any, **kwargs: Any) -> Any:
        try:
            return measured(None, *args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise

    return call_measured
