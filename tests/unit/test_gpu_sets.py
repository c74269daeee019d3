"""Points of a sweep take GPUs of their own."""

from __future__ import annotations

import pytest

from zerotop.commands.sweeping.runner import GpuSets
from zerotop.recording.sweeps import Plan, Point, Value

GPUS = ["0", "1", "2", "3"]


def test_a_set_is_taken_once_until_it_is_given_back() -> None:
    sets = GpuSets(Plan({"gpus": [1, 2]}), GPUS)
    one, two = Point(0, {"gpus": 1}), Point(1, {"gpus": 2})
    assert [sets.take(two), sets.take(one), sets.take(two)] == [("0", "1"), ("2",), None]
    sets.give_back(("0", "1"))
    assert sets.take(two) == ("0", "1")


@pytest.mark.parametrize(
    ("plan", "settings", "taken"),
    [
        (Plan({}), {}, 1),
        (Plan({}), {"gpus": 9}, 4),
        (Plan({}), {"offload": "none"}, 1),
        (Plan({}), {"offload": "optimizer"}, 4),
        (Plan({}, config={"zero_optimization": {"offload_param": {"device": "cpu"}}}), {}, 4),
        (Plan({}, ("torchrun", "train.py")), {}, 4),
        (Plan({}, ("torchrun", "--nproc_per_node", "{gpus}", "train.py")), {"gpus": 2}, 2),
        (Plan({}, ("/usr/bin/deepspeed", "--num_gpus", "{gpus}", "train.py")), {"gpus": 2}, 4),
        (Plan({}, ("python", "-m", "deepspeed.launcher.runner", "train.py")), {"gpus": 2}, 4),
    ],
)
def test_a_point_takes_what_it_needs(plan: Plan, settings: dict[str, Value], taken: int) -> None:
    assert len(GpuSets(plan, GPUS).take(Point(0, settings)) or ()) == taken


def test_without_gpus_one_point_runs_at_a_time() -> None:
    sets = GpuSets(Plan({}), [])
    first = sets.take(Point(0, {}))
    assert first is not None
    assert sets.take(Point(1, {})) is None
    assert sets.list_visible(first) == ()
