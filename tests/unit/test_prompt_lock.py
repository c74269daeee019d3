"""A sampler that sees a loop although that gives Python's lock away for moments only; the job's interval stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from zerotop_probe.inside.interpreter import prompt_lock
from zerotop_probe.inside.interpreter.prompt_lock import restore_interval, wait_promptly

# Prints the share of the samples that are in the loop, which takes nearly all of the time: 2 ms at a time.
SAMPLED = """
import sys, threading, time
from zerotop_probe.inside.interpreter.prompt_lock import wait_promptly

def compute():
    return sum(number * number for number in [*range(40_000)])

seen, over, main = [], threading.Event(), threading.get_ident()

def sample():
    for _ in range(60):
        wait_promptly(over, 0.02)
        frame, names = sys._current_frames()[main], []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        seen.append("compute" in names)
    over.set()

threading.Thread(target=sample, daemon=True).start()
while not over.is_set():
    compute()
    time.sleep(0)
    compute()
    time.sleep(0.001)
print(sum(seen) / len(seen))
"""


def test_a_loop_in_python_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", SAMPLED], check=True, capture_output=True, text=True)
    assert float(done.stdout) > 0.05  # at most 0.02 with the usual interval; 0.1 on a machine with many others


@pytest.fixture(autouse=True)
def _keep_interval() -> object:
    usual = sys.getswitchinterval()
    yield
    sys.setswitchinterval(usual)


def test_the_interval_is_short_only_meanwhile() -> None:
    sys.setswitchinterval(0.003)
    seen: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            seen.append(sys.getswitchinterval())
            return super().wait(timeout)

    assert not wait_promptly(Event(), 0)
    assert seen == [pytest.approx(prompt_lock.SHORT_S)]
    assert sys.getswitchinterval() == pytest.approx(0.003)


def test_an_interval_that_the_job_sets_meanwhile_stays() -> None:
    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            sys.setswitchinterval(0.002)
            return True

    assert wait_promptly(Event(), 0)
    restore_interval()
    assert sys.getswitchinterval() == pytest.approx(0.002)


def test_a_shorter_interval_of_the_job_is_not_made_longer() -> None:
    sys.setswitchinterval(1e-4)
    assert not wait_promptly(threading.Event(), 0)
    assert sys.getswitchinterval() == pytest.approx(1e-4, abs=2e-6)


def test_a_child_that_is_forked_meanwhile_has_the_jobs_interval() -> None:
    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            child = os.fork()
            if not child:
                restore_interval()  # as the probe does in every child
                os._exit(int(sys.getswitchinterval() < 0.004))
            return os.waitpid(child, 0)[1] == 0

    assert wait_promptly(Event(), 0)
