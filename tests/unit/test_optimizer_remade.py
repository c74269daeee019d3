"""Optimizers that are made anew in each step, and the line that asks for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from in_pieces import find_at_end
from memory_recording import PlantedRecording
from small_recording import S, make_identity, make_span
from zerotop.analysis.findings import Finding, Severity
from zerotop.analysis.findings.loops import optimizer_remade
from zerotop_probe.inside.changes.setting_lines import SettingLines
from zerotop_probe.inside.changes.training_settings import Change
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.recording import events, tables

ADAM = {"class": "AdamW", "package": "torch", "settings": {}}


def _find(
    folder: Path, looks: Sequence[tuple[int, int, float | None]], optimizer: dict[str, Any], further: int = 0
) -> list[Finding]:
    """Search steps of a second each; a look is the step of the one before, its own, and when the optimizer was made."""
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.node_event()
    recording.write_engine(kind="loop", zero_stage=None, optimizers=[ADAM] * further + [optimizer])
    spans = [make_span(step + 0.6, step + 1, "step", step, tables.BOUNDARY) for step in range(200)]
    recording.write_records(tables.SPANS, who, spans, born=1)
    for last, step, made_s in looks:
        made = {"name": "optimizer_objects", "file": "train.py", "line": 50, "function": "main"}
        change = {"name": "hooks", "before": "0", "after": "1"} if made_s is None else made | {"changed_ns": int(made_s * S)}
        change = {"before": "", "after": "", **change}
        facts = {"step": step, "last_step": last, "begin_ns": (last + 1) * S, "changes": [change]}
        recording.write_event(who, step + 1.1, events.TrainingChanged, **facts)
    return list(find_at_end(folder, [optimizer_remade.detect], 10))


def _look_each(distance: int, late: float = 0.1, *, count: int = 12, begin: int = 40) -> list[tuple[int, int, float | None]]:
    steps = range(begin, begin + count * distance, distance)
    return [(step, step + distance, step + 1 + late) for step in steps]


@pytest.mark.parametrize(
    ("optimizer", "lost"),
    [
        (ADAM, "its moments and its count of steps begin at 0 in each step"),
        (ADAM | {"class": "SGD", "settings": {"momentum": 0.9}}, "its state, such as momentum, begins at 0"),
    ],
)
def test_an_optimizer_that_is_made_in_each_step(optimizer: dict[str, Any], lost: str, tmp_path: Path) -> None:
    (found,) = _find(tmp_path, [(20, 40, 40.2), *_look_each(7)], optimizer)
    assert found.headline == "The optimizer is made anew in each step since step 40: train.py:50"
    assert (found.severity, found.step, found.evidence["looks"]) == (Severity.WARNING, 40, 12)
    assert lost in found.details
    assert "add_param_group()" in found.advice


@pytest.mark.parametrize(
    ("looks", "optimizer"),
    [
        (_look_each(7), ADAM | {"class": "SGD", "settings": {"momentum": 0}}),  # keeps no state
        (_look_each(7, count=4), ADAM),
        (_look_each(7, late=4.5), ADAM),  # every few steps, as in an inner loop
        ([(20 * at, 20 * at + 10, 20 * at + 1.1) for at in range(1, 9)], ADAM),  # looks between these found none
        ([look if at % 3 else (*look[:2], None) for at, look in enumerate(_look_each(7))], ADAM),
    ],
)
def test_optimizers_that_are_made_now_and_then(
    looks: list[tuple[int, int, float | None]], optimizer: dict[str, Any], tmp_path: Path
) -> None:
    assert not _find(tmp_path, looks, optimizer)


def test_optimizers_of_an_inner_loop_may_be_new(tmp_path: Path) -> None:
    assert not _find(tmp_path, _look_each(7), ADAM, further=1)


def _run(lines: SettingLines, make: Callable[[], None], at_ns: int) -> str:
    make()
    place = lines.find_place(Change("optimizer_objects", [1], [2]), at_ns, sys._getframe())[1]
    assert place is not None
    return place.function


def test_the_line_is_that_of_the_caller_where_a_function_makes_it() -> None:
    lines = SettingLines(CostMeter())
    lines.is_on = True

    def make() -> None:
        lines.note(10, ("optimizers", "optimizer_objects"))

    assert _run(lines, make, 0) == "_run"
    lines.note(20, ("optimizers", "optimizer_objects"))
    place = lines.find_place(Change("optimizer_objects", [1], [2]), 20, sys._getframe())[1]
    assert place is not None
    assert place.function == "test_the_line_is_that_of_the_caller_where_a_function_makes_it"
