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
def kind() -> type[Base]:
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


def test_result_arguments_and_signature_are_unchanged(kind: type[Base]) -> None:
    watch = Watch()
    assert wrap_method(kind, "double", watch.before, watch.after, CostMeter())
    assert kind().double(3, plus=1) == 7
    assert watch.seen == [((3,), {"plus": 1}), ("token", 0, 7)]
    assert inspect.signature(kind.double) == inspect.signature(Base.double)
    assert (kind.double.__name__, kind.double.__doc__) == ("double", "Doubles.")


def test_an_exception_is_the_same_object_and_the_end_is_noted(kind: type[Base]) -> None:
    watch, error = Watch(), KeyboardInterrupt()

    def interrupted(self: Any) -> None:
        raise error

    kind.double = interrupted  # type: ignore[assignment]
    wrap_method(kind, "double", watch.before, watch.after, CostMeter())
    with pytest.raises(KeyboardInterrupt) as caught:
        kind().double()  # type: ignore[call-arg]
    assert caught.value is error
    assert watch.seen[-1] == ("token", FAILED, None)


def test_the_end_of_an_iterator_is_no_failure(kind: type[Base]) -> None:
    watch = Watch()
    kind.__next__ = lambda self: next(iter(()))  # type: ignore[attr-defined]
    wrap_method(kind, "__next__", watch.before, watch.after, CostMeter())
    with pytest.raises(StopIteration):
        next(kind())  # type: ignore[call-overload]
    assert watch.seen[-1] == ("token", 0, None)


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_error_of_ours_is_reported_once_and_switches_that_part_off(kind: type[Base], place: str) -> None:
    meter, reported = CostMeter(), []
    meter.report_error = lambda where, error: reported.append((where, str(error)))
    watch = Watch(fails=place)
    wrap_method(kind, "double", watch.before, watch.after, meter)
    assert [kind().double(n) for n in range(3)] == [0, 2, 4]
    assert reported == [("Kind.double", place)]
    assert meter.errors == 1
    assert len(watch.seen) == (place == "after")


def test_a_report_that_fails_is_counted_and_swallowed() -> None:
    meter = CostMeter()
    meter.report_error = lambda where, error: 1 / 0  # type: ignore[assignment]
    assert Guard("x", meter).run(lambda: [][0]) is None
    assert meter.errors == 2


def test_a_method_is_wrapped_once_and_only_where_it_is_defined(kind: type[Base]) -> None:
    watch, meter = Watch(), CostMeter()
    assert wrap_method(kind, "double", watch.before, watch.after, meter)
    assert not wrap_method(kind, "double", watch.before, watch.after, meter)
    assert not wrap_method(kind, "no_such_method", watch.before, watch.after, meter)
    assert not wrap_method(type("Heir", (kind,), {}), "double", watch.before, watch.after, meter)
    kind().double(1)
    assert len(watch.seen) == 2


def test_the_cost_is_our_time_without_the_call(kind: type[Base]) -> None:
    def busy(milliseconds: int) -> None:
        end = now() + milliseconds * 1_000_000
        while now() < end:
            pass

    def slow(self: Any) -> None:
        busy(200)

    def before(*_: Any) -> bool:
        busy(5)
        return True

    def after(*_: Any) -> None:
        busy(7)

    kind.double = slow  # type: ignore[assignment]
    meter = CostMeter()
    wrap_method(kind, "double", before, after, meter)
    kind().double()  # type: ignore[call-arg]
    assert 12_000_000 <= meter.cost_ns < 200_000_000


def test_all_is_taken_out_again_whatever_fails(kind: type[Base]) -> None:
    remove_hooks()
    wrap_method(kind, "double", Watch().before, Watch().after, CostMeter())
    error = RuntimeError("stuck")

    def fails() -> None:
        raise error

    on_removal(fails)
    assert remove_hooks() == [error]
    assert kind.double is Base.double
    assert remove_hooks() == []
