"""Modes that slow each step down: what the probe notes of them, and the finding and causes that it gives."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from in_pieces import find_at_end
from small_recording import BEGIN_NS, S, make_identity, make_span, write_table
from zerotop.analysis.findings import Finding
from zerotop.analysis.findings.pace import costly_modes, iteration_shift
from zerotop_probe.inside.costly_modes.cache_clearing import CacheClearing
from zerotop_probe.inside.costly_modes.debug_modes import DebugModes, ModeChange
from zerotop_probe.inside.guard import CostMeter, remove_hooks
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, SPANS
from zerotop_probe.recording.writer import EventWriter


@pytest.fixture
def modes() -> Iterator[DebugModes]:
    noted = DebugModes(CostMeter())
    noted.install_hooks()
    noted.begin_recording(lambda *_, **facts: None, names_lines=True)
    yield noted
    torch.autograd.set_detect_anomaly(False)
    remove_hooks()


def take(noted: DebugModes) -> list[ModeChange]:
    return list(noted.take_changes(10**18))


def test_the_line_that_switches_anomaly_mode_on_is_noted(modes: DebugModes) -> None:
    assert take(modes) == []
    torch.autograd.set_detect_anomaly(True)
    line = sys._getframe().f_lineno - 1
    (change,) = take(modes)
    assert (change.mode, change.is_on) == ("anomaly", True)
    assert change.begin_ns < 10**18  # not only since the look
    assert change.place is not None
    assert (change.place.file.rpartition("/")[2], change.place.line) == ("test_costly_modes.py", line)
    assert take(modes) == []
    torch.autograd.set_detect_anomaly(False)
    assert [one.is_on for one in take(modes)] == [False]


def test_anomaly_mode_for_a_part_of_each_step_is_on(modes: DebugModes) -> None:
    for _ in range(3):
        with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
            pass
        seen = take(modes)
    assert seen == []  # still on
    assert [one.is_on for one in take(modes)] == [False]


def test_modes_that_a_compiler_switches_while_tracing_are_not_the_jobs(modes: DebugModes) -> None:
    traced = []

    def trace(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return make_boxed_func(graph)

    compiled = torch.compile(torch.nn.Linear(4, 4), backend=aot_autograd(fw_compiler=trace))
    compiled(torch.ones(2, 4)).sum().backward()
    assert traced
    assert take(modes) == []


def test_a_profiler_that_records_is_noted(modes: DebugModes) -> None:
    take(modes)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert [(one.mode, one.is_on) for one in take(modes)] == [("profiler", True)]
    assert [(one.mode, one.is_on) for one in take(modes)] == [("profiler", False)]


def test_lines_can_be_left_out_and_changes_are_limited(modes: DebugModes) -> None:
    modes.begin_recording(lambda *_, **facts: None, names_lines=False)
    places = []
    for number in range(100):
        torch.autograd.set_detect_anomaly(number % 2 == 0)
        places += [change.place for change in take(modes)]
    assert places == [None] * 20


def test_watching_modes_does_not_change_them_for_the_job(modes: DebugModes) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == (True, False)
    assert not torch.is_anomaly_enabled()
    with pytest.raises(TypeError):
        torch.autograd.set_detect_anomaly()


def write_job(folder: Path, seconds: list[float], *changes: tuple[float, bool], mode: str = "anomaly") -> None:
    """Write steps of these durations, and when the mode was switched on or off."""
    spans, at = [], 0.0
    for step, length in enumerate(seconds):
        for phase, share in (("forward", 0.4), ("backward", 0.5), ("step", 0.05)):
            spans.append(make_span(at, at + share * length, phase, step, BOUNDARY if phase == "step" else 0, tokens=-1))
            at += share * length
        at += 0.05 * length
    write_table(folder, SPANS, make_identity(0), *spans).close()
    writer = EventWriter(str(folder), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    for second, is_on in changes:
        facts: dict[str, Any] = {"file": "train.py", "line": 33, "function": "<module>"} if is_on else {}
        known_ns = int((second + 0.2) * S)
        writer.write(known_ns, events.DebugMode, mode=mode, on=is_on, begin_ns=int(second * S), **facts)
    writer.close()


def write_clearings(folder: Path, seconds: list[float], first_s: float, every_s: float) -> None:
    """Write steps of these durations, and a line that empties the cache from some time on at regular distances."""
    write_job(folder, seconds)
    writer = EventWriter(str(folder), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    for power in range(7):
        calls = 2**power
        facts = {"begin_ns": int(first_s * S), "calls": calls, "seconds": 0.02 * calls}
        known_ns = int((first_s + every_s * (calls - 1) + 0.02) * S)
        writer.write(known_ns, events.CacheCleared, **facts, file="train.py", line=33, function="tidy")
    writer.close()


def find_all(folder: Path, piece: int = 16384) -> tuple[Finding, ...]:
    return find_at_end(folder, [costly_modes.detect, iteration_shift.detect], piece)


def test_anomaly_mode_in_mid_run_is_the_only_finding(tmp_path: Path) -> None:
    write_job(tmp_path, [0.1] * 40 + [0.25] * 60, (4.01, True))
    whole, *others = (find_all(tmp_path, piece) for piece in (16384, 7, 50))
    (finding,) = whole
    assert finding.headline == "Anomaly mode from step 40 on: iterations take 250 ms instead of 100 ms"
    assert finding.details.startswith(
        "It was switched on at train.py:33. Where phases were recorded, iterations take 250 ms: the forward 100 ms instead"
        " of 40 ms, the backward 125 ms instead of 50 ms."
    )
    assert (finding.step, finding.fix) == (40, "torch.autograd.set_detect_anomaly(False)")
    assert finding.cost == pytest.approx(0.6)
    assert all(found == whole for found in others)


def test_the_level_of_a_mode_is_that_of_all_steps_with_it(tmp_path: Path) -> None:
    slow = [0.2] * 12 + [0.3] * 60
    begins = [0.0, *itertools.accumulate([0.1] * 40 + slow)]
    write_job(tmp_path, [0.1] * 40 + slow + [0.1] * 200, (4.01, True), (begins[-1] - 0.01, False))
    whole, *others = (find_all(tmp_path, piece) for piece in (16384, 7, 50))
    (finding,) = [one for one in whole if one.name == "anomaly_mode"]
    shown = finding.evidence
    assert [shown["after_s"], shown["phased_s"]] == pytest.approx([0.3, 0.3], rel=0.02)
    assert shown["forward_after_s"] == pytest.approx(0.12, rel=0.02)
    assert finding.known_ns <= int(begins[-1] * S) + BEGIN_NS
    assert all(finding in found for found in others)


def test_anomaly_mode_from_the_begin_on_has_no_figures(tmp_path: Path) -> None:
    write_job(tmp_path, [0.1] * 40, (-1.0, True))
    (finding,) = find_all(tmp_path)
    assert (finding.headline, finding.cost) == ("Anomaly mode is on in each step", 0.0)
    assert "takes" not in finding.details


@pytest.mark.parametrize(
    ("steps", "mode", "told"),
    [(8, "anomaly", False), (12, "anomaly", True), (40, "profiler", False), (90, "profiler", True)],
)
def test_a_mode_that_is_soon_switched_off_is_not_told(tmp_path: Path, steps: int, mode: str, told: bool) -> None:
    begins = [0.0, *itertools.accumulate([0.1] * 40 + [0.25] * steps)]
    write_job(tmp_path, [0.1] * 40 + [0.25] * steps + [0.1] * 40, (4.01, True), (begins[-1] - 0.1, False), mode=mode)
    found = find_all(tmp_path)
    kinds = {"anomaly": "anomaly_mode", "profiler": "profiler_on"}
    assert (kinds[mode] in [one.name for one in found]) == told
    causes = [str(one.details) for one in found if one.name == "iteration_shift"]
    assert all("was switched off" in text for text in causes)


def test_a_mode_that_costs_nothing_is_no_warning(tmp_path: Path) -> None:
    write_job(tmp_path, [0.1] * 100, (4.01, True))
    (finding,) = find_all(tmp_path)
    assert (finding.severity.value, finding.cost) == ("info", 0.0)


def test_an_emptied_cache_is_the_only_finding(tmp_path: Path) -> None:
    write_clearings(tmp_path, [0.1] * 40 + [0.15] * 60, 4.12, 0.15)
    whole, *others = (find_all(tmp_path, piece) for piece in (16384, 7, 50))
    (finding,) = whole
    assert finding.headline == "The allocator's cache is emptied in each step: train.py:33"
    assert finding.details == (
        "Iterations take 150 ms instead of 100 ms from step 40 on. The call of torch.cuda.empty_cache() at train.py:33 in"
        " tidy takes 20 ms, and the next step has to request from the driver the memory that PyTorch would have kept."
    )
    assert (finding.step, finding.severity.value, finding.cost) == (40, "warning", pytest.approx(1 / 3))
    assert all(found == whole for found in others)


@pytest.mark.parametrize(("every", "told"), [(1, True), (2, False), (10, False)])
def test_a_cache_that_is_emptied_now_and_then_is_no_finding(tmp_path: Path, every: int, told: bool) -> None:
    write_clearings(tmp_path, [0.1] * 700, 4.02, 0.1 * every)
    found = [(one.name, one.severity.value) for one in find_all(tmp_path)]
    assert found == ([("cache_emptied", "info")] if told else [])


class EmptiedCache:
    """Calls of a function in the place of the one in ``torch._C``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.events: list[dict[str, Any]] = []
        monkeypatch.setattr(torch._C, "_cuda_emptyCache", self.count_call, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
        self.clearing = CacheClearing(CostMeter())
        self.clearing.install_hooks()

    def count_call(self) -> None:
        self.calls += 1

    def record(self, *, names_lines: bool) -> None:
        self.clearing.begin_recording(lambda time_ns, name, **facts: self.events.append(facts), names_lines=names_lines)


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmptiedCache]:
    yield EmptiedCache(monkeypatch)
    remove_hooks()


