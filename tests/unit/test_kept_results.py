"""Results that a variable collects on the GPU until it is cleared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from in_pieces import find_in_pieces
from memory_recording import HELD_LIST, gib_to_bytes, record_leak
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.findings.memory import kept_results

SAW = [3 + 0.1 * (step % 12) for step in range(60)]


def find(folder: Path, sizes: list[float], step: int = 21, **changes: Any) -> list[Finding]:
    held = HELD_LIST | {"view_of": None, "bytes": gib_to_bytes(0.9), "count": 9} | changes
    recording = record_leak(folder, held=held, sizes=sizes, count=(step, 1.0))
    return list(detect_findings(recording, recording.end_ns))


def test_a_list_that_is_cleared_again_and_again_is_named(tmp_path: Path) -> None:
    found = find(tmp_path, SAW)
    (finding,) = [one for one in found if one.name == "kept_results"]
    assert finding.headline == "seen collects up to 1.10 GiB on the GPU before it lets them go"
    assert finding.details == (
        "From step 0 to 24 the memory in use after a step rose and fell 2 times. The list seen in main() (train.py) kept"
        " 9 tensors in step 21; train.py:97 adds to it."
    )
    assert finding.fix == ".detach().cpu()"
    assert not [one for one in found if one.name == "memory_creep"]


def test_it_takes_the_place_of_the_growth_in_it(tmp_path: Path) -> None:
    sizes = [3 + 0.1 * (step % 50) for step in range(130)]
    found = find(tmp_path, sizes, step=90, bytes=gib_to_bytes(3.9), count=40)
    assert [one.name for one in found if one.name in ("kept_results", "memory_creep")] == ["kept_results"]
    (finding,) = find_in_pieces(tmp_path, kept_results.detect, (16384, 7, 50))
    assert finding in found


def test_graphs_in_it_are_mentioned(tmp_path: Path) -> None:
    (finding,) = [one for one in find(tmp_path, SAW, keeps_graph=True) if one.name == "kept_results"]
    assert finding.advice == "Collect copies on the host instead: they keep no GPU memory and no graphs."


@pytest.mark.parametrize(
    "sizes",
    [
        [3 + 0.1 * step for step in range(60)],  # a leak
        [3 + 0.1 * min(step % 40, 12) for step in range(42)],  # let go once
        [3.0 + 1.1 * (step % 12 == 11) for step in range(60)],  # a buffer of one step
        [30 + 0.1 * (step % 12) for step in range(60)],  # little beside the rest
    ],
    ids=["leak", "once", "buffer", "little"],
)
def test_other_memory_is_not_meant(tmp_path: Path, sizes: list[float]) -> None:
    assert "kept_results" not in [one.name for one in find(tmp_path, sizes)]
