"""Python stacks of a real loop that is slow in known lines."""

from __future__ import annotations

from typing import Any

import pytest

from loop_runs import Counted, run
from rank_recordings import Rank

_STEPS = 300


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return run("slow_lines", tmp_path_factory.mktemp("slow"), str(_STEPS), launcher="python", ranks=1)


def find_top(rank: Rank, where: str, why: str, steps: range) -> tuple[dict[str, Any], dict[str, Any]]:
    """The stack that took the most time in a place at these steps, and its first frame of the script."""
    found = [
        event
        for event in rank.event("stacks")
        if (event["where"], event["why"]) == (where, why)
        and event["step"] < steps.stop
        and event["last_step"] >= steps.start
    ]
    stacks = [(stack, event) for event in found for stack in event["stacks"]]
    stack, event = max(stacks, key=lambda pair: pair[0]["seconds"])
    return stack, next(event["frames"][number] for number in stack["frames"] if event["frames"][number]["own"])


@pytest.mark.parametrize(
    ("mark", "where", "why", "steps", "call"),
    [
        ("pause", "between phases", "slow", range(150, 151), "time.sleep"),
        ("collect", "between phases", "slow", range(200, 300), "gc.collect"),
        ("always", "between phases", "share", range(_STEPS), "time.sleep"),
        ("forward", "forward", "slow", range(170, 171), None),
    ],
)
def test_the_slow_line_is_sampled(counted: Counted, mark: str, where: str, why: str, steps: range, call: str | None) -> None:
    rank, facts = counted.rank(0)
    stack, frame = find_top(rank, where, why, steps)
    assert (frame["file"], frame["line"]) == ("slow_lines.py", facts["lines"][mark])
    assert call is None or stack["call"] == call


def test_the_probes_own_frames_are_left_out(counted: Counted) -> None:
    rank, _ = counted.rank(0)
    files = {frame["file"] for event in rank.event("stacks") for frame in event["frames"]}
    assert not [file for file in files if "zerotop" in file or file.startswith("/")]
    assert "slow_lines.py" in files


def test_the_samples_stand_for_the_time_that_was_lost(counted: Counted) -> None:
    stack, _ = find_top(counted.rank(0)[0], "between phases", "slow", range(150, 151))
    assert stack["seconds"] > 0.1
