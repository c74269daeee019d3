"""Every n-th step waits for n loader workers, of which few steps are known in full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from zerotop.analysis.findings.pace.worker_turns import WorkerTurns, find_worker_turns
from zerotop.recording.steps.step_dtype import STEP_DTYPE

WORKERS, USUAL_S, LATE_S = 4, 0.04, 0.09
SAMPLE = np.dtype(
    [("loader_workers", "<i4"), ("loader_cores", "<f4"), ("loader_waiting_cores", "<f4"), ("loader_blocked", "<f4")]
)


def make_process(cores: float, workers: int = WORKERS) -> Any:
    """Return a rank whose workers use so many cores all the time."""
    rows = np.array([(workers, cores, 0.0, 0.0)] * 8, SAMPLE)
    return SimpleNamespace(host_samples=SimpleNamespace(read_window=lambda *_: SimpleNamespace(rows=rows)))


def make_steps(count: int = 60, since: int = 20, period: int = WORKERS) -> Any:
    """Return counted steps, of which every n-th takes longer from one on."""
    rows = np.zeros(count, STEP_DTYPE)
    rows["step"], rows["steps"], rows["counted"] = np.arange(count), 1, True
    late = (np.arange(count) >= since) & ((np.arange(count) - since) % period == 0)
    rows["iteration_s"] = np.where(late, LATE_S, USUAL_S)
    for name in ("data_s", "forward_s", "backward_s", "step_s"):
        rows[name] = np.nan
    ends = np.cumsum(rows["iteration_s"]) * 1e9
    rows["end_unix_ns"], rows["begin_unix_ns"] = ends, ends - rows["iteration_s"] * 1e9
    return rows


def record_fully(steps: Any, step: int, data_s: float) -> None:
    steps["counted"][step], steps["data_s"][step] = False, data_s


def find(steps: Any, *sampled: int, cores: float = 3.8, workers: int = WORKERS) -> WorkerTurns | None:
    return find_worker_turns(cast("Any", make_process(cores, workers)), steps, list(sampled), None)


@pytest.mark.parametrize("sampled", [40, 60], ids=["a step that ended", "the step in progress"])
def test_busy_workers_explain_turns_of_which_one_wait_was_seen(sampled: int) -> None:
    found = find(make_steps(), sampled)
    assert found is not None
    assert found.rows["step"][0] == 20
    assert found.evidence["pauses"] == 10
    assert found.evidence["period"] == WORKERS
    assert found.evidence["pause_s"] == pytest.approx(LATE_S - USUAL_S)
    assert found.evidence["iteration_s"] == pytest.approx(USUAL_S)


def test_workers_that_sleep_explain_turns_of_which_two_waits_were_seen() -> None:
    assert find(make_steps(), 40, cores=0.2) is None
    assert find(make_steps(), 40, 52, cores=0.2) is not None


def test_phases_tell_whether_the_turns_wait() -> None:
    steps = make_steps()
    record_fully(steps, 40, 0.05)
    assert find(steps) is not None
    record_fully(steps, 41, 0.05)  # so do the others
    assert find(steps) is None
    steps = make_steps()
    record_fully(steps, 40, 0.001)
    assert find(steps, 44) is None


@pytest.mark.parametrize(
    ("steps", "sampled", "workers"),
    [
        (make_steps(), (), WORKERS),
        (make_steps(), (41,), WORKERS),
        (make_steps(), (40,), 5),
        (make_steps(since=48), (52,), WORKERS),
        (make_steps(count=60, period=1), (40,), WORKERS),
    ],
    ids=["no wait seen", "another step waits", "other turns", "few turns", "all steps"],
)
def test_no_other_turns_are_blamed_on_workers(steps: Any, sampled: tuple[int, ...], workers: int) -> None:
    assert find(steps, *sampled, workers=workers, cores=workers) is None
