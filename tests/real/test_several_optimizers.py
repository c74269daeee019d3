"""Loops with several optimizers: their iterations against those that they counted themselves."""

from __future__ import annotations

import numpy as np
import pytest

from loop_runs import Counted, run_loop
from zerotop_probe.recording.tables import BOUNDARY

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

FIRST = 5  # iterations that are always recorded in full
# Each is a rank of one job, in this order.
WAYS = (
    "create_for_later",
    "end_before_it_shows",
    "copy_optimizer",
    "take_turns",
    "replace_half_way",
    "replace_by_new",
    "accumulate",
    "step_rarely",
    "step_now_and_then",
    "step_in_backward",
    "drop_unused",
)


@pytest.fixture(scope="module")
def all_ways(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return run_loop("several_optimizers", tmp_path_factory.mktemp("ways"), *WAYS, launcher="python", ranks=len(WAYS))


@pytest.mark.parametrize("way", WAYS)
def test_iterations_are_those_of_the_job(all_ways: Counted, way: str) -> None:
    rank, own = all_ways.read_rank(WAYS.index(way))
    ends = rank.select_phases("step")
    ends = ends[ends["flags"] & BOUNDARY > 0]
    assert ends["step"].tolist() == [*range(len(own["ends"]))]
    # Each update ends less than a pause before its iteration does.
    late_ns = np.array(own["ends"]) - ends["end_ns"]
    assert (late_ns > 0).all()
    assert np.median(late_ns) < 5_000_000
    # Later on a slow machine only counts them.
    backwards = rank.select_phases("backward")[["step", "micro_step"]].tolist()
    expected = [(step, micro) for step, count in enumerate(own["micro_steps"]) for micro in range(count)]
    assert [place for place in backwards if place[0] < FIRST] == [place for place in expected if place[0] < FIRST]
    whole = rank.spans[rank.spans["step"] < len(ends)]  # at its end a loader is asked once more
    begins = np.concatenate([[0], ends["end_ns"]])[whole["step"]]
    assert (whole["begin_ns"] >= begins).all()
    assert (whole["end_ns"] <= ends["end_ns"][whole["step"]]).all()
    assert not rank.find_events("probe_error")
