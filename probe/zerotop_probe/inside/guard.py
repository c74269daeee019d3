"""Wraps the job's functions without changing what they do: same result, same exceptions, same signature.

Whatever the probe does around a call runs under a guard. An error in it is reported once, switches off that
one part, and is never seen by the job.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from zerotop_probe.recording.tables import FAILED

now: Callable[[], int] = time.monotonic_ns

# Called as ``before(time_ns, self, args, kwargs)``; None means that this call is none of our business.
BeforeHook = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]
# Called as ``after(token, time_ns, flags, result)`` with what ``before`` gave; flags is FAILED or 0, result
# None if failed.
AfterHook = Callable[[Any, int, int, Any], None]

_WRAPPER_MARK = "__zerotop__"

# How to take out again what was put into the job, in the order in which it was put there.
_removals: list[Callable[[], object]] = []


def on_removal(undo: Callable[[], object]) -> None:
    """Has ``undo`` called when the probe is taken out of this process."""
    _removals.append(undo)


def remove_hooks() -> list[Exception]:
    """Takes out everything that was put into the job, the last first. Raises nothing; returns what went wrong."""
    errors: list[Exception] = []
    while _removals:
        try:
            _removals.pop()()
        except Exception as error:
            errors.append(error)
    return errors


class CostMeter:
    """What the probe costs and how it fares; ``report(where, error)`` is told each part's first error."""

    def __init__(self) -> None:
        self.cost_ns = 0
        self.boundaries = 0
        self.errors = 0
        self.report_error: Callable[[str, BaseException], None] = lambda where, error: None


class Guard:
    """One place of the probe's work in the job, which goes off by itself when it fails."""

    def __init__(self, name: str, meter: CostMeter) -> None:
        self.name = name
        self.is_on = True
        self._meter = meter

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls ``function`` if this part is on, and accounts for its time. None where that failed."""
        if not self.is_on:
            return None
        entered = now()
        try:
            return function(*arguments)
        except Exception as error:
            self.switch_off(error)
            return None
        finally:
            self._meter.cost_ns += now() - entered

    def switch_off(self, error: BaseException) -> None:
        """Switches this part off and says why."""
        self.is_on = False
        self._meter.errors += 1
        try:
            self._meter.report_error(self.name, error)
        except Exception:
            self._meter.errors += 1


def is_wrapped(function: Any) -> bool:
    """Whether this is a wrapper of ours, or one around it."""
    return hasattr(function, _WRAPPER_MARK)


def wrap_method(owner: Any, name: str, before: BeforeHook, after: AfterHook, meter: CostMeter) -> bool:
    """Has a method of the class ``owner`` call ``before`` and ``after``. False where the class itself has no
    such method.

    The arguments are not touched, and ``after`` runs however the method is left.
    """
    original = vars(owner).get(name)
    if original is None or is_wrapped(original):
        return False
    wrapper = wrap_function(original, f"{owner.__name__}.{name}", before, after, meter)
    setattr(owner, name, wrapper)
    on_removal(lambda: _restore_method(owner, name, wrapper, original))
    return True


def _restore_method(owner: Any, name: str, wrapper: Any, original: Any) -> None:
    # Where somebody else has wrapped ours since, it stays, and does nothing.
    if vars(owner).get(name) is wrapper:
        setattr(owner, name, original)


def wrap_function(
    original: Callable[..., Any], where: str, before: BeforeHook, after: AfterHook, meter: CostMeter
) -> Callable[..., Any]:
    """``original`` with ``before`` and ``after`` around it."""
    part = Guard(where, meter)

    # Written out, not split up: this runs at every boundary, and each further call would cost all of them.
    @functools.wraps(original)
    def call_original(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not part.is_on:
            return original(self, *args, **kwargs)
        begin_ns = now()
        try:
            token = before(begin_ns, self, args, kwargs)
        except Exception as error:
            token = None
            part.switch_off(error)
        meter.cost_ns += now() - begin_ns
        if token is None:
            return original(self, *args, **kwargs)
        result, flags = None, FAILED
        try:
            result = original(self, *args, **kwargs)
            flags = 0
            return result
        except StopIteration:
            flags = 0  # the end of an iterator is how a loop is left, not a failure
            raise
        finally:
            end_ns = now()
            try:
                after(token, end_ns, flags, result)
            except Exception as error:
                part.switch_off(error)
            meter.cost_ns += now() - end_ns

    setattr(call_original, _WRAPPER_MARK, True)
    return call_original
