"""Many skipped fp16 steps: each of them known, or only how many a fused optimizer has skipped on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import long_recording
from in_pieces import find_at_end
from long_recording import STEP_S, Trouble
from zerotop.analysis.findings import Finding
from zerotop.analysis.findings.pace import skipped_steps
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, PHASE_CODE, SKIPPED

_LOOP = {"kind": "loop", "autocast": "fp16"}
Stretch = tuple[int, int, float, float]


def _find(path: Path, trouble: Trouble, steps: int = 600) -> tuple[Finding, ...]:
    recording = long_recording.write_recording(path / "recording", steps, trouble)
    whole, *others = (find_at_end(recording, [skipped_steps.detect], piece) for piece in (16384, 50, 7))
    assert all(found == whole for found in others)
    return whole


def _find_on_gpu(path: Path, *stretches: Stretch, begin: int = 0) -> tuple[Finding, ...]:
    """Each stretch: updates, how many were skipped, the last ones that were not, the loss scale afterwards."""

    def skip_on_gpu(write: Callable[..., None], steps: int) -> None:
        step, scale = begin, 4096.0
        for updates, skipped, good_last, after in stretches:
            facts = {"updates": updates, "skipped": skipped, "good_last": good_last}
            scales = {"loss_scale_before": scale, "loss_scale_after": after}
            end = step + updates
            write(STEP_S * (end + 1), events.SkippedUpdates, engine=0, first_step=step, last_step=end - 1, **facts, **scales)
            step, scale = end, after

    return _find(path, Trouble(events=skip_on_gpu, engine=_LOOP))


def _skip_rows(chosen: Callable[[Any], Any]) -> Trouble:
    def skip_updates(rows: Any) -> None:
        ends = (rows["phase"] == PHASE_CODE["step"]) & (rows["flags"] & BOUNDARY != 0) & chosen(rows["step"])
        rows["flags"][ends] |= SKIPPED

    return Trouble(tables={"spans": skip_updates}, engine=_LOOP)


def test_the_first_steps(tmp_path: Path) -> None:
    (found,) = _find_on_gpu(tmp_path, (60, 24, 36, 2.0), (60, 0, 60, 2.0))
    assert found.headline == "fp16 skipped the first 24 steps: a skipped step trains nothing"
    assert (found.severity.name, found.step, found.evidence["loss_scale_now"]) == ("INFO", 0, 2.0)


def test_first_steps_among_which_one_was_not_skipped(tmp_path: Path) -> None:
    (found,) = _find_on_gpu(tmp_path, (60, 8, 51, 16.0))
    assert found.headline == "fp16 skipped 8 of the first 9 steps: a skipped step trains nothing"


@pytest.mark.parametrize(
    "stretches", [((60, 2, 58, 1024.0),), ((60, 2, 20, 1024.0), (60, 1, 20, 512.0), (60, 0, 60, 512.0))]
)
def test_a_few_skipped_steps_are_usual(tmp_path: Path, stretches: tuple[Stretch, ...]) -> None:
    assert not _find_on_gpu(tmp_path, *stretches, begin=200)


def test_some_of_the_steps(tmp_path: Path) -> None:
    stretches = ((60, 8, 2, 16.0), (60, 12, 2, 2.0**-8), (60, 12, 2, 2.0**-20))
    (found,) = _find_on_gpu(tmp_path, *stretches, begin=200)
    assert found.headline == "fp16 skipped 32 or more of the steps 200 to 377: a skipped step trains nothing"
    assert found.details == "Gradients overflowed, while the loss scale fell from 4096 to 9.5e-07."
    assert found.advice.startswith("A smaller loss scale did not help")
    assert found.evidence["wasted_s"] == pytest.approx(32 * STEP_S, rel=0.05)


@pytest.mark.parametrize("begin", [0, 200])
def test_a_scale_that_is_raised_too_often(tmp_path: Path, begin: int) -> None:
    stretches = ((60, 30, 0, 8192.0), (60, 28, 0, 16384.0), (60, 31, 0, 4096.0))
    (found,) = _find_on_gpu(tmp_path, *stretches, begin=begin)
    assert found.headline == f"fp16 skipped 89 or more of the steps {begin} to {begin + 179}: a skipped step trains nothing"
    assert found.details.startswith("Gradients overflowed, and the loss scale was raised about as often as it fell")
    assert (found.fix, found.severity.name) == ("GradScaler(growth_interval=2000)", "WARNING")


def test_all_steps_until_the_scale_is_0(tmp_path: Path) -> None:
    stretches = ((60, 40, 0, 2.0**-28), (60, 60, 0, 2.0**-88), (60, 52, 0, 0.0), (60, 1, 0, 0.0))
    (found,) = _find_on_gpu(tmp_path, *stretches, begin=200)
    assert found.headline == "fp16 has skipped all steps since step 260: nothing is trained any more"
    assert found.details == (
        "60 steps in a row overflowed, while the loss scale fell from 3.7e-09 to 3.2e-27, after steps that did not."
        " The loss scale is 0 now, with which no step trains anything."
    )
    assert (found.step, found.severity.name) == (200, "WARNING")


def test_a_scale_that_is_0_before_anybody_has_seen_it_fall(tmp_path: Path) -> None:
    (found,) = _find_on_gpu(tmp_path, (100, 40, 0, 2.0**-28), (300, 112, 0, 0.0), begin=100)
    assert found.headline == "fp16's loss scale fell to 0 by step 499: no step trains any more"
    assert found.details.startswith("152 or more of the steps from 100 on overflowed, while it fell from 4096 to 0.")


def test_skipping_that_ends(tmp_path: Path) -> None:
    (found,) = _find_on_gpu(tmp_path, (60, 60, 0, 2.0**-48), (60, 0, 60, 2.0**-48), begin=200)
    assert found.headline == "fp16 skipped 60 or more of the steps 200 to 259: a skipped step trains nothing"


def test_known_steps_that_are_skipped_among_others(tmp_path: Path) -> None:
    (found,) = _find(tmp_path, _skip_rows(lambda step: (step >= 300) & (step % 5 == 0)))
    assert found.headline.startswith("fp16 skipped 5")
    assert found.headline.endswith("a skipped step trains nothing")
    assert (found.step, found.advice) == (300, "Train in bf16, which needs no loss scale.")  # scales are unknown


def test_known_steps_that_are_skipped_seldom(tmp_path: Path) -> None:
    assert not _find(tmp_path, _skip_rows(lambda step: (step >= 300) & (step % 15 == 0)))
    assert not _find(tmp_path / "growing", _skip_rows(lambda step: np.isin(step, [50, 51, 52, 200, 201, 400])))
