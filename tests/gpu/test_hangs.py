"""Ranks that hang on GPUs: NCCL lets the others go on until they wait for their devices."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from real_jobs import make_environment
from standing_jobs import LINES, StandingJob

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs here"),
]
LIMIT_S = 300


@pytest.mark.parametrize("kind", ["sleep", "lock", "native", "kernel", "mismatch"])
def test_the_rank_that_hangs_is_named_with_its_line(kind: str, tmp_path: Path) -> None:
    """Of two ranks in different collectives both are named, with the line of the one that the other has not called."""
    variables = make_environment() | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")}
    job = StandingJob(tmp_path / "job", variables, kind, ranks=2, odd=1, step=60, pause_s=LIMIT_S)
    try:
        end = time.monotonic() + LIMIT_S
        while (finding := job.find_named("hung_ranks")) is None:
            assert time.monotonic() < end, job.output
            assert job.process.poll() is None, job.output
            time.sleep(0.5)
    finally:
        job.stop()
    assert finding.ranks == ((0, 1) if kind == "mismatch" else (1,)), f"{finding.headline}. {finding.details}"
    assert finding.fix == f"hanging.py:{LINES[kind]}"
