"""A training job's file for node_exporter: right while it runs, and gone afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from programs import ZEROTOP, make_environment

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
STEPS = 300
TRAIN = f"""
import time, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({STEPS}):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).pow(2).mean().backward()
    optimizer.step()
    print(step, flush=True)
    time.sleep(0.05)
"""


def read_values(path: Path) -> dict[str, float]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name: sample.value for sample in samples}


def test_the_file_follows_a_training_job_and_goes_with_it(tmp_path: Path) -> None:
    folder, script, output = tmp_path / "textfile", tmp_path / "train.py", tmp_path / "output"
    folder.mkdir()
    script.write_text(TRAIN)
    options = ["--headless", "--recording", str(tmp_path / "mine"), "--prometheus-textfile", str(folder)]
    command = [*ZEROTOP, "run", *options, "--", sys.executable, str(script)]
    with output.open("wb") as printed:
        job = subprocess.Popen(command, env=make_environment(tmp_path), stdout=printed, stderr=subprocess.PIPE)
    counts, alive = [], []
    while job.poll() is None:
        values = read_values(folder / "zerotop-mine.prom")
        if values.get("zerotop_steps_total"):
            done = len(output.read_text().splitlines())
            assert values["zerotop_steps_total"] <= done + 1, "no step before it was made; the last may not be printed yet"
            counts.append(int(values["zerotop_steps_total"]))
            alive.append((values["zerotop_job_running"], values["zerotop_rank_alive"]))
        time.sleep(0.1)
    assert job.stderr is not None
    said = job.stderr.read()
    job.stderr.close()
    assert job.returncode == 0, said
    assert len(set(counts)) >= 2, "it is written again while the job runs"
    assert counts == sorted(counts)
    assert set(alive[:-1]) == {(1.0, 1.0)}
    assert list(folder.iterdir()) == [], "node_exporter would report a job that has ended for ever"
