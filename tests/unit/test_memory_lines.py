"""The microscope looks by itself: when, at what cost, and which lines it names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents import wait_for
from rank_recordings import Rank
from zerotop_probe.inside.device.allocator import StepMemory
from zerotop_probe.inside.device.memory_history import MemoryHistory
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.memory_lines.block_lines import describe_peak, describe_staying
from zerotop_probe.inside.memory_lines.line_finder import LineFinder
from zerotop_probe.inside.memory_lines.memory_watch import MemoryWatch
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording.event_values import CREEP, EVALUATION, PEAK
from zerotop_probe.recording.writer import Identity

MIB = 1 << 20
S = 1_000_000_000
BUDGET = 0.003
SCRIPT = "/job/train.py"
LIBRARY = "/env/lib/python3.12/site-packages/torch/nn/functional.py"


class Steps:
    """Steps of 0.5 s of a rank, as a watch sees them."""

    def __init__(self, share: float = BUDGET) -> None:
        self.watch = MemoryWatch(share)
        self.time_ns = S
        self.step = 0
        self.allocations = 0
        self.looks: list[tuple[str, int]] = []
        self.creep_steps = 0

    def take_steps(
        self,
        count: int,
        held: Callable[[int], int],
        peak: Callable[[int], int],
        *,
        each: int = 500,
        kept_every: int = 1,
        reserved: Callable[[int], int] = lambda step: 0,
    ) -> None:
        """``kept_every``: a look at fewer steps than that finds nothing that stays."""
        for _ in range(count):
            self.allocations += each
            memory = StepMemory(held(self.step), peak(self.step), self.allocations, reserved(self.step))
            why = self.watch.judge_step(self.step, self.time_ns, memory, 0)
            if why:
                self.looks.append((why, self.step))
                count = self.watch.begin_look(why, self.time_ns)
                self.creep_steps = count if why == CREEP else self.creep_steps
                self.watch.end_look(2 * each, 20_000_000, is_missed=why == CREEP and count <= kept_every)
            self.step += 1
            self.time_ns += S // 2


def hold_level(size: int) -> Callable[[int], int]:
    return lambda step: size * MIB


def test_steady_memory_is_looked_at_once_after_the_first_steps() -> None:
    steps = Steps()
    steps.take_steps(2000, hold_level(100), hold_level(1000))
    assert steps.looks == [(PEAK, 3)]


def test_without_a_budget_nothing_is_looked_at() -> None:
    steps = Steps(0.0)
    steps.take_steps(200, lambda step: step * 32 * MIB, lambda step: (1000 + step * 32) * MIB)
    assert steps.looks == []


def test_the_cost_of_a_look_must_fit_into_the_budget() -> None:
    steps = Steps()
    steps.take_steps(400, hold_level(100), hold_level(1000), each=20_000)
    ((why, step),) = steps.looks
    # 20,000 allocations of 25 us and 10 ms: the budget of 170 s, of which 30 are advanced.
    assert why == PEAK
    assert 280 <= step <= 284


def test_a_creep_is_looked_at_soon_and_then_rarely() -> None:
    steps = Steps()
    steps.take_steps(40, hold_level(100), hold_level(1000))
    steps.take_steps(1000, lambda step: (100 + 32 * (step - 40)) * MIB, hold_level(1000))
    creeps = [step for why, step in steps.looks if why == CREEP]
    assert creeps[0] in range(46, 51)
    assert len(creeps) == 1


def test_a_creep_shows_in_some_of_the_steps_too() -> None:
    steps = Steps()
    for _ in range(400):
        steps.step += 2  # of three steps one is read
        steps.allocations += 2000
        steps.take_steps(1, lambda step: (100 + 32 * step) * MIB, lambda step: (1000 + 32 * step) * MIB, each=1000)
    assert [why for why, _ in steps.looks].count(CREEP) == 1


@pytest.mark.parametrize("every", [2, 10, 40])
def test_a_creep_in_every_tenth_step_is_looked_at_for_as_many(every: int) -> None:
    steps = Steps()
    steps.take_steps(20, hold_level(100), hold_level(1000))
    steps.take_steps(8 * every, lambda step: (100 + 32 * (step // every)) * MIB, hold_level(1000))
    assert [why for why, _ in steps.looks].count(CREEP) == 1
    assert steps.creep_steps == min(every, 12) + 1


@pytest.mark.parametrize(("kept_every", "looked_at"), [(1, [2]), (5, [2, 6]), (25, [2, 6, 26]), (100, [2, 6, 26])])
def test_a_look_that_misses_what_is_kept_is_repeated_for_longer(kept_every: int, looked_at: list[int]) -> None:
    """Of counted steps only some are read, so that memory rises from each reading to the next."""
    steps = Steps()
    lengths: list[int] = []
    steps.take_steps(20, hold_level(100), hold_level(1000), each=100)
    for _ in range(200):
        steps.step += 2
        steps.allocations += 200
        seen = len(steps.looks)
        steps.take_steps(1, lambda step: (100 + 32 * step) * MIB, hold_level(1000), each=100, kept_every=kept_every)
        lengths += [steps.creep_steps] * (len(steps.looks) - seen)
    assert lengths == looked_at


def test_a_creep_below_what_comes_and_goes_is_looked_at() -> None:
    random = np.random.default_rng(1)
    left = random.integers(0, 200, 400)
    steps = Steps()
    steps.take_steps(200, lambda step: int(100 + left[step]) * MIB, hold_level(1000))
    assert CREEP not in [why for why, _ in steps.looks]
    steps.take_steps(200, lambda step: int(100 + left[step] + 16 * (step - 200)) * MIB, hold_level(1000))
    assert [why for why, _ in steps.looks].count(CREEP) == 1


def test_memory_that_comes_and_goes_is_no_creep() -> None:
    steps = Steps()
    steps.take_steps(300, lambda step: (100 + 50 * (step % 5)) * MIB, hold_level(1000))
    assert [why for why, _ in steps.looks] == [PEAK]


def test_a_new_peak_is_looked_at_if_it_lasts() -> None:
    steps = Steps()
    steps.take_steps(50, hold_level(100), hold_level(1000))
    steps.take_steps(1, hold_level(100), hold_level(3000))
    steps.take_steps(49, hold_level(100), hold_level(1000))
    assert len(steps.looks) == 1
    steps.take_steps(50, hold_level(100), hold_level(2000))
    assert steps.looks[1:] == [(PEAK, 103)]


def test_a_peak_that_has_doubled_is_looked_at_soon() -> None:
    steps = Steps()
    steps.take_steps(10, hold_level(100), hold_level(1000))
    steps.take_steps(6, hold_level(100), hold_level(1900))
    assert steps.looks == [(PEAK, 3)]
    steps.take_steps(6, hold_level(100), hold_level(2100))
    assert [why for why, _ in steps.looks] == [PEAK, PEAK]


def test_a_peak_for_which_ever_more_is_reserved_is_looked_at_again_ever_more_rarely() -> None:
    steps = Steps()
    steps.take_steps(100, hold_level(100), hold_level(1000), reserved=hold_level(4000))
    steps.take_steps(100, hold_level(100), hold_level(1000), reserved=hold_level(4900))
    assert steps.looks == [(PEAK, 3)]
    steps.take_steps(2000, hold_level(100), hold_level(1000), reserved=lambda step: (5000 + 100 * (step - 200)) * MIB)
    assert [why for why, _ in steps.looks] == [PEAK] * len(steps.looks)
    assert 4 <= len(steps.looks) <= 8


def test_peaks_that_rise_for_ever_are_looked_at_ever_more_rarely() -> None:
    steps = Steps()
    steps.take_steps(7200, hold_level(100), lambda step: (1000 + 100 * step) * MIB)
    assert 4 <= len(steps.looks) <= 10


def test_an_evaluation_is_looked_at_if_the_one_before_it_had_a_new_peak() -> None:
    steps = Steps()
    looks = []
    for peak in (900, 3000, 3000, 3000, 900, 5000, 900):
        steps.take_steps(20, hold_level(100), hold_level(1000))
        looks.append(steps.watch.judge_evaluation(steps.time_ns, StepMemory(0, 0, steps.allocations), 0))
        if looks[-1]:
            assert steps.watch.begin_look(looks[-1], steps.time_ns) == 0
        steps.watch.end_evaluation(StepMemory(0, peak * MIB, steps.allocations + 100))
    assert looks == ["", "", EVALUATION, "", "", "", EVALUATION]
    steps.take_steps(60, hold_level(100), hold_level(2000))
    assert [why for why, _ in steps.looks] == [PEAK, PEAK]


# --- blocks ---------------------------------------------------------------------------------------------------------------


class History:
    """Entries as PyTorch records them."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.now_us = 1000

    def add_allocation(self, address: int, size: int, *frames: tuple[str, int, str]) -> None:
        named = [{"filename": path, "line": line, "name": name} for path, line, name in frames]
        self._add_entry(action="alloc", addr=address, size=size, frames=named)

    def add_free(self, address: int, size: int) -> None:
        self._add_entry(action="free_completed", addr=address, size=size)

    def _add_entry(self, **entry: Any) -> None:
        self.now_us += 1
        self.entries.append({**entry, "time_us": self.now_us})


