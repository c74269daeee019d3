"""A training loop without PyTorch that calls the probe's C hooks. Other versions of Python run it as a script:

python counted_loop.py PATH_OF_THE_LIBRARY
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
import itertools
import struct
import sys
import weakref
from typing import Any

SLOT_BYTES, SLOTS_AT, PHASE, FLAGS, TABLE = 112, 64, 5, 65, 3
_SPAN = struct.Struct("<qqqiiiiHHBBH56xQ")


def load_library(path: str) -> Any:
    """Return the compiled module from that file."""
    loader = importlib.machinery.ExtensionFileLoader("_counted_steps", path)
    spec = importlib.util.spec_from_loader("_counted_steps", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Holder:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Module:
    """A module that is called in the same way as torch.nn.Module."""

    _compiled_call_impl: Any = None

    def __init__(self) -> None:
        self.training = True
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped_call_impl(*args, **kwargs)

    def _wrapped_call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled_call_impl is not None:
            return self._compiled_call_impl(*args, **kwargs)
        return self._call_impl(*args, **kwargs)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.forward(*args, **kwargs)

    def forward(self, value: int, *, fails: bool = False) -> int:
        """Return one more."""
        if fails:
            raise RuntimeError("planted")
        return value + 1


class CountedLoop:
    """A loop of counted steps; ``left`` lists the calls that the C code left to Python."""

    def __init__(self, library: Any, slots: int = 32) -> None:
        self.counting = library.StepCounting()
        self.memory = (ctypes.c_char * (SLOTS_AT + slots * SLOT_BYTES))()
        self.loop, self.files, self.recorder = Holder(finished_steps=10, index=1), Holder(position=0), Holder(last_step=None)
        self.left: list[Any] = []
        self.failures: list[Any] = []
        self.take_slot = itertools.count().__next__
        layout = len(self.memory), slots, SLOT_BYTES, SLOTS_AT, TABLE, PHASE, FLAGS
        address = ctypes.addressof(self.memory)
        self.counting.use_ring(
            self.memory, address, layout, self.files, self.take_slot, self.recorder, lambda *run: self.left.append(run)
        )
        self.optimizer = Holder()
        self.before = library.BeforeUpdate(self.counting, lambda *call: self.left.append(("before", *call)))
        self.after = library.AfterUpdate(self.counting, lambda *call: self.left.append(("after", *call)))
        self.backward = library.CountedCall(
            self.counting, lambda *call: self.left.append(("backward", *call)), self._run_backward, self._note_failure
        )
        self.backward.counts_backwards = True
        self.module = Module()
        self.module.__dict__["_compiled_call_impl"] = library.CountedForward(
            self.counting,
            lambda _, *call: self.left.append(("forward", *call)),
            None,
            self._note_failure,
            id(self.module),
            Module,
        )
        self.interruption: Exception | None = None  # raised in the probe by a signal handler of the job
        self.begin_counting()

    def begin_counting(self) -> None:
        """Count the steps from now on."""
        counting = self.counting
        counting.loop, counting.optimizer, counting.engine = self.loop, id(self.optimizer), 1
        counting.longest_ns, counting.uncounted_step, counting.table_end = 1e18, 10**9, 10**9
        counting.is_on = counting.was_on = counting.writes_records = True

    def _note_failure(self, *call: Any) -> None:
        self.failures.append(call)
        if self.interruption is not None:
            raise self.interruption

    def _run_backward(self, outputs: Any, *, fails: bool = False) -> str:
        if fails:
            raise KeyError("planted")
        return f"gradients of {outputs}"

    def run_update(self) -> None:
        """Call the hooks in the same way as a step of a PyTorch optimizer."""
        arguments: tuple[Any, ...] = (self.optimizer, (self.optimizer,), {})
        self.before(*arguments)
        self.after(*arguments)

    def run_step(self) -> None:
        """Run one training step."""
        assert self.module(1) == 2
        assert self.backward("loss") == "gradients of loss"
        self.run_update()

    def read_records(self) -> list[tuple[int, ...]]:
        """Return the records in the memory, in the order of their slots."""
        records = [
            _SPAN.unpack_from(self.memory, place) for place in range(SLOTS_AT, len(self.memory) - SLOT_BYTES + 1, SLOT_BYTES)
        ]
        return sorted((record for record in records if record[-1]), key=lambda record: record[-1])


def check_steps(library: Any) -> None:
    """Count steps, and check their records."""
    loop = CountedLoop(library)
    for _ in range(40):
        loop.run_step()
    assert not loop.left
    records = loop.read_records()
    assert [record[3] for record in records] == list(range(18, 50))  # the ring holds the last 32
    assert [record[-1] for record in records] == [(slot + 1) << 8 | TABLE for slot in range(8, 40)]
    assert all(record[0] <= record[1] and record[2] == -1 for record in records)
    assert {record[4:12] for record in records} == {(-1, -1, -1, PHASE, FLAGS, 0, 1, 0)}
    assert (loop.loop.finished_steps, loop.recorder.last_step, loop.files.position) == (50, 49, 39)
    counting = loop.counting
    assert (counting.updates, counting.backwards, counting.seen_backwards, loop.module.calls) == (40, 40, 40, 40)
    assert 0 < counting.cost_ns < 50_000_000


def check_failures(library: Any) -> None:
    """Let calls fail: the job gets its own exceptions, and Python hears of them."""
    loop = CountedLoop(library)
    failed: list[Any] = []
    calls: tuple[tuple[Any, Any], ...] = (loop.backward, "loss"), (loop.module, 1)
    for call, argument in calls:
        try:
            call(argument, fails=True)
        except (KeyError, RuntimeError) as error:
            failed.append((type(error), error.args))
    assert failed == [(KeyError, ("planted",)), (RuntimeError, ("planted",))]
    assert loop.failures == [("loss", (), {"fails": True}), (loop.module, (1,), {"fails": True})]
    assert loop.counting.backwards == 0
    loop.interruption = TimeoutError()
    for call, argument in calls:
        try:
            call(argument, fails=True)
        except TimeoutError as error:
            failed.append((type(error.__context__), getattr(error.__context__, "args", ())))
    assert failed[2:] == failed[:2]
    for hook in (loop.before, loop.after):
        assert hook() is None  # without arguments it is none of ours
    assert loop.left == [("before",), ("after",)]


def check_references(library: Any) -> None:
    """Run many counted steps, and check that no reference leaks and no object is freed too early."""
    loop = CountedLoop(library)
    loop.run_step()
    kept = [loop.loop, loop.files, loop.recorder, loop.optimizer, loop.module, Module._call_impl]
    before = [sys.getrefcount(one) for one in kept]
    objects = len(gc.get_objects())
    for _ in range(1000):
        loop.run_step()
        loop.counting.stop()
        loop.begin_counting()
    check_failures(library)
    gc.collect()
    assert all(abs(sys.getrefcount(one) - count) < 50 for one, count in zip(kept, before))  # noqa: B905 for Python 3.9
    assert len(gc.get_objects()) < objects + 50
    gone = weakref.ref(loop.module)
    loop.module.__dict__["circle"] = loop.module
    del loop, kept
    gc.collect()
    assert gone() is None


if __name__ == "__main__":
    compiled = load_library(sys.argv[1])
    for check in (check_steps, check_failures, check_references):
        check(compiled)
    print("ok")
