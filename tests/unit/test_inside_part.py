"""What is wrapped behaves as before, whatever the probe does around it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from zerotop_probe.inside.guard import CostMeter, Guard, now, on_removal, remove_hooks, wrap_method
from zerotop_probe.recording.tables import FAILED


class Base:
    def double(self, number: int, *, plus: int = 0) -> int:
        """Doubles."""
        if number < 0:
            raise ValueError(number)
        return 2 * number + plus


@pytest.fixture
def fresh_class() -> type[Base]:
    """A fresh class with a method of its own to wrap."""
    return type("Kind", (Base,), {"double": Base.double})


class Watch:
    """Notes what it is told, or fails."""

    def __init__(self, *, fails: str = "") -> None:
        self.seen: list[Any] = []
        self._fails = fails

    def before(self, time_ns: int, self_: Any, args: Any, kwargs: Any) -> Any:
        if self._fails == "before":
            raise RuntimeError("before")
        self.seen.append((args, kwargs))
        return "token"

    def after(self, token: Any, time_ns: int, flags: int, result: Any) -> None:
        if self._fails == "after":
            raise RuntimeError("after")
        self.seen.append((token, flags, result))


def test_result_arguments_and_signature_are_unchanged(fresh_class: type[Base]) -> None:
    watch = Watch()
    assert wrap_method(fresh_class, "double", watch.before, watch.after, CostMeter())
    assert fresh_class().double(3, plus=1) == 7
    assert watch.seen == [((3,), {"plus": 1}), ("token", 0, 7)]
    assert inspect.signature(fresh_class.double) == inspect.signature(Base.double)
    assert (fresh_class.double.__name__, fresh_class.double.__doc__) == ("double", "Doubles.")


def test_an_exception_is_the_same_object_and_the_end_is_noted(fresh_class: type[Base]) -> None:
    watch, error = Watch(), KeyboardInterrupt()

    def raise_error(self: Any) -> None:
        raise error

    fresh_class.double = raise_error  # type: ignore[assignment]
    wrap_method(fresh_class, "double", watch.before, watch.after, CostMeter())
    with pytest.raises(KeyboardInterrupt) as caught:
        fresh_class().double()  # type: ignore[call-arg]
    assert caught.value is error
    assert watch.seen[-1] == ("token", FAILED, None)


def test_the_end_of_an_iterator_is_no_failure(fresh_class: type[Base]) -> None:
    watch = Watch()
    fresh_class.__next__ = lambda self: next(iter(()))  # type: ignore[attr-defined]
    wrap_method(fresh_class, "__next__", watch.before, watch.after, CostMeter())
    with pytest.raises(StopIteration):
        next(fresh_class())  # type: ignore[call-overload]
    assert watch.seen[-1] == ("token", 0, None)


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_error_of_ours_is_reported_once_and_switches_that_part_off(fresh_class: type[Base], place: str) -> None:
    meter, reported = CostMeter(), []
    meter.report_error = lambda where, error: reported.append((where, str(error)))
    watch = Watch(fails=place)
    wrap_method(fresh_class, "double", watch.before, watch.after, meter)
    assert [fresh_class().double(n) for n in range(3)] == [0, 2, 4]
    assert reported == [("Kind.double", place)]
    assert meter.errors == 1
    assert len(watch.seen) == (place == "after")


def test_a_report_that_fails_is_counted_and_swallowed() -> None:
    meter = CostMeter()
    meter.report_error = lambda where, error: 1 / 0  # type: ignore[assignment]
    assert Guard("x", meter).run(lambda: [][0]) is None
    assert meter.errors == 2


def test_a_method_is_wrapped_once_and_only_where_it_is_defined(fresh_class: type[Base]) -> None:
    watch, meter = Watch(), CostMeter()
    assert wrap_method(fresh_class, "double", watch.before, watch.after, meter)
    assert not wrap_method(fresh_class, "double", watch.before, watch.after, meter)
    assert not wrap_method(fresh_class, "no_such_method", watch.before, watch.after, meter)
    assert not wrap_method(type("Heir", (fresh_class,), {}), "double", watch.before, watch.after, meter)
    fresh_class().double(1)
    assert len(watch.seen) == 2


def test_the_cost_is_our_time_without_the_call(fresh_class: type[Base]) -> None:
    def keep_busy(milliseconds: int) -> None:
        end = now() + milliseconds * 1_000_000
        while now() < end:
            pass

    def run_slowly(self: Any) -> None:
        keep_busy(200)

    def look_before(*_: Any) -> bool:
        keep_busy(5)
        return True

    def look_after(*_: Any) -> None:
        keep_busy(7)

    fresh_class.double = run_slowly  # type: ignore[assignment]
    meter = CostMeter()
    wrap_method(fresh_class, "double", look_before, look_after, meter)
    fresh_class().double()  # type: ignore[call-arg]
    assert 12_000_000 <= meter.cost_ns < 200_000_000


def test_all_is_taken_out_again_whatever_fails(fresh_class: type[Base]) -> None:
    remove_hooks()
    wrap_method(fresh_class, "double", Watch().before, Watch().after, CostMeter())
    error = RuntimeError("stuck")

    def raise_error() -> None:
        raise error

    on_removal(raise_error)
    assert remove_hooks() == [error]
    assert fresh_class.double is Base.double
    assert remove_hooks() == []
