"""The fine-tuning script on a user's own model and text, from local folders and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from config_runs import OWN_MODEL
from free_ports import find_free_port
from real_jobs import BIN, Run, finetune_command, run_recorded
from zerotop import demo

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


def test_local_model_and_files(runs_together: dict[str, Run]) -> None:
    run = runs_together[OWN_MODEL]
    assert run.returncode == 0, run.output[-4000:]
    assert "after 3 steps" in run.output


def test_accelerate_set_to_use_the_cpu_still_uses_deepspeed(tmp_path: Path, job_environment: dict[str, str]) -> None:
    plain = finetune_command("python", demo.find_config("zero2_bf16"), ())[1:]
    accelerate = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "2"]
    run = run_recorded([*accelerate, "--main_process_port", str(find_free_port()), *plain], tmp_path, job_environment)
    assert run.returncode == 0, run.output[-4000:]
    assert "DeepSpeed" in run.output
    assert "after 3 steps" in run.output
