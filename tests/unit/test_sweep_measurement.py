"""What a point measures, on recordings of GPUs."""

from __future__ import annotations

import pytest

from recordings import open_recording
from zerotop.analysis.sweeps.measurement import judge_outcome, measure_point, measure_shortage
from zerotop.recording.steps.step_table import read_rank_steps
from zerotop.recording.sweeps import OK, OUT_OF_MEMORY


@pytest.mark.parametrize("warmup", [0, 3])
def test_n_steps_have_n_minus_1_intervals(warmup: int) -> None:
    recording = open_recording("story")
    measured = measure_point(recording, warmup)
    ranks = [rows[rows["step"] >= warmup] for rows in read_rank_steps(recording)]
    spans = [int(rows["end_unix_ns"][-1] - rows["end_unix_ns"][0]) / 1e9 for rows in ranks]
    pauses = [float((rows["eval_s"] + rows["checkpoint_s"])[1:].sum()) for rows in ranks]
    seconds = max(span - pause for span, pause in zip(spans, pauses, strict=True))
    assert measured["steps"] == len(ranks[0])
    assert measured["iterations_per_s"] == pytest.approx((len(ranks[0]) - 1) / seconds, rel=0.01)
    tokens = sum(int(rows["tokens"][1:].sum()) for rows in ranks)
    assert measured["tokens_per_s"] == pytest.approx(tokens / seconds, rel=0.01)
    assert measured["micro_batch_tokens"] == 2 * 512


def test_memory_is_that_of_all_steps() -> None:
    recording = open_recording("story")
    rows = read_rank_steps(recording)
    for warmup in (0, 8):
        measured = measure_point(recording, warmup)
        assert measured["allocated_peak_bytes"] == max(int(one["allocated_peak_bytes"].max()) for one in rows)
        assert measured["nvml_peak_bytes"] > measured["reserved_peak_bytes"] > measured["allocated_peak_bytes"]
        assert measured["host_peak_bytes"] == sum(int(one["host_rss_bytes"].max()) for one in rows)


def test_cores_in_step_with_the_optimizer_on_the_cpu() -> None:
    """Four ranks of sixteen threads, on 64 cores."""
    assert 40 < measure_point(open_recording("story"), 11)["step_cores"] < 64


def test_the_outcome_of_a_run_is_judged() -> None:
    assert judge_outcome(open_recording("story"), 0, is_hung=False) == (OK, "")
    outcome, reason = judge_outcome(open_recording("z2-oom"), 1, is_hung=False)
    assert outcome == OUT_OF_MEMORY
    assert "ran out of GPU memory" in reason


def test_a_failed_point_measures_how_much_memory_was_missing() -> None:
    shortage = measure_shortage(open_recording("z2-oom"))
    assert shortage == {"needed_bytes": 99_572_776_960 + 57_068_232_192, "unusable_bytes": 68_843_208_704 - 57_068_232_192}
    assert measure_shortage(open_recording("story")) == {}
