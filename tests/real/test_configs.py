"""Every ready config trains with two ranks on the CPU; each launcher and each option has its turn."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable

import pytest

from config_runs import EVALUATE, OWN_MODEL, RUNS, SAVE, TOGETHER, WITHOUT_DEEPSPEED, skip_if_impossible_here
from real_jobs import RANKS, Run
from zerotop import demo
from zerotop.analysis.engine import read_first_engine
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_rank_steps
from zerotop_probe.recording.tables import PHASE_CODE

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
def test_config_trains(config: str, request: pytest.FixtureRequest, finetune_run: Callable[..., Run]) -> None:
    skip_if_impossible_here(config)
    launcher, options = RUNS[config]
    if launcher == TOGETHER:
        run = request.getfixturevalue("runs_together")[config]
    else:
        run = finetune_run(config, launcher=launcher, options=options)
    check_finished(run, options)
    if SAVE[0] in options:
        parts = list((run.folder / CHECKPOINT / "global_step3").glob("*optim_states.pt"))
        assert len(parts) == 2, "each rank saves its part of the optimizer's state"


def test_runs_of_one_job_are_recorded_one_after_another(runs_together: dict[str, Run]) -> None:
    recording = Recording.open(runs_together[OWN_MODEL].recording)
    expected = []
    for name in list(runs_together)[1:]:
        config = "zero3_bf16" if name == OWN_MODEL else name
        zero = json.loads(demo.find_config(config).read_text())["zero_optimization"]
        devices = [zero.get(part, {}).get("device", "none") for part in ("offload_optimizer", "offload_param")]
        expected.append((zero["stage"], *devices, config.rpartition("_")[2]))
    facts = ("zero_stage", "offload_optimizer", "offload_parameters", "dtype")
    for rank in range(RANKS):
        loop, *engines = [
            event.facts for event in recording.events if (event.event_name, event.writer.rank) == ("engine", rank)
        ]
        assert loop["kind"] == "loop"
        # The first engine takes over the loop's number, so that its steps count too.
        numbers = [0, *range(len(expected))]
        assert [engine["engine"] for engine in (loop, *engines)] == numbers
        assert [tuple(engine[fact] for fact in facts) for engine in engines] == expected
        (spans,) = [source.array for source in recording.sources["spans"] if source.rank == rank]
        steps = spans[spans["phase"] == PHASE_CODE["step"]]
        assert steps[["engine", "step"]].tolist() == [(number, step) for number in numbers for step in range(3)]
    assert read_first_engine(recording.at()).zero_stage == expected[0][0]
    assert [rows["step"].tolist() for rows in read_rank_steps(recording)] == [[0, 1, 2, 0, 1, 2]] * RANKS
    assert not [event for event in recording.events if event.event_name in ("probe_error", "sampler_error", "rank_silent")]


@pytest.mark.parametrize("config", ["zero2_offload_optimizer_bf16", None])
def test_plain_python_is_one_rank(config: str | None, finetune_run: Callable[..., Run]) -> None:
    run = finetune_run(config, launcher="python", options=EVALUATE)
    check_finished(run, EVALUATE)


def test_without_deepspeed(runs_together: dict[str, Run]) -> None:
    check_finished(runs_together[WITHOUT_DEEPSPEED], SAVE)