@pytest.fixture
def allocation_history() -> History:
    return History()


PATHS = PathNames("/job", ["/job"])


def list_groups(facts: dict[str, Any]) -> list[tuple[int, int, list[tuple[str, int, str]]]]:
    frames = [(frame["file"], frame["line"], frame["function"]) for frame in facts["frames"]]
    return [(one["count"], one["size_bytes"], [frames[i] for i in one["frames"]]) for one in facts["stacks"]]


def test_staying_memory_is_not_freed_by_the_next_step(allocation_history: History) -> None:
    allocation_history.add_allocation(1, 500, (SCRIPT, 10, "keep"))  # kept for good
    allocation_history.add_allocation(2, 900, (SCRIPT, 20, "main"))  # freed within the step
    allocation_history.add_free(2, 900)
    allocation_history.add_allocation(3, 700, (SCRIPT, 30, "main"))  # replaced in the next one
    allocation_history.add_allocation(4, 800, (SCRIPT, 40, "load"))  # fetched two steps ahead
    boundary_us = allocation_history.now_us + 1
    allocation_history.now_us += 1
    allocation_history.add_free(3, 700)
    allocation_history.add_allocation(5, 700, (SCRIPT, 30, "main"))
    allocation_history.add_allocation(6, 500, (SCRIPT, 10, "keep"))
    allocation_history.add_free(99, 800)  # from before
    facts = describe_staying(allocation_history.entries, boundary_us, PATHS)
    assert facts["staying_bytes"] == 500
    assert list_groups(facts) == [(1, 500, [("train.py", 10, "keep")])]


