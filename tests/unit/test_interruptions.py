"""Exceptions of the job that arrive in the probe's code reach the job, without the probe's frames in their tracebacks."""

from __future__ import annotations

import functools
import importlib.util
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from zerotop_probe.inside.guard import CostMeter, Guard, wrap_method
from zerotop_probe.recording.interruptions import OWN_FOLDER, is_interruption


class Preempted(RuntimeError):
    """Raised by a signal handler."""


def raise_preempted(number: int, frame: FrameType | None) -> None:
    raise Preempted(number)


def raise_without_arguments(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise TimeoutError("too late")


class Handler:
    """A handler that is an object."""

    def __call__(self, *arguments: Any) -> None:
        raise Preempted


@pytest.fixture(params=[raise_preempted, raise_without_arguments, Handler(), functools.partial(raise_preempted)])
def handler(request: pytest.FixtureRequest) -> Iterator[Any]:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield request.param
    signal.signal(signal.SIGUSR1, before)


def interrupt(*arguments: Any) -> Any:
    """Run the signal's handler here."""
    signal.raise_signal(signal.SIGUSR1)


def fail(*arguments: Any) -> Any:
    raise AttributeError("an error of the probe")


def do_nothing(*arguments: Any) -> Any:
    return arguments


@pytest.fixture
def as_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the functions above for the probe's."""
    folder = __file__
    monkeypatch.setattr("zerotop_probe.recording.interruptions.is_own", lambda code: _is_probe(code, folder))


def _is_probe(code: Any, file: str) -> bool:
    is_hook = code.co_filename == file and code.co_name in ("interrupt", "fail", "do_nothing")
    return is_hook or "zerotop_probe" in code.co_filename


def call_hooked(before: Callable[..., Any], after: Callable[..., Any]) -> tuple[BaseException | None, CostMeter, Any]:
    class Owner:
        calls = 0

        def work(self) -> str:
            self.calls += 1
            return "done"

    meter, owner = CostMeter(), Owner()
    assert wrap_method(Owner, "work", before, after, meter)
    try:
        assert owner.work() == "done"
    except BaseException as error:
        return error, meter, owner
    return None, meter, owner


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.usefixtures("as_probe", "handler")
def test_handler_reaches_job(place: str) -> None:
    hooks = (interrupt, do_nothing) if place == "before" else (do_nothing, interrupt)
    error, meter, owner = call_hooked(*hooks)
    assert isinstance(error, (Preempted, TimeoutError))
    assert error.__context__ is None
    assert meter.errors == 0
    assert owner.calls == (place == "after")
    if sys.version_info >= (3, 11):
        assert "zerotop_probe" not in "".join(traceback.format_exception(error))
        assert "in interrupt" not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.usefixtures("as_probe", "handler")
def test_errors_of_hooks_are_counted_and_hidden(place: str) -> None:
    error, meter, owner = call_hooked(*((fail, do_nothing) if place == "before" else (do_nothing, fail)))
    assert error is None
    assert (meter.errors, owner.calls) == (1, 1)


def test_error_of_job_shows_only_its_frames() -> None:
    class Owner:
        def work(self) -> None:
            raise ValueError("planted")

    assert wrap_method(Owner, "work", do_nothing, do_nothing, CostMeter())
    try:
        Owner().work()
    except ValueError as error:
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    expected = ["test_error_of_job_shows_only_its_frames", "work"]
    assert names == expected if sys.version_info >= (3, 11) else names[-1] == "work"


@pytest.mark.parametrize("kind", [Preempted, TimeoutError, RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.usefixtures("as_probe")
def test_exceptions_of_other_threads(kind: type[BaseException]) -> None:
    import ctypes
    import threading

    def do_nothing() -> None:  # of the probe, by its name
        set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
        set_exception(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(kind))
        for _ in range(100):
            pass

    guard = Guard("part", CostMeter())
    with pytest.raises(kind):
        guard.run(do_nothing)
    assert guard.is_on


@pytest.mark.parametrize(
    "kind", [AttributeError("name"), KeyError("key"), OSError(2, "no"), AssertionError(), MemoryError()]
)
@pytest.mark.usefixtures("as_probe")
def test_errors_of_probe_are_none(kind: Exception) -> None:
    def fail() -> None:
        raise kind

    try:
        fail()
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
        found = is_interruption(error)
    assert not found


@pytest.mark.parametrize(("text", "is_one"), [("import no_such_module", False), ("interrupt()", True)])
def test_while_the_probe_is_imported(handler: Any, monkeypatch: pytest.MonkeyPatch, text: str, is_one: bool) -> None:
    spec = importlib.util.spec_from_file_location("imported", f"{OWN_FOLDER}imported.py")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr(spec.loader, "get_code", lambda name: compile(text, str(spec.origin), "exec"))
    module = importlib.util.module_from_spec(spec)
    vars(module)["interrupt"] = interrupt
    with pytest.raises((ImportError, Preempted, TimeoutError)) as raised:
        spec.loader.exec_module(module)
    assert is_interruption(raised.value) == is_one
