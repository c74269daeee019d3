"""An iteration's time as it shows outside a job: within 3 % of the truth, or not told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from recordings import open_recording
from small_recording import BEGIN_NS, S, make_identity, make_record, read_recording, write_table
from zerotop.analysis.live_view import Inferred
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.views.rhythm import RhythmInference, infer_iteration
from zerotop_probe.recording.tables import GPUS, PROCESSES

SECONDS = 60


def infer_rhythm(
    folder: Path, load: Callable[[float], float], *, seconds: int = SECONDS, gpu: bool = False
) -> Inferred | None:
    """What is inferred of a process whose cores in use are a function of time, looked at ten times a second."""
    fine = np.arange(0, seconds, 0.005)
    used = np.concatenate([[0.0], np.cumsum([load(t) for t in fine]) * 0.005])
    times = np.arange(0.1, seconds, 0.1)
    times += np.random.default_rng(5).normal(0, 0.003, len(times))
    cpu = np.interp(times, np.append(fine, seconds), used)
    looks = zip(times, cpu, strict=True)
    rows = [make_record(PROCESSES, time_ns=int(t * S), cpu_ns=int(c * 1e9), rank=0, pid=100) for t, c in looks]
    write_table(folder, PROCESSES, make_identity(-1), *rows).close()
    if gpu:
        steady = [make_record(GPUS, time_ns=int(t * S), utilization_percent=100.0, power_w=700.0, gpu=0) for t in times]
        write_table(folder, GPUS, make_identity(-1), *steady).close()
    return infer_iteration(read_recording(folder).at(BEGIN_NS + (seconds - 1) * S))


def busy_for(share: float, period: float) -> Callable[[float], float]:
    """One core, and fifteen for a share of each period."""
    return lambda t: 1.0 + (14.0 if t % period < share * period else 0.0)


@pytest.mark.parametrize("period", [0.45, 0.8, 1.37, 2.75, 6.1])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_a_steady_rhythm_is_found_within_3_percent(tmp_path: Path, period: float, share: float) -> None:
    rhythm = infer_rhythm(tmp_path, busy_for(share, period), gpu=True)
    assert rhythm is not None
    assert rhythm.iteration_s == pytest.approx(period, rel=0.03)
    assert rhythm.signals == ("cpu",)
    assert 0.5 < rhythm.confidence <= 1.001


@pytest.mark.parametrize("period", [0.035, 0.071, 0.11, 0.13, 0.147, 0.19])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_rhythm_too_fast_to_be_seen_is_not_taken_for_a_slow_one(tmp_path: Path, period: float, share: float) -> None:
    assert infer_rhythm(tmp_path, busy_for(share, period)) is None


def test_noise_has_no_rhythm_and_a_steady_load_none_either(tmp_path: Path) -> None:
    loads: tuple[tuple[str, Callable[[], float]], ...] = (
        ("noise", np.random.default_rng(3).random),
        ("steady", lambda: 4.0),
    )
    for name, load in loads:
        folder = tmp_path / name
        folder.mkdir()
        assert infer_rhythm(folder, partial(lambda load, t: float(load()), load)) is None


def test_no_rhythm_is_reported_while_it_changes_and_the_new_one_afterwards(tmp_path: Path) -> None:
    before, after = busy_for(0.3, 0.8), busy_for(0.3, 1.4)
    changed = tmp_path / "changed"
    changed.mkdir()
    assert infer_rhythm(changed, lambda t: before(t) if t < 54 else after(t)) is None
    rhythm = infer_rhythm(tmp_path, lambda t: before(t) if t < 30 else after(t))
    assert rhythm is not None
    assert rhythm.iteration_s == pytest.approx(1.4, rel=0.03)


def test_the_rhythm_of_a_real_job_is_right_or_not_reported() -> None:
    recording = open_recording("gpu-offload-4")
    steps = RecordingSource(recording).view_at(None).iterations
    answers = 0
    for cursor_s in np.arange(steps.begin_s[0] + 12, steps.begin_s[-1], 2.0):
        iteration = infer_iteration(recording.at(int(cursor_s * 1e9)))
        if iteration is not None:
            within = (steps.begin_s > cursor_s - iteration.window_s) & (steps.begin_s <= cursor_s)
            usual, mean = np.median(np.diff(steps.begin_s[within])), np.mean(np.diff(steps.begin_s[within]))
            assert min(abs(iteration.iteration_s / usual - 1), abs(iteration.iteration_s / mean - 1)) < 0.03
            answers += 1
    assert answers >= 4


def test_nothing_is_inferred_where_steps_are_known() -> None:
    source = RecordingSource(open_recording("gpu-offload-4"))
    view = source.view_at(None)
    assert view.inferred is None
    assert view.progress.iteration_s > 0


def test_it_is_looked_for_every_other_second(tmp_path: Path) -> None:
    infer_rhythm(tmp_path, busy_for(0.3, 0.8))
    rhythm = RhythmInference(read_recording(tmp_path))
    first = rhythm.infer_at(BEGIN_NS + 40 * S + S // 2)
    assert first is not None
    assert rhythm.infer_at(BEGIN_NS + 41 * S) is first
    later = rhythm.infer_at(BEGIN_NS + 43 * S)
    assert later is not first
    assert later == replace(first, iteration_s=later.iteration_s, confidence=later.confidence) if later else False
