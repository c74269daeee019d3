"""A sweep's first point compiles DeepSpeed's operators for a minute or two: screen and lines say so."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import recordings
from sweep_progress import Progress, make_model
from zerotop.commands import sweep as command
from zerotop.commands.sweeping import point_run
from zerotop.recording.sweeps import PointAttempt, Sweep
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.drawing.rows import row_text
from zerotop.ui.sweep.drawing import draw_sweep


def drop_engine(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if json.loads(line).get("event") != "engine"]
    path.write_text("".join(f"{line}\n" for line in lines))


def test_a_job_compiles_until_it_has_an_engine(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-microscope", tmp_path)
    watch = point_run.LifeWatch(folder, hang_after_s=1e9)
    watch.count_signs()
    assert not watch.is_compiling
    for path in folder.glob("events*.jsonl"):
        drop_engine(path)
    watch = point_run.LifeWatch(folder, hang_after_s=1e9)
    watch.count_signs()
    assert watch.is_compiling


@pytest.mark.parametrize(("width", "said"), [(80, "compiling 0:12"), (160, "compiling DeepSpeed's operators 0:12")])
def test_the_screen_says_so(width: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(0)
    assert any("running 0:12" in row_text(row) for row in draw_sweep(model, width, 30, BLOCKS))
    monkeypatch.setattr(Progress, "is_compiling", True)
    assert any(said in row_text(row) for row in draw_sweep(model, width, 30, BLOCKS))


def test_a_line_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Runner:
        """Compiles when the second and the third time somebody looks."""

        sweep: Sweep = make_model(0).sweep
        looks = 0

        @property
        def attempts(self) -> dict[int, PointAttempt]:
            self.looks += 1
            return {0: PointAttempt(0, 1, Path("/nowhere"), 0.0, self.looks in (2, 3))}

        def run(self) -> None:
            while self.looks < 4:
                time.sleep(0.01)

    runner: Any = Runner()
    command._run_with_lines(runner, quiet=False)
    assert capsys.readouterr().out.count("compiling DeepSpeed's operators") == 1
