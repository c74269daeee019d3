"""Reading the threads of a real process: that leaving out the sleeping ones misses nothing."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import build_python_command, wait_for
from zerotop_probe.outside.sampling.thread_sampler import DescriptorBudget, ProcessThreads, ThreadCounters, has_schedstat

pytestmark = pytest.mark.alone

# 50 threads sleep; at each line of input two of them work for as many seconds as it says, and it answers when
# they begin.
CHILD = """
import hashlib, sys, threading, time
work = threading.Semaphore(0)
def run():
    while True:
        work.acquire()
        stop = time.monotonic() + seconds
        while time.monotonic() < stop: hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000)
def work_on(): hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)
for _ in range(50): threading.Thread(target=run, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    seconds = float(line)
    if seconds < 0: threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    elif seconds == 0: threading.Thread(target=work_on, daemon=True).start()
    else: work.release(2)
    print("done", flush=True)
"""


class Child:
    """A process whose threads work when told to, and one reader of them."""

    def __init__(self, budget: DescriptorBudget, *, schedstat: bool = True) -> None:
        self.process = subprocess.Popen(
            build_python_command(CHILD), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._read_answer()
        self._clock = (~self.process.pid << 3) | 2
        self.threads = ProcessThreads(self.process.pid, budget, schedstat=schedstat, now_ns=time.monotonic_ns())
        self._before = self._read_clocks()

    def _read_answer(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline()

    def _read_clocks(self) -> tuple[int, int]:
        return time.monotonic_ns(), time.clock_gettime_ns(self._clock)

    def keep_busy(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self._read_answer()

    def ran_ns(self) -> int:
        """Take a sample; return the nanoseconds that the process ran since the last one."""
        return self._read_clocks()[1] - self._before[1]

    def take_sample(self) -> int:
        """Samples as at most ticks, without reading everything; returns what the process ran meanwhile."""
        now = self._read_clocks()
        ran_ns = now[1] - self._before[1]
        self.threads.update_counters(now[0], now[0] - self._before[0], ran_ns, everything=False)
        self._before = now
        return ran_ns

    def close(self) -> None:
        self.threads.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def sampled_child() -> Iterator[Child]:
    if not has_schedstat():
        pytest.skip("this kernel has no schedstat")
    child = Child(DescriptorBudget(1000))
    yield child
    child.close()


def test_sleepers_that_wake_are_read_at_once(sampled_child: Child) -> None:
    for _ in range(3):
        time.sleep(0.05)
        sampled_child.take_sample()
    assert sampled_child.threads.find_busiest(8, 0.001) == []
    sampled_child.keep_busy(30)
    wait_for(lambda: sampled_child.ran_ns() > 100e6)
    ran_ns = sampled_child.take_sample()
    busiest = sampled_child.threads.find_busiest(8, 0.001)
    assert sum(thread.ran_ns for thread in busiest) == pytest.approx(ran_ns, rel=0.2)
    assert len([thread for thread in busiest if thread.ran_ns > 0.2 * ran_ns]) == 2


def test_a_thread_that_was_not_read_for_a_while_is_not_taken_for_several(sampled_child: Child) -> None:
    """Its rate refers to the time since it was read itself, not to the time since the sample before."""
    sampled_child.threads.find_busiest(8, 0.001)
    sampled_child.keep_busy(30)
    wait_for(lambda: sampled_child.ran_ns() > 500e6)
    tick_ns = 10**8
    use = sampled_child.threads.update_counters(time.monotonic_ns(), tick_ns, 0, everything=True)
    busiest = sampled_child.threads.find_busiest(8, 0.001)
    assert use.busy_threads <= 2
    assert len(busiest) >= 2
    assert 0.05 < sum(thread.cores for thread in busiest) < 2.2
    assert use.waited_ns is not None
    assert use.waited_ns <= 4 * tick_ns


def test_threads_that_are_born_and_end(sampled_child: Child) -> None:
    assert len(sampled_child.threads) == 51
    sampled_child.keep_busy(-1)
    sampled_child.threads.list_threads(time.monotonic_ns())
    assert len(sampled_child.threads) == 52
    sampled_child.process.kill()
    sampled_child.process.wait()
    sampled_child.threads.update_counters(time.monotonic_ns(), 10**8, 10**8, everything=True)
    sampled_child.threads.list_threads(time.monotonic_ns())
    assert len(sampled_child.threads) == 0


def test_a_thread_that_nobody_has_listed_is_found_by_the_time_that_it_takes(sampled_child: Child) -> None:
    sampled_child.take_sample()
    sampled_child.keep_busy(0)
    wait_for(lambda: sampled_child.ran_ns() > 100e6)
    sampled_child.take_sample()
    assert len(sampled_child.threads) == 52
    wait_for(lambda: sampled_child.ran_ns() > 100e6)
    ran_ns = sampled_child.take_sample()
    assert sum(thread.ran_ns for thread in sampled_child.threads.find_busiest(1, 0.001)) > 0.8 * ran_ns


def test_descriptors_are_given_back_and_never_exceed_the_budget() -> None:
    def count_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count_descriptors()
    child = Child(DescriptorBudget(20))
    assert count_descriptors() - before == 20 + 2  # and the two pipes
    child.keep_busy(30)
    wait_for(lambda: child.ran_ns() > 100e6)
    ran_ns = child.take_sample()
    assert sum(thread.ran_ns for thread in child.threads.find_busiest(8, 0.001)) == pytest.approx(ran_ns, rel=0.2)
    child.close()
    assert count_descriptors() == before


def test_a_kernel_without_schedstat() -> None:
    """Ticks of 10 ms instead of nanoseconds, and nothing about waiting."""
    child = Child(DescriptorBudget(1000), schedstat=False)
    child.keep_busy(30)
    wait_for(lambda: child.ran_ns() > 500e6)
    now, ran_ns = time.monotonic_ns(), child.ran_ns()
    use = child.threads.update_counters(now, 10**8, ran_ns, everything=True)
    assert use.waited_ns is None
    busiest = child.threads.find_busiest(8, 0.001)
    child.close()
    assert sum(thread.ran_ns for thread in busiest) == pytest.approx(ran_ns, rel=0.2)


def test_a_thread_waits_no_longer_than_since_it_ran(tmp_path: Path) -> None:
    """Some kernels add days to the waiting time where the clocks of two cores differ."""
    path, second = tmp_path / "schedstat", 10**9
    path.write_text("100 0 1")
    descriptor = os.open(path, os.O_RDONLY)
    threads = ProcessThreads(os.getpid(), DescriptorBudget(1000), schedstat=True, now_ns=0)
    thread, waits = ThreadCounters(1, descriptor, 0), []
    steps = [(1, "100 0 1"), (2, "200 0 2"), (3, "200 0 2"), (4, f"300 {3 * second} 3"), (5, f"400 {10**15} 4")]
    for at, text in steps:
        path.write_text(text)
        waits.append(threads._read_thread(thread, at * second) / second)
    threads.close()
    os.close(descriptor)
    assert waits == [0, 0, 0, 3, 2]


def test_a_thread_that_was_listed_in_a_sample_waits_no_longer_than_it_lasts(tmp_path: Path) -> None:
    """It is read twice at one time: what it waits between the two reads is no rate."""
    path, tick_ns = tmp_path / "schedstat", 50_000_000
    path.write_text("100 0 1")
    descriptor = os.open(path, os.O_RDONLY)
    threads = ProcessThreads(os.getpid(), DescriptorBudget(1000), schedstat=True, now_ns=0)
    thread = ThreadCounters(1, descriptor, 0)
    threads._read_one(thread)
    thread.read_at_ns = tick_ns
    path.write_text("200 7000 2")
    waited = threads._read_cold_thread(thread, tick_ns, tick_ns)
    threads.close()
    os.close(descriptor)
    assert waited == 7000
