"""The line that is new in a phase which takes longer than before."""

from __future__ import annotations

import pytest

from small_recording import make_identity
from zerotop.analysis.findings.support.lines.new_lines import find_new_line
from zerotop_probe.recording.events import Stacks

LOOP = ("train.py", 90, "main", True)
LINEAR = (("torch/nn/modules/linear.py", 134, "Linear.forward", False), ("net.py", 28, "Net.forward", True), LOOP)
ROWS = (("torch/_tensor.py", 5, "Tensor.item", False), ("net.py", 31, "Net.forward", True), LOOP)
COUNT = (("net.py", 18, "count", True), ("net.py", 33, "Net.forward", True), LOOP)
EXPERT = (*LINEAR[:2], ("net.py", 40, "Net.route", True), LOOP)


def sample(counts: dict[tuple[tuple[str, int, str, bool], ...], int]) -> list[Stacks]:
    """Return an event with samples of stacks, innermost frame first."""
    frames = list(dict.fromkeys(frame for stack in counts for frame in stack))
    facts = {
        "where": "forward",
        "why": "share",
        "samples": sum(counts.values()),
        "frames": [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in frames],
        "stacks": [
            {"count": count, "seconds": count / 10, "frames": [frames.index(frame) for frame in stack]}
            for stack, count in counts.items()
        ],
    }
    return [Stacks(facts, 0, make_identity(0))]


@pytest.mark.parametrize(
    ("before", "since", "levels", "line"),
    [
        ({LINEAR: 40}, {LINEAR: 70, COUNT: 30}, (0.07, 0.10), 18),
        ({LINEAR: 40}, {LINEAR: 70, ROWS: 30}, (0.07, 0.10), 31),  # also where it calls PyTorch
        ({LINEAR: 40}, {LINEAR: 40, EXPERT: 60}, (0.04, 0.10), 40),  # the innermost line that is new
        ({LINEAR: 40}, {LINEAR: 95, COUNT: 5}, (0.07, 0.10), None),  # too little of the added time
        ({LINEAR: 40}, {LINEAR: 40, COUNT: 60}, (0.09, 0.10), None),  # more than that: samples of other steps
        ({LINEAR: 30, COUNT: 10}, {LINEAR: 70, COUNT: 30}, (0.07, 0.10), None),  # it took time before
        ({LINEAR: 40}, {LINEAR: 100}, (0.07, 0.10), None),
        ({LINEAR: 10}, {LINEAR: 70, COUNT: 30}, (0.07, 0.10), None),  # too few samples
        ({LINEAR: 40}, {LINEAR: 12, COUNT: 6}, (0.07, 0.10), None),
    ],
)
def test_the_new_line(
    before: dict[tuple[tuple[str, int, str, bool], ...], int],
    since: dict[tuple[tuple[str, int, str, bool], ...], int],
    levels: tuple[float, float],
    line: int | None,
) -> None:
    found = find_new_line(sample(before), sample(since), levels)
    assert (found.line[1] if found is not None else None) == line