def test_the_lines_that_empty_the_cache_are_counted(emptied: EmptiedCache) -> None:
    torch.cuda.empty_cache()
    emptied.record(names_lines=True)
    for _ in range(5):
        torch.cuda.empty_cache()
    line = sys._getframe().f_lineno - 1
    torch.cuda.empty_cache()
    assert emptied.calls == 7
    assert [(event["line"] - line, event["calls"]) for event in emptied.events] == [(0, 1), (0, 2), (0, 4), (2, 1)]
    assert all(event["seconds"] >= 0 for event in emptied.events)


def test_lines_that_empty_the_cache_can_be_left_out(emptied: EmptiedCache) -> None:
    emptied.record(names_lines=False)
    torch.cuda.empty_cache()
    torch.cuda.empty_cache()
    assert [sorted(event) for event in emptied.events] == [["begin_ns", "calls", "seconds"]] * 2


def test_a_function_that_fails_fails_as_before(emptied: EmptiedCache) -> None:
    emptied.record(names_lines=True)
    with pytest.raises(TypeError):
        torch._C._cuda_emptyCache(1)
    original = emptied.count_call
    assert torch._C._cuda_emptyCache.__wrapped__.__wrapped__.__wrapped__ == original
    remove_hooks()
    assert torch._C._cuda_emptyCache == original
