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


def find_top(rank: Rank, where: str, why: str, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The stack that took the most time in a place at a step, and its first frame of the script."""
    found = [
        event
        for event in rank.event("stacks")
        if (event["where"], event["why"]) == (where, why) and event["step"] <= step <= event["last_step"]
    ]
    stacks = [(stack, event) for event in found for stack in event["stacks"]]
    stack, event = max(stacks, key=lambda pair: pair[0]["seconds"])
    return stack, next(event["frames"][number] for number in stack["frames"] if event["frames"][number]["own"])


@pytest.mark.parametrize(
    ("mark", "where", "why", "step", "call"),
    [
        ("pause", "between phases", "slow", 150, "time.sleep"),
        ("collect", "between phases", "slow", 180, "gc.collect"),
        ("collect", "between phases", "slow", 200, "gc.collect"),
        ("always", "between phases", "share", 100, "time.sleep"),
        ("forward", "forward", "slow", 220, None),
    ],
)
def test_the_slow_line_is_sampled(counted: Counted, mark: str, where: str, why: str, step: int, call: str | None) -> None:
    rank, facts = counted.rank(0)
    stack, frame = find_top(rank, where, why, step)
    assert (frame["file"], frame["line"]) == ("slow_lines.py", facts["lines"][mark])
    assert call is None or stack["call"] == call


def test_the_probes_own_frames_are_left_out(counted: Counted) -> None:
    rank, _ = counted.rank(0)
    files = {frame["file"] for event in rank.event("stacks") for frame in event["frames"]}
    assert not [file for file in files if "zerotop" in file or file.startswith("/")]
    assert "slow_lines.py" in files


def test_the_samples_stand_for_the_time_that_was_lost(counted: Counted) -> None:
    rank, _ = counted.rank(0)
    stack, _ = find_top(rank, "between phases", "slow", 150)
    assert stack["seconds"] > 0.3
