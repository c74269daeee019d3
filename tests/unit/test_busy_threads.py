"""Python threads of the job that compute: what the probe sees of them, and where they are named as a cause."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from in_pieces import find_at_end
from small_recording import BEGIN_NS, S, make_identity, make_span, write_table
from zerotop.analysis.findings import Finding
from zerotop.analysis.findings.pace import iteration_drift, iteration_shift
from zerotop_probe.inside.stacks.busy_threads import BusyThreads
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, SPANS
from zerotop_probe.recording.writer import EventWriter


def count_forever(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


def test_a_thread_that_begins_to_compute_is_sampled_once() -> None:
    written: list[dict[str, Any]] = []
    watch = BusyThreads(lambda time_ns, name, **facts: written.append(facts), threading.get_ident)
    stop = threading.Event()
    thread = threading.Thread(target=count_forever, args=(stop,), name="counter")
    asleep = threading.Thread(target=stop.wait, name="sleeper")
    asleep.start()
    try:
        watch.look()
        thread.start()
        end_s = time.monotonic() + 60
        while not any("thread" in each for each in written) and time.monotonic() < end_s:
            time.sleep(min(0.2, watch.look()))
        for _ in range(5):
            watch.look()
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
        asleep.join()
    (facts,) = [each for each in written if "thread" in each]
    assert (facts["thread"], facts["tid"]) == ("counter", thread.native_id)
    names = [name for each in written for name in each.get("python", {}).values()]
    assert names.count("counter") == names.count("sleeper") == 1
    assert facts["cores"] > 0.05
    assert facts["begin_ns"] < facts["busy_ns"] < facts["end_ns"]
    assert "count_forever" in {frame["function"] for frame in facts["frames"]}


def test_the_training_thread_and_the_probes_own_are_left_out() -> None:
    written: list[dict[str, Any]] = []
    idents: list[int] = []
    stop = threading.Event()
    threads = [threading.Thread(target=count_forever, args=(stop,), name=name) for name in ("trainer", "zerotop-ticker")]
    watch = BusyThreads(lambda time_ns, name, **facts: written.append(facts), lambda: idents[0])
    for thread in threads:
        thread.start()
    idents.append(threads[0].ident or 0)
    try:
        for _ in range(20):
            watch.look()
            time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not any("thread" in facts for facts in written)


def write_job(folder: Path, seconds: list[float], thread: dict[str, Any] | None) -> None:
    """Write steps of these durations, and a thread that began to compute after 4 s."""
    spans, at = [], 0.0
    for step, length in enumerate(seconds):
        for phase, share in (("forward", 0.4), ("backward", 0.5), ("step", 0.05)):
            spans.append(make_span(at, at + share * length, phase, step, BOUNDARY if phase == "step" else 0))
            at += share * length
        at += 0.05 * length
    write_table(folder, SPANS, make_identity(0), *spans).close()
    writer = EventWriter(str(folder), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Hello, rank=0, watches_threads=True)
    if thread is not None:
        frames = [
            {"file": "threading.py", "line": 982, "function": "Thread.run", "own": False},
            {"file": "train.py", "line": 17, "function": "refresh", "own": True},
            {"file": "train.py", "line": 18, "function": "refresh", "own": True},
        ]
        stacks = [{"seconds": 0.5, "call": "int", "frames": [1, 0]}, {"seconds": 0.1, "frames": [2, 0]}]
        facts = {
            "thread": "dashboard",
            "cores": 0.6,
            "lock_wait_s": 0.002,
            "samples": 10,
            "frames": frames,
            "stacks": stacks,
        }
        begin = thread.pop("begin", 3.9)
        times = {"begin_ns": int(begin * S), "busy_ns": int((begin + 0.7) * S), "end_ns": int((begin + 1.6) * S)}
        writer.write(int((begin + 1.6) * S), events.BusyThread, **(facts | times | thread))
    writer.close()


def find_all(folder: Path, piece: int = 16384) -> tuple[Finding, ...]:
    return find_at_end(folder, [iteration_shift.detect, iteration_drift.detect], piece)


def test_a_thread_that_began_with_the_change_is_its_cause(tmp_path: Path) -> None:
    write_job(tmp_path, [0.1] * 40 + [0.2] * 60, {})
    whole, *others = (find_all(tmp_path, piece) for piece in (16384, 7, 50))
    (shift,) = whole
    assert shift.details == (
        "50 ms of it in the backward phase; at the same time thread dashboard began to use 0.6 cores at train.py:17 in"
        " refresh, and holds Python's lock meanwhile."
    )
    assert "move the work of dashboard to a separate process" in shift.advice
    assert shift.fix == "multiprocessing.Process(target=refresh, daemon=True).start()"
    assert all(found == whole for found in others)


@pytest.mark.parametrize(
    "thread",
    [
        *(None, {"begin": 1.0}, {"begin": 6.0}, {"cores": 0.1}, {"lock_wait_s": 0.00005}, {"thread": "a{b"}),
        {"stacks": [{"count": 5, "call": "time.sleep", "frames": [1, 0]}, {"count": 5, "call": "int", "frames": [2, 0]}]},
    ],
    ids=["none", "before", "after", "too little", "without the lock", "odd name", "waits"],
)
def test_other_threads_are_no_cause(tmp_path: Path, thread: dict[str, Any] | None) -> None:
    write_job(tmp_path, [0.1] * 40 + [0.2] * 60, thread)
    (shift,) = find_all(tmp_path)
    assert "no cause was found" in shift.details


@pytest.mark.parametrize(("wait_s", "held_s", "told"), [(0.05, 0.05, True), (0.05, 0.01, False), (0.02, 0.02, False)])
def test_threads_that_compute_little_but_hold_the_lock_long(
    tmp_path: Path, wait_s: float, held_s: float, told: bool
) -> None:
    """An executor's thread that is seen to wait for work in most samples."""
    frames = [
        {"file": "train.py", "line": 18, "function": "tokenize", "own": True},
        {"file": "concurrent/futures/thread.py", "line": 58, "function": "_WorkItem.run", "own": False},
        {"file": "train.py", "line": 40, "function": "feed", "own": True},
    ]
    stacks = [
        {"count": 1, "seconds": 0.1, "call": "sum", "frames": [0, 1]},
        {"count": 9, "seconds": 0.2, "call": "time.sleep", "frames": [2]},
    ]
    thread = {"cores": 0.1, "lock_wait_s": wait_s, "held_s": held_s, "frames": frames, "stacks": stacks}
    write_job(tmp_path, [0.1] * 40 + [0.2] * 60, thread)
    (shift,) = find_all(tmp_path)
    assert (
        "train.py:18 in tokenize, and holds Python's lock meanwhile, for which others wait 50 ms" in shift.details
    ) is told
    assert (shift.fix == "concurrent.futures.ProcessPoolExecutor()") is told


def test_the_time_in_which_others_compute_is_that_for_which_the_lock_is_held() -> None:
    written: list[dict[str, Any]] = []
    stop = threading.Event()

    def hold() -> None:
        while not stop.is_set():
            sum(range(2_000_000))
            time.sleep(0.005)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    watch = BusyThreads(lambda time_ns, name, **facts: written.append(facts), threading.get_ident)
    for thread in threads:
        thread.start()
    try:
        for _ in range(16):
            time.sleep(watch.look())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    busy = next(facts for facts in written if "held_s" in facts)
    assert 0 < busy["held_s"] <= busy["lock_wait_s"]


def test_a_thread_that_computes_more_and_more(tmp_path: Path) -> None:
    write_job(tmp_path, [0.1] * 38 + [0.1 + 0.001 * step for step in range(120)], {})
    drifts = [finding for finding in find_all(tmp_path) if finding.name == "iteration_drift"]
    assert any("meanwhile thread dashboard began to use 0.6 cores" in drift.details for drift in drifts)