def test_of_a_history_that_lacks_the_first_step_half_is_taken_for_it(allocation_history: History) -> None:
    allocation_history.add_allocation(1, 500, (SCRIPT, 10, "keep"))
    for address in range(10, 14):
        allocation_history.add_allocation(address, 60, (SCRIPT, 11, "main"))
        allocation_history.add_free(address, 60)
    facts = describe_staying(allocation_history.entries, 0, PATHS)
    assert list_groups(facts) == [(1, 500, [("train.py", 10, "keep")])]


def test_the_peak_is_what_was_alive_then(allocation_history: History) -> None:
    linear = (LIBRARY, 5, "linear")
    allocation_history.add_free(98, 100)  # from before
    allocation_history.add_allocation(1, 300, linear, (SCRIPT, 7, "main"))
    allocation_history.add_allocation(2, 300, linear, (SCRIPT, 7, "main"))
    allocation_history.add_allocation(3, 400)  # by a thread without Python
    allocation_history.add_allocation(4, 5, (SCRIPT, 8, "main"))  # less than a hundredth
    allocation_history.add_free(3, 400)
    allocation_history.add_allocation(5, 350, (SCRIPT, 9, "main"))
    facts = describe_peak(allocation_history.entries, 2000 + 955, PATHS)
    assert (facts["peak_bytes"], facts["before_bytes"]) == (3005, 2000)
    assert list_groups(facts) == [
        (2, 300, [("torch/nn/functional.py", 5, "linear"), ("train.py", 7, "main")]),
        (1, 400, []),
    ]


