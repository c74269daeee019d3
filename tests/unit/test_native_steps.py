"""The C code for counted steps: what it records, what it leaves to Python, and that it keeps and frees the right objects."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import counted_loop
from counted_loop import CountedLoop, Module
from zerotop_probe.inside import native
from zerotop_probe.inside.counting import StepCounting, make_counting
from zerotop_probe.inside.guard import CostMeter, wrap_method
from zerotop_probe.inside.hooks.loops.optimizer_steps import is_plain_step

pytestmark = pytest.mark.skipif(native.counted_steps is None, reason="it was not compiled")

SOURCE = Path(native.__file__).with_name("counted_steps.c")


def find_pythons() -> list[str]:
    """Return the other versions of Python that run on this machine."""
    names = [f"python3.{minor}" for minor in range(9, 16)]
    paths = [path for name in names if (path := shutil.which(name))]
    return [path for path in paths if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0]


@pytest.fixture
def running_loop() -> CountedLoop:
    return CountedLoop(native.counted_steps)


@pytest.mark.parametrize("check", [counted_loop.check_steps, counted_loop.check_failures, counted_loop.check_references])
def test_counted_steps_in_this_python(check: Callable[[Any], None]) -> None:
    check(native.counted_steps)


def test_one_binary_serves_every_python_from_3_9_on() -> None:
    pythons = find_pythons()
    if not pythons:
        pytest.skip("there is no other Python here")
    library = str(SOURCE.with_name("_counted_steps.abi3.so"))
    for python in pythons:
        command = [python, "-X", "dev", counted_loop.__file__, library]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stdout) == (0, "ok\n"), (python, run.stderr)


def test_it_has_the_attributes_of_the_python_class() -> None:
    assert isinstance(make_counting(), native.counted_steps.StepCounting)  # type: ignore[union-attr]
    for name in StepCounting.__slots__:
        assert getattr(make_counting(), name) == getattr(StepCounting(), name), name


@pytest.mark.parametrize(
    "change",
    [
        lambda loop: setattr(loop.counting, "optimizer", 1),
        lambda loop: setattr(loop.counting, "loop", None),
        lambda loop: setattr(loop, "optimizer", counted_loop.Holder()),
    ],
    ids=["another optimizer", "no loop", "a new optimizer"],
)
def test_an_update_that_it_does_not_know_is_left_to_python(
    running_loop: CountedLoop, change: Callable[[CountedLoop], None]
) -> None:
    change(running_loop)
    running_loop.run_update()
    assert [name for name, *_ in running_loop.left] == ["before", "after"]
    assert not running_loop.read_records()


@pytest.mark.parametrize(
    ("given", "named", "is_left"),
    [
        ((None,), {}, False),  # as Accelerate calls it
        ((), {"closure": None}, False),
        ((print,), {}, True),
        ((), {"closure": print}, True),
        ((), {"grad_scaler": None}, True),
        ((None, None), {}, True),
    ],
)
def test_an_update_without_a_closure_is_counted(
    running_loop: CountedLoop, given: tuple[Any, ...], named: dict[str, Any], is_left: bool
) -> None:
    running_loop.module(1)
    running_loop.backward("loss")
    call = running_loop.optimizer, (running_loop.optimizer, *given), named
    running_loop.before(*call)
    assert is_plain_step(*call[1:]) is not is_left
    running_loop.after(*call)
    assert [name for name, *_ in running_loop.left] == (["before", "after"] if is_left else [])
    assert len(running_loop.read_records()) == (not is_left)


@pytest.mark.parametrize(
    ("name", "value"),
    [("writes_records", False), ("depth", 1), ("seen_backwards", 1), ("table_end", 0)],
)
def test_an_end_that_it_may_not_write_is_left_to_python(running_loop: CountedLoop, name: str, value: int) -> None:
    running_loop.module(1)
    running_loop.backward("loss")
    setattr(running_loop.counting, name, value)
    running_loop.run_update()
    assert [name for name, *_ in running_loop.left] == ["after"]
    assert running_loop.counting.update_ns > 0
    assert not running_loop.read_records()


def test_nothing_is_written_after_the_ring_was_left(running_loop: CountedLoop) -> None:
    running_loop.counting.leave_ring()
    running_loop.run_step()
    assert not running_loop.read_records()
    assert running_loop.left


def test_python_decides_after_the_last_counted_step_and_after_one_of_another_duration(running_loop: CountedLoop) -> None:
    running_loop.counting.uncounted_step = 11
    running_loop.run_step()
    ((begin_ns, end_ns, step, engine, flags, _),) = running_loop.left
    assert (step, engine, flags) == (10, 1, counted_loop.FLAGS)
    assert (begin_ns, end_ns) == running_loop.read_records()[0][:2]
    running_loop.counting.shortest_ns = 1e18
    running_loop.run_step()
    assert len(running_loop.left) == 2


def test_copies_of_a_module_and_modules_that_do_not_train_are_left_to_python(running_loop: CountedLoop) -> None:
    replica = Module()
    replica.__dict__.update(running_loop.module.__dict__)
    replica(1)
    running_loop.module.training = False
    running_loop.module(1)
    assert running_loop.left == [("forward", 1), ("forward", 1)]
    assert running_loop.module.calls == 0


@pytest.mark.parametrize(
    "layout",
    [
        (64 + 32 * 112, 33, 112, 64, 3, 5, 65),
        (64 + 32 * 112, 0, 112, 64, 3, 5, 65),
        (64 + 32 * 112, 32, 48, 64, 3, 5, 65),
        (64 + 32 * 112, 32, 108, 60, 3, 5, 65),
    ],
)
def test_a_ring_of_another_shape_is_refused(running_loop: CountedLoop, layout: tuple[int, ...]) -> None:
    counting = make_counting()
    with pytest.raises(ValueError, match="cannot be written"):
        counting.use_ring(running_loop.memory, 4096, layout, None, int, None, print)  # type: ignore[arg-type]
    counting.stop()
    assert not counting.writes_records


class Engine:
    """A class of the job."""

    def step(self, number: int = 1) -> int:
        """Do a step."""
        if not number:
            raise StopIteration
        return number

    def __next__(self) -> int:
        return 5


@pytest.fixture
def wrapped_calls() -> Iterator[tuple[list[str], Any]]:
    """Wraps methods of Engine; the phases that were begun, and the counting."""
    begun: list[str] = []
    counting = make_counting()
    originals = {name: vars(Engine)[name] for name in ("step", "__next__")}
    for name in originals:
        assert wrap_method(
            Engine, name, lambda time_ns, *call, name=name: begun.append(name), lambda *end: None, CostMeter(), counting
        )
    yield begun, counting
    for name, original in originals.items():
        setattr(Engine, name, original)


def test_wrapped_methods_are_methods_still(wrapped_calls: tuple[list[str], Any]) -> None:
    begun, counting = wrapped_calls
    engine = Engine()
    assert (engine.step(), engine.step(number=3), Engine.step(engine, 4), next(engine)) == (1, 3, 4, 5)
    assert begun == ["step", "step", "step", "__next__"]
    counting.is_on = True
    assert (engine.step(2), next(engine)) == (2, 5)
    with pytest.raises(StopIteration):
        engine.step(0)
    assert len(begun) == 4
    assert counting.is_on
    with pytest.raises(TypeError):
        engine.step("one", "two")  # type: ignore[call-arg, arg-type]
    assert begun[4:] == ["step"]  # the failed call is recorded
    assert not counting.is_on
    assert inspect.ismethod(engine.step)
    assert str(inspect.signature(engine.step)) == "(number: 'int' = 1) -> 'int'"
    assert (Engine.step.__name__, Engine.step.__doc__) == ("step", "Do a step.")


def test_without_it_all_is_done_in_python() -> None:
    code = "from zerotop_probe.inside import counting, native; print(native.counted_steps, type(counting.make_counting()))"
    environment = {**os.environ, "PYTHONZEROTOP_NATIVE": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "None <class 'zerotop_probe.inside.counting.StepCounting'>\n"
