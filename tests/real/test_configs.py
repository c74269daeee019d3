"""Every ready config trains with two ranks on the CPU; each launcher and each option has its turn."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable

import pytest

from config_runs import EVALUATE, RUNS, SAVE, skip_if_impossible_here
from real_jobs import Run
from zerotop import demo

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

# The Trainer saves after the last step too, and finetune.py keeps the newest checkpoint only.
CHECKPOINT = "checkpoints/checkpoint-3"


def check_finished(run: Run, options: tuple[str, ...]) -> None:
    assert run.returncode == 0, run.output[-4000:]
    last = re.search(r"final loss ([\d.]+) after 3 steps", run.output)
    assert last is not None, run.output[-4000:]
    # A random model knows nothing of its 512 tokens, and three steps teach it little.
    assert 0.5 * math.log(512) < float(last[1]) < 1.5 * math.log(512)
    assert ("eval_loss" in run.output) == (EVALUATE[0] in options)
    assert (run.folder / CHECKPOINT).is_dir() == (SAVE[0] in options)
    assert not [name for name in os.listdir(run.folder / "tmp") if name.startswith("finetune-")]


@pytest.mark.parametrize("config", sorted(path.stem for path in demo.find_config_folder().glob("*.json")))
def test_config_trains(config: str, finetune_run: Callable[..., Run]) -> None:
    skip_if_impossible_here(config)
    launcher, options = RUNS[config]
    run = finetune_run(config, launcher=launcher, options=options)
    check_finished(run, options)
    if SAVE[0] in options:
        parts = list((run.folder / CHECKPOINT / "global_step3").glob("*optim_states.pt"))
        assert len(parts) == 2, "each rank saves its part of the optimizer's state"


@pytest.mark.parametrize("config", ["zero2_offload_optimizer_bf16", None])
def test_plain_python_is_one_rank(config: str | None, finetune_run: Callable[..., Run]) -> None:
    run = finetune_run(config, launcher="python", options=EVALUATE)
    check_finished(run, EVALUATE)


def test_without_deepspeed(finetune_run: Callable[..., Run]) -> None:
    run = finetune_run(None, launcher="torchrun", options=SAVE)
    check_finished(run, SAVE)