def test_an_empty_history_has_no_blocks() -> None:
    assert list_groups(describe_peak([], 1000, PATHS)) == []
    assert list_groups(describe_staying([], 1000, PATHS)) == []


# --- looks ----------------------------------------------------------------------------------------------------------------


class Binding:
    """As much of torch._C as a history needs."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: list[str | None] = []
        self.is_capturing = False

    def _cuda_isHistoryEnabled(self) -> bool:
        return self.is_on

    def _cuda_isCurrentStreamCapturing(self) -> bool:
        return self.is_capturing

    def _cuda_record_memory_history(self, enabled: str | None, *arguments: Any) -> None:
        self.is_on = enabled is not None
        self.calls.append(enabled)


class Memory:
    """As much of torch.cuda.memory as a look needs."""

    def __init__(self) -> None:
        self._C = Binding()
        self.history = History()

    def _record_memory_history(self, enabled: str | None, **options: Any) -> None:
        self._C._cuda_record_memory_history(enabled)
        self.history.entries.clear()

    def _snapshot(self) -> dict[str, Any]:
        return {"device_traces": [list(self.history.entries)]}

    def memory_stats(self, device: int) -> dict[str, int]:
        return {"allocated_bytes.all.current": 1000}


class Leaking:
    """A rank that keeps 32 MiB in each step, and its finder of lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory = Memory()
        self.binding = self.memory._C
        self.recorder = Recorder(str(folder), Identity.for_this_process("rank", 0), CostMeter())
        history = MemoryHistory(self.memory)
        self.finder = LineFinder(0, self.memory, history, self.recorder.write_event, CostMeter())
        self.step = 0
        self.keeps = True

    def take_step(self) -> None:
        self.memory.history.now_us = time.time_ns() // 1000
        self.memory.history.add_allocation(self.step, 32 * MIB, (SCRIPT, 10, "keep"))
        if not self.keeps:
            self.memory.history.add_free(self.step, 32 * MIB)
        self.finder.end_step(self.step, StepMemory(self.step * 32 * MIB, 0, self.step))
        self.step += 1

    def take_steps_until(self, is_on: bool) -> None:
        for _ in range(20):
            if self.binding.is_on == is_on:
                return
            self.take_step()
        raise AssertionError("no look has begun or ended")

    @property
    def read_events(self) -> list[dict[str, Any]]:
        return Rank(self.folder, 0).find_events("memory_lines")


@pytest.fixture
def leaking_rank(tmp_path: Path) -> Iterator[Leaking]:
    leaking = Leaking(tmp_path)
    yield leaking
    leaking.finder.finish()


def test_a_look_takes_two_steps_and_is_recorded(leaking_rank: Leaking) -> None:
    leaking_rank.take_steps_until(True)
    begun = leaking_rank.step
    leaking_rank.take_steps_until(False)
    assert leaking_rank.step == begun + 2
    wait_for(lambda: leaking_rank.read_events, 60)
    (look,) = leaking_rank.read_events
    assert (look["why"], look["first_step"], look["steps"], look["complete"]) == (CREEP, begun, 2, True)
    assert [group[:2] for group in list_groups(look)] == [(1, 32 * MIB)]


def test_a_look_in_which_nothing_stays_is_repeated_for_longer(leaking_rank: Leaking) -> None:
    leaking_rank.keeps = False
    for _ in range(2):
        leaking_rank.take_steps_until(True)
        leaking_rank.take_steps_until(False)
        assert leaking_rank.finder._thread is not None
        leaking_rank.finder._thread.join(60)
    assert [(look["steps"], look["staying_bytes"]) for look in leaking_rank.read_events] == [(2, 0), (6, 0)]


