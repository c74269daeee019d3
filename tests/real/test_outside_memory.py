"""Reading a real process's memory: the whole status is read only now and then, yet what changes much shows at once."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from agents import build_python_command
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling.process_sampler import ProcessReader, SampledMember
from zerotop_probe.outside.sampling.thread_sampler import DescriptorBudget
from zerotop_probe.recording.tables import PROCESSES

# Grows by as many MiB as a line of input says: anonymous memory, or shared memory for negative numbers.
CHILD = """
import mmap, sys
blocks = []
print("ready", flush=True)
for line in sys.stdin:
    size = int(line) << 20
    if size < 0:
        blocks.append(mmap.mmap(-1, -size))
        blocks[-1].write(b"1" * -size)
    else:
        blocks.append(b"1" * size)
    print("done", flush=True)
"""
MIB = 1 << 20


class Child:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            build_python_command(CHILD), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._read_answer()
        process = ProcessHandle.from_pid(self.process.pid)
        assert process is not None
        budget = DescriptorBudget(1000)
        self.reader = ProcessReader(SampledMember(process, 0), budget, lambda *_, **__: None, schedstat=True)

    def _read_answer(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline()

    def grow(self, mib: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{mib}\n")
        self._read_answer()

    def read_memory(self, tick: int) -> tuple[int, int]:
        """Return the resident and the shared bytes of a tick's row."""
        row = self.reader.read_row(time.monotonic_ns(), tick)
        assert row is not None
        values = dict(zip((field.name for field in PROCESSES.fields), row, strict=True))
        resident, shared = values["rss_bytes"], values["shared_bytes"]
        assert isinstance(resident, int)
        assert isinstance(shared, int)
        return resident, shared

    def close(self) -> None:
        self.reader.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


def test_resident_memory_is_that_of_each_tick(child: Child) -> None:
    resident, shared = child.read_memory(0)
    child.grow(4)
    grown, still_shared = child.read_memory(1)
    assert grown - resident == pytest.approx(4 * MIB, abs=MIB)
    assert still_shared == shared


def test_memory_that_grows_much_is_read_again_at_once(child: Child) -> None:
    resident, shared = child.read_memory(0)
    child.grow(-64)
    grown, more_shared = child.read_memory(1)
    assert grown - resident == pytest.approx(64 * MIB, abs=2 * MIB)
    assert more_shared - shared == pytest.approx(64 * MIB, abs=MIB)


def test_small_growth_of_shared_memory_shows_in_the_fifth_tick(child: Child) -> None:
    _, shared = child.read_memory(0)
    child.grow(-4)
    assert [child.read_memory(tick)[1] == shared for tick in (1, 4)] == [True, True]
    assert child.read_memory(5)[1] - shared == pytest.approx(4 * MIB, abs=MIB)


def test_a_process_that_has_ended_has_no_row(child: Child) -> None:
    child.read_memory(0)
    child.process.kill()
    while child.process.poll() is None:
        time.sleep(0.01)
    assert child.reader.read_row(time.monotonic_ns(), 1) is None
