"""The sampler of stacks: names of frames and calls, usual durations, what it keeps alive, how it is turned off."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from os import path
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from agents import wait_for
from rank_recordings import Rank
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.span import Span
from zerotop_probe.inside.stacks import stack_sampler
from zerotop_probe.inside.stacks.callees import find_callee
from zerotop_probe.inside.stacks.frames import PythonFrame, Stack, StackReader
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.inside.stacks.stack_sampler import StackSampler
from zerotop_probe.inside.stacks.tally import Tally
from zerotop_probe.inside.stacks.usual_times import DATA, GAP, PlaceKey, UsualTimes
from zerotop_probe.recording import directory
from zerotop_probe.recording.tables import BOUNDARY, PHASE_CODE
from zerotop_probe.recording.writer import Identity

MS = 1_000_000


class Spy:
    """Functions in C ask it for a number or for items, and it notes who asks, and what that calls."""

    def __init__(self) -> None:
        self.callees: list[str] = []

    def _note_callee(self) -> None:
        frame = sys._getframe(2)
        self.callees.append(find_callee(frame.f_code, frame.f_lasti, frame.f_globals))

    def __float__(self) -> float:
        self._note_callee()
        return 0.0

    def __index__(self) -> int:
        self._note_callee()
        return 0

    def __iter__(self) -> Any:
        self._note_callee()
        return iter(())


def call_with_arguments(spy: Any) -> None:
    known = [1, 2]
    time.sleep(spy)
    sleep(spy)
    time.sleep(*[spy])
    known.extend(spy)
    [one for one in known if one].extend(spy)
    sum(spy, start=sum([1, 2], 3))
    path.sep.join(spy)


def test_calls_in_c_are_named() -> None:
    spy = Spy()
    call_with_arguments(spy)
    names = dict.fromkeys(spy.callees)  # some ask several times
    assert list(names) == ["time.sleep", "extend", "sum", "posixpath.sep.join"]


class LookingLock:
    """Its lock is found to be entered by the frame that waits for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def hold(self) -> None:
        with self.lock:
            pass


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there `with` is made of other instructions")
def test_a_lock_that_is_waited_for_is_named() -> None:
    looking = LookingLock()
    looking.lock.acquire()
    thread = threading.Thread(target=looking.hold)
    thread.start()

    def find_waiting() -> str:
        frame = sys._current_frames()[thread.ident or 0]
        return find_callee(frame.f_code, frame.f_lasti, frame.f_globals) if frame.f_code.co_name == "hold" else ""

    wait_for(find_waiting)
    assert find_waiting() == "__enter__"
    looking.lock.release()
    thread.join()


@pytest.mark.parametrize(
    ("file", "name", "is_own"),
    [
        ("/work/train.py", "train.py", True),
        ("/work/src/data.py", "src/data.py", True),
        ("/work/.venv/lib/python3.11/site-packages/torch/cuda/memory.py", "torch/cuda/memory.py", False),
        ("/src/package/module.py", "package/module.py", True),
        ("/home/me/secret/place/other.py", "place/other.py", True),
        ("/tmp/torchinductor_me/ab/cd.py", "ab/cd.py", False),
        (json.__file__, "json/__init__.py", False),
        ("<string>", "<string>", False),
    ],
)
def test_files_have_short_names(file: str, name: str, is_own: bool) -> None:
    assert PathNames("/work", ["/src", "/work", "/"]).name_file(file) == (name, is_own)


def test_libraries_in_a_folder_of_the_job_are_not_its_own(tmp_path: Path) -> None:
    """As ``pip install --target`` leaves them; a checkout of the job's own packages has no ``dist-info``."""
    (tmp_path / "libraries" / "deepspeed-0.19.dist-info").mkdir(parents=True)
    (tmp_path / "packages").mkdir()
    names = PathNames(str(tmp_path / "job"), [str(tmp_path / "libraries"), str(tmp_path / "packages")])
    assert names.name_file(f"{tmp_path}/libraries/deepspeed/engine.py") == ("deepspeed/engine.py", False)
    assert names.name_file(f"{tmp_path}/packages/models/gpt.py") == ("models/gpt.py", True)


