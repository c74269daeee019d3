"""Under ZeRO-3 the fine-tuning script's model is split while it is built: no rank ever holds a whole one."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from real_jobs import TIMEOUT_S, build_launch_command
from zerotop import demo

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


def test_no_rank_holds_a_whole_model(checkout_root: Path, job_environment: dict[str, str]) -> None:
    script = checkout_root / "tests" / "support" / "partitioned_model.py"
    command = build_launch_command("bare", [str(script), str(demo.find_config("zero3_bf16"))])
    run = subprocess.run(command, env=job_environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    # Both ranks write to one pipe, so that a line may hold the words of two.
    held = [json.loads(found) for found in re.findall(r"held (\{.*?\})", run.stdout)]
    assert sorted(rank["rank"] for rank in held) == [0, 1]
    for rank in held:
        assert rank["whole"] > 5_000_000
        assert rank["materialized"] == 0
        assert rank["partition"] == pytest.approx(rank["whole"] / 2, rel=0.01)
