"""Samples that come late: what the training thread did when they were due may be over then."""

from __future__ import annotations

import dis
import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zerotop_probe.inside.stacks import lock_wait
from zerotop_probe.inside.stacks.callees import find_slow_line
from zerotop_probe.inside.stacks.frames import Stack, StackReader
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.outside.sampling.thread_sampler import has_schedstat
from zerotop_probe.recording.interruptions import OWN_FOLDER

# Prints the share of the samples in a line that gives the lock away for a moment, after one that keeps it for long.
SAMPLED = """
import sys, threading, time
from zerotop_probe.inside.stacks.frames import UNKNOWN_STACK, StackReader
from zerotop_probe.inside.stacks.lock_wait import LockWait
from zerotop_probe.inside.stacks.paths import PathNames

def work():
    same = known == copied
    wait(0)

def sample():
    reader, lock = StackReader(PathNames("/", [], "<string>")), LockWait()
    while not over.is_set():
        lock.wait(over, 0.007, is_prompt=True)
        stack = reader.read_stack(sys._current_frames()[main], is_late=lock.is_late)
        lines.append(0 if lock.is_misleading or stack is UNKNOWN_STACK else stack.frames[0].line)

known, copied = [*range(1000, 300_000)], [*range(1000, 300_000)]
lines, over, main, wait = [], threading.Event(), threading.get_ident(), time.sleep
threading.Thread(target=sample, daemon=True).start()
end_s = time.monotonic() + 3
while time.monotonic() < end_s:
    work()
over.set()
print(lines.count(work.__code__.co_firstlineno + 2) / len(lines))
"""


def test_the_line_after_the_one_that_kept_the_lock_is_not_named() -> None:
    done = subprocess.run([sys.executable, "-c", SAMPLED], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 0.6  # all, if each sample counts


@pytest.mark.parametrize(
    ("read_ms", "is_late"), [((5, 5), True), ((5, 35), False), ((5, None), True), ((None, 35), True), ((0, 30), False)]
)
def test_a_wait_for_a_core_is_none_for_the_lock(
    read_ms: tuple[int | None, int | None], is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a wait that ends 30 ms late. Where the kernel does not tell, it counts as one for the lock."""
    waits, times = iter([one if one is None else one * 10**6 for one in read_ms]), iter([0, 31 * 10**6])
    monkeypatch.setattr(lock_wait, "now", lambda: next(times))
    monkeypatch.setattr(lock_wait, "CoreWait", lambda: SimpleNamespace(read_ns=lambda: next(waits)))
    lock = lock_wait.LockWait()
    lock.wait(threading.Event(), 0.001, is_prompt=False)
    assert (lock.is_misleading, lock.is_late) == (False, is_late)


def test_the_wait_for_a_core_is_measured_without_giving_the_lock_away() -> None:
    """The thread shares one core with a process that computes."""
    waited: list[float] = []
    core = min(os.sched_getaffinity(0))
    spin = "import os, time\nos.sched_setaffinity(0, {%d})\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"

    def share_core() -> None:
        os.sched_setaffinity(0, {core})
        read = lock_wait.CoreWait().read_ns
        begin_ns, end_s = read() or 0, time.monotonic() + 20
        while (read() or 0) < begin_ns + 50 * 10**6 and time.monotonic() < end_s:
            sum(range(1000))
        waited.append(((read() or 0) - begin_ns) / 1e6)

    with subprocess.Popen([sys.executable, "-c", spin % core]) as busy:
        thread = threading.Thread(target=share_core)
        thread.start()
        thread.join()
        busy.kill()
    assert waited[0] >= 50 or not has_schedstat()


def test_a_late_sample_in_the_probe_shows_the_line_that_called_it() -> None:
    """Whatever instruction of the probe lets others in."""
    stacks: list[Stack] = []
    reader = StackReader(PathNames(os.path.dirname(__file__), []))
    hook = "def hook(known, box):\n    found = 1 in known\n    box.get()\n    return found\n"
    names: dict[str, Any] = {}
    exec(compile(hook, f"{OWN_FOLDER}made_up.py", "exec"), names)

    class Box:
        def get(self) -> None:
            stacks.append(reader.read_stack(sys._getframe(1), is_late=True))

    line = sys._getframe().f_lineno + 1
    names["hook"]((), Box())
    assert [(stack.frames[0].file, stack.frames[0].line) for stack in stacks] == [("test_lock_wait.py", line)]


def work(known, log, words, tensor):  # type: ignore[no-untyped-def]
    for word in words:
        if word in known:
            log.append(word)
    joined = known + known
    count = len(joined)
    joined = known + known
    tensor.to(count)
    joined = known + known
    text = json.dumps(joined)
    for word in words:
        text.encode(word)
    np.array(words)
    joined = known + known
    np.array(joined)
    np.zeros(count)


def find_lines(instruction: str, line: int) -> set[int | None]:
    """Return the lines, counted from the function on, that are slow where others are let in late at an instruction."""
    code, found = work.__code__, set()
    starts = [(begin, number) for begin, number in dis.findlinestarts(code) if number is not None]
    for step in dis.get_instructions(code):
        number = max(one for one in starts if one[0] <= step.offset)[1]
        if step.opname.startswith(instruction) and number - code.co_firstlineno == line:
            slow = find_slow_line(code, step.offset, globals())
            found.add(slow - code.co_firstlineno if slow is not None else None)
    return found


@pytest.mark.parametrize(
    ("instruction", "line", "slow"),
    [
        ("CALL", 3, 2),  # append() takes no time
        ("JUMP", 3, 2),
        ("BINARY", 4, None),  # it gave the lock away itself
        ("CALL", 5, 4),
        ("CALL", 7, None),  # to() may have given it away itself
        ("CALL", 9, 9),
        ("CALL", 11, 11),
        ("JUMP", 11, 11),
        ("RESUME", 0, None),
        ("CALL", 12, 12),
        ("CALL", 14, None),  # it, or the sum before
        ("CALL", 15, None),
    ],
)
def test_the_line_that_kept_the_lock(instruction: str, line: int, slow: int | None) -> None:
    assert find_lines(instruction, line) <= {slow}