def test_a_deep_stack_keeps_the_jobs_frames() -> None:
    def read_at_depth(depth: int) -> Any:
        return read_at_depth(depth - 1) if depth else StackReader(PathNames("/elsewhere", [])).read_stack(sys._getframe())

    frames = read_at_depth(100).frames
    assert len(frames) == 40
    assert all(frame.function.endswith("read_at_depth") for frame in frames)


@pytest.fixture
def sampled_recorder(tmp_path: Path) -> tuple[Recorder, StackSampler]:
    """A recorder, and a sampler of the thread that runs the tests."""
    import threading

    recorder, meter = Recorder(str(tmp_path), Identity.for_this_process("rank", 0), CostMeter()), CostMeter()
    thread = threading.get_ident()
    return recorder, StackSampler(recorder, lambda: thread, meter)


def record_steps(recorder: Recorder, steps: int, duration_ns: int, end_ns: int) -> None:
    """Record steps of a duration up to a time; half of each step is a forward."""
    for step in range(steps):
        begin_ns = end_ns - (steps - step) * duration_ns
        for phase, middle_ns, flags in (("forward", duration_ns // 2, 0), ("step", duration_ns, BOUNDARY)):
            span = recorder.begin_span(begin_ns + middle_ns - duration_ns // 2, phase, (0, step, 0))
            recorder.end_span(span, begin_ns + middle_ns, flags)


def test_a_gap_that_lasts_is_sampled(sampled_recorder: tuple[Recorder, StackSampler], tmp_path: Path) -> None:
    recorder, sampler = sampled_recorder
    record_steps(recorder, 10, 10 * MS, time.monotonic_ns() - 500 * MS)
    sampler.look()
    sampler.finish()
    (event,) = Rank(tmp_path, 0).find_events("stacks")
    assert (event["where"], event["why"], event["step"], event["samples"]) == ("between phases", "slow", 10, 1)
    frames = [event["frames"][number] for number in event["stacks"][0]["frames"]]
    assert "test_a_gap_that_lasts_is_sampled" in [frame["function"] for frame in frames]


def record_forwards(recorder: Recorder, begin_ns: int, first: int, duration_ns: int) -> None:
    """Record ten steps of 10 ms and a forward each, and begin another forward now."""
    for step in range(first, first + 10):
        for phase, end_ns in (("forward", begin_ns + duration_ns), ("step", begin_ns + duration_ns + 10 * MS)):
            span = recorder.begin_span(begin_ns, phase, (0, step, 0))
            recorder.end_span(span, end_ns, BOUNDARY if phase == "step" else 0)
            begin_ns = end_ns
    recorder.begin_span(time.monotonic_ns(), "forward", (0, first + 10, 0))


def test_a_phase_is_sampled_at_first_and_when_it_has_become_longer(
    sampled_recorder: tuple[Recorder, StackSampler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latter even if only the savings that usual places leave are left."""
    recorder, sampler = sampled_recorder
    counts, begin_ns = [], time.monotonic_ns() - 10_000 * MS
    for first, duration_ms in ((0, 50), (20, 50), (40, 55), (60, 70)):
        record_forwards(recorder, begin_ns + first * 100 * MS, first, duration_ms * MS)
        sampler._learned_ns -= 10_000 * MS
        for _ in range(150):
            sampler.look()
        sampler.finish()
        recorder.end_span(recorder.stack[-1], time.monotonic_ns())
        monkeypatch.setattr(stack_sampler, "_RESERVED_NS", 60_000 * MS)
        events = [one for one in Rank(tmp_path, 0).find_events("stacks") if one["why"] == "share"]
        counts.append(sum(one["samples"] for one in events))
    assert counts == [40, 40, 40, 140]


@pytest.mark.parametrize(
    ("owed_s", "duration_ms", "lasts_ms", "why"),
    [(3, 70, 1, "share"), (8, 70, 1, ""), (3, 50, 1, ""), (8, 50, 500, "slow"), (13, 50, 500, "")],
)
def test_what_is_unusual_may_owe_some_of_the_budget(
    sampled_recorder: tuple[Recorder, StackSampler],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owed_s: int,
    duration_ms: int,
    lasts_ms: int,
    why: str,
) -> None:
    """A phase that has become longer, and, beyond that, one that lasts far longer than usual."""
    import threading

    monkeypatch.setattr(stack_sampler, "_ADVANCE_NS", -owed_s * 1000 * MS)
    monkeypatch.setattr(stack_sampler, "_LEARN_EVERY_NS", 0)
    recorder, thread = sampled_recorder[0], threading.get_ident()
    sampler, begin_ns = StackSampler(recorder, lambda: thread, CostMeter()), time.monotonic_ns() - 10_000 * MS
    for first, length_ms in ((0, 50), (20, duration_ms)):
        record_forwards(recorder, begin_ns + first * 100 * MS, first, length_ms * MS)
        if first:
            recorder.stack[-1].begin_ns -= lasts_ms * MS
        sampler.look()
        recorder.end_span(recorder.stack[-1], time.monotonic_ns())
    sampler.finish()
    assert [one["why"] for one in Rank(tmp_path, 0).find_events("stacks")] == [why] * bool(why)


def test_one_stack_shows_through_which_lines_the_loop_runs(
    sampled_recorder: tuple[Recorder, StackSampler], tmp_path: Path
) -> None:
    recorder, sampler = sampled_recorder
    record_steps(recorder, 2, MS, time.monotonic_ns())
    sampler.look()  # between the phases
    for _ in range(2):
        recorder.begin_span(time.monotonic_ns(), "backward", (0, 2, 0))
        sampler.look()
    (event,) = Rank(tmp_path, 0).find_events("training_stack")
    frames = [event["frames"][number] for number in event["stacks"][0]["frames"]]
    assert "test_one_stack_shows_through_which_lines_the_loop_runs" in [one["function"] for one in frames if one["own"]]


def sample_share(recorder: Recorder, sampler: StackSampler) -> None:
    """Look into a counted step after iterations that spend most of their time between the phases."""
    end_ns = time.monotonic_ns()
    for step in range(10):
        span = recorder.begin_span(end_ns - (10 - step) * 30 * MS, "step", (0, step, 0))
        recorder.end_span(span, span.begin_ns + 10 * MS, BOUNDARY)
    recorder.counted.begin_steps(time.monotonic_ns(), 10)
    sampler.look()
    sampler.finish()


def test_a_notable_share_is_sampled_in_counted_steps(
    sampled_recorder: tuple[Recorder, StackSampler], tmp_path: Path
) -> None:
    sample_share(*sampled_recorder)
    (event,) = Rank(tmp_path, 0).find_events("stacks")
    assert (event["where"], event["why"], event["step"], event["samples"]) == ("unknown phase", "share", 10, 1)


@pytest.mark.parametrize(("looks", "samples"), [(1, 1), (100, 0)])
def test_an_interrupted_look_does_not_end_sampling(
    sampled_recorder: tuple[Recorder, StackSampler], tmp_path: Path, looks: int, samples: int
) -> None:
    """A garbage collection in one look says nothing of the next; many long looks do."""
    recorder, sampler = sampled_recorder
    for _ in range(looks):
        sampler._meter.thread_ns["stacks"] = sampler._meter.thread_ns.get("stacks", 0) + 200 * MS
        sampler._save_up(time.monotonic_ns())
    sample_share(recorder, sampler)
    assert len(Rank(tmp_path, 0).find_events("stacks")) == samples


def test_other_events_leave_room_for_the_first_of_a_place(
    sampled_recorder: tuple[Recorder, StackSampler], tmp_path: Path
) -> None:
    """Where computing is slow all the time, a gap that becomes long shows all the same."""
    recorder, sampler = sampled_recorder
    record_steps(recorder, 20, 40 * MS, time.monotonic_ns() - 2_000 * MS)
    sampler.look()
    sampler._events_left = 0.0
    sampler.look()
    sampler._write_due(sampler._find_place(), time.monotonic_ns() + 10_000 * MS)  # type: ignore[arg-type]
    (event,) = Rank(tmp_path, 0).find_events("stacks")
    assert event["where"] == "between phases"


def test_a_silent_rank_writes_the_stacks_of_all_threads(
    sampled_recorder: tuple[Recorder, StackSampler], tmp_path: Path
) -> None:
    import threading

    release = threading.Event()
    other = threading.Thread(target=release.wait, name="loader")
    other.start()
    try:
        recorder, sampler = sampled_recorder
        record_steps(recorder, 10, 10 * MS, time.monotonic_ns() - 6000 * MS)
        sampler.look()
        sampler.look()  # not again so soon
    finally:
        release.set()
        other.join()
    (event,) = [event for event in Rank(tmp_path, 0).find_events("stacks") if event["why"] == "silent"]
    assert "thread" not in event["stacks"][0]
    assert "loader" in [stack.get("thread") for stack in event["stacks"]]


@pytest.mark.parametrize(("reading_s", "is_silent"), [(6.0, True), (2.0, False)])
def test_a_rank_that_only_reads_data_is_silent(
    sampled_recorder: tuple[Recorder, StackSampler],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reading_s: float,
    is_silent: bool,
) -> None:
    """More batches are read than spans are remembered."""
    monkeypatch.setattr(stack_sampler, "_LEARN_EVERY_NS", 0)
    recorder, sampler = sampled_recorder
    begin_ns = time.monotonic_ns() - int(reading_s * 1e9)
    record_steps(recorder, 10, 10 * MS, begin_ns)
    last = int(reading_s * 100)
    for number in [*range(10), *range(last - 80, last)]:
        span = recorder.begin_span(begin_ns + number * 10 * MS, "data", (0, 10, 0))
        recorder.end_span(span, begin_ns + number * 10 * MS + 9 * MS)
        if number in (9, last - 1):
            sampler.look()
    found = [event["begin_ns"] for event in Rank(tmp_path, 0).find_events("stacks") if event["why"] == "silent"]
    assert found == [begin_ns] * is_silent


def test_nothing_of_the_job_is_kept_alive(sampled_recorder: tuple[Recorder, StackSampler]) -> None:
    recorder, sampler = sampled_recorder
    record_steps(recorder, 10, 10 * MS, time.monotonic_ns() - 6000 * MS)
    holder = type("Tensor", (), {})

    def look_at_tensor() -> Callable[[], Any]:
        tensor = holder()
        sampler.look()
        return weakref.ref(tensor)

    assert look_at_tensor()() is None


def test_a_line_beside_the_training_is_kept_among_many_stacks() -> None:
    """Of a line with many stacks beneath it the longest ones are kept."""
    tally, loop = Tally(0, 0), PythonFrame("train.py", 50, "main", True)
    for number in range(20):
        inside = PythonFrame("torch/optim/adam.py", number, "step", False)
        tally.add(Stack((inside, loop), ""), 10, 0, (10 + number) * MS)
    tally.add(Stack((PythonFrame("train.py", 54, "main", True),), "os.fsync"), 10, 0, MS)
    stacks = tally.make_facts()["stacks"]
    assert [round(one["seconds"] * 1e3) for one in stacks] == [29, 1, *range(28, 18, -1)]


def test_usual_times_are_those_of_most_iterations() -> None:
    usual = UsualTimes()
    spans = []
    for step in range(9):
        for phase, begin_ms, end_ms in (("data", 0, 30), ("forward", 40, 60 + 500 * (step == 4)), ("step", 560, 600)):
            span = Span((step * 700 + begin_ms) * MS, PHASE_CODE[phase], 0, (0, step, 0), loose=False)
            span.end_ns = (step * 700 + end_ms) * MS
            span.flags = BOUNDARY if phase == "step" else 0
            spans.append(span)
    usual.learn(spans, is_complete=True)
    assert usual.iteration_ns == 700 * MS
    assert usual.find_limit(PlaceKey(PHASE_CODE["forward"])) == (1.5 * 20 + 20) * MS
    assert usual.find_limit(PlaceKey(PHASE_CODE["eval"])) == 720 * MS  # never seen
    assert usual.notable == {GAP: 610 * MS, DATA: 30 * MS, PHASE_CODE["step"]: 40 * MS}


def test_usual_times_are_known_where_all_iterations_were_counted() -> None:
    usual, span = UsualTimes(), Span(0, PHASE_CODE["step"], 0, (0, 0, 0), loose=False)
    span.end_ns, span.flags = 40 * MS, BOUNDARY  # the first end of an iteration: it began at an unknown time
    usual.learn_counted(2000 * MS, 20)
    usual.learn([span], is_complete=True)
    assert usual.iteration_ns == 100 * MS
    assert usual.notable == {}


def test_counted_steps_that_stay_longer_become_usual(sampled_recorder: tuple[Recorder, StackSampler]) -> None:
    recorder, sampler = sampled_recorder
    begin_ns = time.monotonic_ns() - 60_000 * MS
    record_steps(recorder, 20, 20 * MS, begin_ns)
    sampler._learn(begin_ns)
    usual_ns = sampler._usual.iteration_ns
    for step in range(20, 60):
        end_ns = begin_ns + (step - 20) * 150 * MS
        recorder.last_step = step - 1
        recorder.counted.begin_steps(end_ns, step)
        sampler._learn(begin_ns)
    assert usual_ns is not None
    assert usual_ns <= 20 * MS
    assert sampler._usual.iteration_ns == 150 * MS


@pytest.mark.parametrize(("is_on", "threads"), [(True, 2), (False, 0)])
def test_the_recording_turns_stack_sampling_off(tmp_path: Path, is_on: bool, threads: int) -> None:
    recording = directory.create_recording(["train.py"], path=str(tmp_path / "recording"), stacks=is_on)
    script = (
        "import sys, threading\n"
        "from zerotop_probe.inside.hooks.hook_installer import PROBE\n"
        "assert PROBE.start_recording(sys.argv[1])\n"
        "print(sum(thread.name.startswith('zerotop-') for thread in threading.enumerate()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, recording], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(threads)]


@pytest.mark.parametrize(("may_be_busy", "samples"), [(False, True), (True, True), (False, False)])
def test_the_sampler_waits_promptly_only_while_no_other_thread_computes(
    sampled_recorder: tuple[Recorder, StackSampler], may_be_busy: bool, samples: bool
) -> None:
    import threading

    recorder, sampler = sampled_recorder
    sampler._may_be_busy = lambda: may_be_busy
    seen: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            seen.append(sys.getswitchinterval())
            return True

    if samples:
        record_steps(recorder, 10, 10 * MS, time.monotonic_ns() - 500 * MS)
        sampler.look()
    assert sampler.wait(Event(), 0)
    assert (seen[0] < sys.getswitchinterval()) == (samples and not may_be_busy)


def test_threads_that_are_not_watched_yet_may_be_busy() -> None:
    import threading

    from zerotop_probe.inside.stacks.busy_threads import BusyThreads

    threads = BusyThreads(lambda *values, **facts: None, threading.get_ident)
    assert threads.may_be_busy()
    threads.look()
    assert not threads.may_be_busy()
