"""The stand-in for a DeepSpeed optimizer's timers, around DeepSpeed's own two kinds of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.hooks.timer_proxy import WatchedTimers


class Inner:
    """Has what DeepSpeed's timers have, and remembers; picklable, which theirs is too."""

    class Timer:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def start(self) -> None:
            self.calls.append("start")

        def stop(self, reset: bool = False, record: bool = False) -> None:
            self.calls.append(f"stop {reset} {record}")

        def elapsed(self, reset: bool = True) -> float:
            return 1.5

    def __init__(self) -> None:
        self.timers: dict[str, Inner.Timer] = {}

    def __call__(self, name: str) -> Inner.Timer:
        return self.timers.setdefault(name, Inner.Timer())

    def log(self, names: list[str], ranks: Any = None) -> str:
        return ",".join(names)


@pytest.fixture
def calls_heard() -> list[str]:
    return []


@pytest.fixture
def watched_timers(calls_heard: list[str]) -> WatchedTimers:
    watchers = {"watched": (lambda: calls_heard.append("starts"), lambda: calls_heard.append("stops"))}
    return WatchedTimers(Inner(), watchers, CostMeter())


def test_watched_timers_are_heard_and_reach_deepspeed(watched_timers: WatchedTimers, calls_heard: list[str]) -> None:
    watched_timers("watched").start()
    watched_timers("watched").stop(record=True)
    assert calls_heard == ["starts", "stops"]
    assert watched_timers("watched").calls == ["start", "stop False True"]
    assert watched_timers("watched").elapsed() == 1.5


def test_all_else_is_deepspeeds_own(watched_timers: WatchedTimers, calls_heard: list[str]) -> None:
    other = watched_timers("other")
    other.start()
    assert type(other) is Inner.Timer
    assert calls_heard == []
    assert watched_timers.log(["a", "b"]) == "a,b"
    assert bool(watched_timers)
    with pytest.raises(AttributeError):
        _ = watched_timers.no_such_thing


def test_a_watcher_that_fails_goes_off_and_the_timer_goes_on(calls_heard: list[str]) -> None:
    timers = WatchedTimers(Inner(), {"watched": (lambda: 1 / 0, lambda: calls_heard.append("stops"))}, meter := CostMeter())  # type: ignore[dict-item]
    for _ in range(2):
        timers("watched").start()
        timers("watched").stop()
    assert timers("watched").calls == ["start", "stop False False"] * 2
    assert meter.errors == 1
    assert calls_heard == []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_of_the_optimizer_gets_deepspeeds_object(watched_timers: WatchedTimers, copied: Any) -> None:
    assert type(copied(watched_timers)) is Inner


def test_deepspeeds_own_noop_timer() -> None:
    deepspeed_timer = pytest.importorskip("deepspeed.utils.timer")
    heard: list[str] = []
    noop = deepspeed_timer.NoopTimer()
    timers = WatchedTimers(noop, {"x": (lambda: heard.append("starts"), lambda: heard.append("stops"))}, CostMeter())
    timers("x").start()
    timers("x").stop(reset=True)
    timers.log(["x"])
    assert heard == ["starts", "stops"]
    assert timers.get_timers() == {}