@pytest.mark.parametrize("trouble", ["is_on", "is_capturing"])
def test_a_history_in_use_and_a_capture_are_left_alone(leaking_rank: Leaking, trouble: str) -> None:
    setattr(leaking_rank.binding, trouble, True)
    for _ in range(20):
        leaking_rank.take_step()
    assert leaking_rank.binding.calls == []


@pytest.mark.parametrize("enabled", ["all", None])
def test_a_history_that_the_job_takes_over_meanwhile_stays_as_it_is(leaking_rank: Leaking, enabled: str | None) -> None:
    leaking_rank.take_steps_until(True)
    leaking_rank.memory._C._cuda_record_memory_history(enabled)
    for _ in range(5):
        leaking_rank.take_step()
    assert leaking_rank.binding.calls == ["all", enabled]
    leaking_rank.finder.finish()
    assert leaking_rank.read_events == []


def test_steps_in_which_nothing_was_read_count_for_a_look(leaking_rank: Leaking) -> None:
    leaking_rank.take_steps_until(True)
    assert leaking_rank.finder.is_looking
    leaking_rank.memory.history.add_allocation(1, 32 * MIB, (SCRIPT, 10, "keep"))
    for step in (leaking_rank.step, leaking_rank.step + 1):
        leaking_rank.finder.end_step(step, None)
    assert not leaking_rank.finder.is_looking
    assert wait_for(lambda: leaking_rank.read_events, 60)[0]["why"] == CREEP


@pytest.mark.parametrize("is_long", [True, False])
def test_an_evaluation_is_looked_at(leaking_rank: Leaking, monkeypatch: pytest.MonkeyPatch, is_long: bool) -> None:
    if is_long:
        monkeypatch.setattr("zerotop_probe.inside.memory_lines.line_finder._EVALUATION_S", 0.01)
    for number in range(2):
        leaking_rank.finder.begin_evaluation(5, StepMemory(0, 0, 0))
        assert leaking_rank.binding.is_on == (number == 1)
        leaking_rank.memory.history.add_allocation(number, 64 * MIB, (SCRIPT, 30, "evaluate"))
        if is_long:
            wait_for(lambda: not leaking_rank.binding.is_on, 60)
        leaking_rank.finder.end_evaluation(StepMemory(0, 900 * MIB, 100))
    wait_for(lambda: leaking_rank.read_events, 60)
    (look,) = leaking_rank.read_events
    assert (look["why"], look["first_step"], look["steps"]) == (EVALUATION, 5, 0)
    assert [group[:2] for group in list_groups(look)] == [(1, 64 * MIB)]


def test_a_look_in_progress_ends_with_the_recording(leaking_rank: Leaking) -> None:
    leaking_rank.take_steps_until(True)
    leaking_rank.finder.finish()
    assert leaking_rank.binding.calls == ["all", None]
    assert leaking_rank.read_events == []


def test_a_look_whose_steps_do_not_end_is_given_up(leaking_rank: Leaking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerotop_probe.inside.memory_lines.line_finder._GIVE_UP_S", 0.01)
    while not leaking_rank.binding.calls:  # on a busy machine it may be over when the step ends
        leaking_rank.take_step()
    wait_for(lambda: not leaking_rank.binding.is_on, 60)
    assert leaking_rank.binding.calls == ["all", None]
    leaking_rank.take_step()
    assert leaking_rank.read_events == []


def test_an_error_switches_the_history_off(leaking_rank: Leaking, monkeypatch: pytest.MonkeyPatch) -> None:
    leaking_rank.take_steps_until(True)
    monkeypatch.delattr(Memory, "_snapshot")
    for _ in range(5):
        leaking_rank.take_step()
    assert leaking_rank.binding.calls == ["all", None]
    assert os.listdir(leaking_rank.folder)
