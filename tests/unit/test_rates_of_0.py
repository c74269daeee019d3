"""A learning rate that stays 0, which is told; and rates that are 0 for a while or in part, which are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from small_recording import make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings import Finding
from zerotop.analysis.findings.loops import rates_of_0
from zerotop.analysis.findings.support.detection import Detection
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.logged_values import EngineValues, LoggedValues, OptimizerRate
from zerotop_probe.recording.tables import BOUNDARY, LOGGED, LOGGED_BITS, OPTIMIZER_RATE, RATES_ARE_0, SKIPPED, SPANS

RATE = LOGGED_BITS["learning_rate"]
NONE = RATE | OPTIMIZER_RATE | RATES_ARE_0


def find_rates(
    folder: Path, readings: Mapping[int, tuple[float, int]], *, steps: int = 100, skipped: Sequence[int] = ()
) -> tuple[Finding, ...]:
    """Return the findings about rates that were read after some steps, each with its bits."""
    spans = []
    for step in range(steps):
        flags = BOUNDARY | (SKIPPED if step in skipped else 0)
        spans.append(make_span(step, step + 0.4, "forward", step))
        spans.append(make_span(step + 0.4, step + 0.8, "backward", step))
        spans.append(make_span(step + 0.8, step + 0.9, "step", step, flags))
    logged = [
        make_record(LOGGED, time_ns=int((step + 0.95) * 1e9), known=known, learning_rate=rate)
        for step, (rate, known) in readings.items()
    ]
    write_table(folder, SPANS, make_identity(0), *spans).close()
    write_table(folder, LOGGED, make_identity(0), *logged).close()
    recording = read_recording(folder)
    detection = Detection(recording, [rates_of_0.detect])
    detection.update()
    return detection.findings_at(recording.last_written_ns)


def test_rates_that_stay_0(tmp_path: Path) -> None:
    (found,) = find_rates(tmp_path, dict.fromkeys(range(0, 100, 10), (0.0, NONE)))
    assert (found.name, found.step, found.severity.value) == ("learning_rate_0", 0, "warning")
    assert found.headline == "The learning rate has been 0 since step 0: nothing is learned"
    assert "at each of 6 readings up to step 50." in found.details


def test_rates_that_rise_in_the_end(tmp_path: Path) -> None:
    readings = dict.fromkeys(range(0, 80, 10), (0.0, NONE)) | {80: (1e-3, RATE | OPTIMIZER_RATE)}
    (found,) = find_rates(tmp_path, readings)
    assert found.headline == "The learning rate was 0 in steps 0 to 70: nothing was learned in them"


def test_rates_that_end_too_early(tmp_path: Path) -> None:
    readings = {0: (1e-3, RATE | OPTIMIZER_RATE)} | dict.fromkeys(range(20, 90, 10), (0.0, NONE))
    (found,) = find_rates(tmp_path, readings)
    assert found.headline == "The learning rate has been 0 since step 21: nothing is learned"


@pytest.mark.parametrize(("last_risen", "steps", "is_told"), [(50, 85, True), (50, 65, False), (150, 175, False)])
def test_rates_that_fall_to_0_for_more_than_the_last_steps(
    last_risen: int, steps: int, *, is_told: bool, tmp_path: Path
) -> None:
    """As of a scheduler that is stepped with each micro-batch; one that ends at 0 with the job is as planned."""
    readings = {step: (1e-3 * (1 - step / last_risen), RATE | OPTIMIZER_RATE) for step in range(last_risen)}
    readings |= dict.fromkeys(range(last_risen, steps, 4), (0.0, NONE))
    found = find_rates(tmp_path, readings, steps=steps)
    assert [one.headline for one in found] == [
        f"The learning rate has been 0 since step {last_risen + 1}: nothing is learned"
    ] * is_told
    assert all("stepped with each micro-batch" in one.advice and "up to 0.001, and " in one.details for one in found)


def test_rates_that_decay_to_nothing(tmp_path: Path) -> None:
    """Readings below the limit that are not marked are no rise: of many, the probe marks a few."""
    readings = {step: (1e-2 * 0.5 ** (2 * step), RATE | OPTIMIZER_RATE) for step in range(40)}
    readings |= {step: (1e-2 * 0.5 ** (2 * step), NONE) for step in (20, 25, 40, 60, 80)}
    (found,) = find_rates(tmp_path, readings)
    assert found.headline == "The learning rate has been below 1e-12 since step 21: nothing is learned"
    assert found.details.startswith("All groups of parameters had a learning rate below 1e-12 at each of")
    assert "Before, it was up to 0.01, and 2.33e-12 at step 17" in found.details
    assert "stepped once an epoch" in found.advice


@pytest.mark.parametrize(
    ("readings", "skipped"),
    [
        (dict.fromkeys(range(0, 45, 5), (0.0, NONE)) | {45: (1e-3, RATE | OPTIMIZER_RATE)}, ()),  # a short warm-up
        (dict.fromkeys(range(0, 100, 10), (0.0, RATE)), ()),  # logged: of the first group, or rounded
        (dict.fromkeys(range(0, 100, 10), (0.0, NONE)), range(60)),  # steps that overflowed
        ({0: (0.0, NONE), 30: (1e-3, RATE), 60: (0.0, NONE), 90: (1e-3, RATE)}, ()),  # a rate that comes back to 0
    ],
)
def test_other_rates(tmp_path: Path, readings: Mapping[int, tuple[float, int]], skipped: Sequence[int]) -> None:
    assert not find_rates(tmp_path, readings, skipped=skipped)


class _Written:
    """Collects what would be recorded."""

    def __init__(self) -> None:
        self.known: list[int] = []

    def write(self, time_ns: int, logged: Mapping[str, Any], marks: int = 0) -> None:
        self.known.append(sum(LOGGED_BITS[name] for name in logged) | marks)


class _Engine(SimpleNamespace):
    """An object that can be referenced weakly, as an engine."""


@pytest.mark.parametrize(
    ("optimizers", "are_0"),
    [
        ([[{"lr": 0.0}, {"lr": 0}]], True),
        ([[{"lr": 0.0}, {"lr": 1e-3}]], False),  # the first group is frozen
        ([[{"lr": 0.0}], [{"lr": 1e-3}]], False),
        ([[{"lr": 0.0, "relative_step": True}]], False),  # Adafactor, which makes its own
        ([[{"lr": 0.0}, {"lr": None}]], False),
        ([[{"lr": 1e-13}, {"lr": 0.0}]], True),
        ([[{"lr": 1e-13}, {"lr": 1e-9}]], False),
    ],
)
def test_all_groups_are_read(optimizers: list[list[dict[str, Any]]], *, are_0: bool) -> None:
    written, alive = _Written(), {number: SimpleNamespace(param_groups=one) for number, one in enumerate(optimizers)}
    follower = OptimizerRate(lambda: alive, cast(LoggedValues, written), CostMeter())
    for step in range(0, 80, 8):
        follower.end_step(step, step)
    assert bool(written.known[0] & RATES_ARE_0) == are_0
    assert len(written.known) == (10 if are_0 else 1)


def test_an_engine_is_read_again_while_its_rate_is_0() -> None:
    written, group = _Written(), {"lr": 0.0}
    engine = _Engine()
    engine.optimizer, engine._global_grad_norm = SimpleNamespace(param_groups=[group]), 2.0
    follower = EngineValues(engine, cast(LoggedValues, written), CostMeter())
    for step in (0, 1, 2, 60):
        follower.end_step(step, step)
    norm = LOGGED_BITS["grad_norm"]
    assert written.known == [RATE | norm | RATES_ARE_0, *[RATE | RATES_ARE_0] * 3]
    group["lr"] = 1e-3
    follower.end_step(61, 61)
    assert written.known[-1] == RATE | norm
