"""A loop whose steps are interrupted by exceptions; the script catches each, and counts them and the frames that they show.

interrupted.py KIND WAYS COUNT: KIND is loop or engine, WAYS names of functions below with commas between them.
"""

from __future__ import annotations

import _thread
import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch


class Preempted(Exception):
    """Raised by the handler; each of its kinds in turn."""


class Late(Preempted, TimeoutError):
    """An OSError, too."""


class Broken(Preempted, RuntimeError):
    """A RuntimeError, too."""


class Interruptions:
    """The exceptions that were raised, and those that arrived."""

    def __init__(self) -> None:
        self.raised = 0
        self.caught = 0
        self.shown: list[str] = []

    def handle(self, *arguments: Any) -> None:
        self.raised += 1
        raise (Preempted, Late, Broken)[self.raised % 3]

    def note(self, error: BaseException) -> None:
        """Count an exception that reached the script, and the frames in it that are neither its own nor PyTorch's."""
        self.caught += 1
        for one in (error, error.__context__):
            for frame in traceback.extract_tb(one.__traceback__ if one is not None else None):
                if "zerotop_probe" in frame.filename:
                    self.shown.append(f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}")


found = Interruptions()


def wait_shortly(length: float) -> None:
    time.sleep(random.uniform(0.2, 1.8) * length + 1e-5)


def alarm(step: Callable[[], None], length: float) -> None:
    """A timer's signal."""
    signal.signal(signal.SIGALRM, found.handle)
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.2, 1.8) * length + 1e-5)
    try:
        step()
        step()
        time.sleep(0.003)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_beside(send: Callable[[], None], step: Callable[[], None], length: float) -> None:
    """Run steps while another thread does something to this one."""

    def run() -> None:
        wait_shortly(length)
        send()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        step()
        step()
    finally:
        while thread.is_alive():
            thread.join(0.01)
        time.sleep(0)


def kill_thread(step: Callable[[], None], length: float) -> None:
    """A signal that another thread sends to this one alone."""
    signal.signal(signal.SIGUSR1, found.handle)
    main = threading.get_ident()
    run_beside(lambda: signal.pthread_kill(main, signal.SIGUSR1), step, length)


def interrupt_main(step: Callable[[], None], length: float) -> None:
    """The simulated SIGINT of another thread, that is PyErr_SetInterrupt()."""

    def send() -> None:
        found.raised += 1
        _thread.interrupt_main()

    run_beside(send, step, length)


def interrupt_other(step: Callable[[], None], length: float) -> None:
    """PyErr_SetInterruptEx() with another signal."""
    signal.signal(signal.SIGUSR2, found.handle)
    run_beside(lambda: _thread.interrupt_main(signal.SIGUSR2), step, length)


def set_exception(step: Callable[[], None], length: float) -> None:
    """An exception that another thread sets in this one."""
    main = ctypes.c_ulong(threading.get_ident())

    def send() -> None:
        found.raised += 1
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(Preempted))

    run_beside(send, step, length)


def trace(step: Callable[[], None], length: float) -> None:
    """A trace function that raises at the first instruction of a function that the job calls, and that is none of its own.

    Each call takes the next of these functions.
    """
    seen = 0
    wanted = trace.calls = getattr(trace, "calls", -1) + 1  # type: ignore[attr-defined]

    def raise_at_call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        if "zerotop_probe" in frame.f_code.co_filename and "zerotop_probe" not in caller:
            seen += 1
            if seen == wanted + 1:
                sys.settrace(None)
                found.handle()

    sys.settrace(raise_at_call)
    try:
        step()
        step()
    finally:
        sys.settrace(None)


def make_loop() -> tuple[Callable[[], None], Callable[[], int]]:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)
    batch = torch.randn(64, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step, lambda: int(optimizer.state[model.weight]["step"])


def make_engine() -> tuple[Callable[[], None], Callable[[], int]]:
    import deepspeed

    model = torch.nn.Linear(64, 64)
    optimizer = {"type": "Adam", "params": {"lr": 1e-9, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 64, "optimizer": optimizer, "zero_optimization": {"stage": 0}}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    batch = torch.randn(64, 64)

    def step() -> None:
        engine.backward(engine(batch).sum())
        engine.step()

    return step, lambda: int(engine.global_steps)


def find_cause(error: BaseException | None) -> Preempted | None:
    while error is not None and not isinstance(error, Preempted):
        error = error.__context__
    return error


def main() -> None:
    kind, ways, count = sys.argv[1:]
    torch.set_num_threads(1)
    random.seed(1)
    step, count_updates = make_loop() if kind == "loop" else make_engine()
    for _ in range(40):
        step()
    began = time.time()
    for _ in range(50):
        step()
    length = (time.time() - began) / 50
    raised = {way: interrupt_steps(globals()[way], step, length, int(count)) for way in ways.split(",")}
    facts = {"rank": 0, "raised": raised, "updates": count_updates(), "shown": sorted(set(found.shown))}
    print("COUNTED", json.dumps(facts), flush=True)


def interrupt_steps(interrupt: Callable[..., None], step: Callable[[], None], length: float, count: int) -> tuple[int, int]:
    """Return how many exceptions were raised, and how many arrived here."""
    found.raised = found.caught = 0
    for _ in range(count):
        torch.set_grad_enabled(True)
        try:
            interrupt(step, length)
        except (Preempted, KeyboardInterrupt) as error:
            found.note(error)
        except (RuntimeError, AssertionError) as error:  # of PyTorch or DeepSpeed, perhaps after an interruption
            cause = find_cause(error)
            if cause is not None:
                found.note(cause)
    return found.raised, found.caught


if __name__ == "__main__":
    main()
