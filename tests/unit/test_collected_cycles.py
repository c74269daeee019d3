"""Memory that grows until Python's garbage collector runs, in small recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from in_pieces import find_at_end, find_in_pieces
from memory_recording import GIB, PlantedRecording, record_leak
from small_recording import BEGIN_NS, S, make_identity
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.findings.memory import collected_cycles
from zerotop.analysis.findings.support.links import drop_superseded
from zerotop_probe.recording import events

EVERY = 20


def record_cycles(folder: Path, collected: list[int], sizes: list[float]) -> None:
    """Record steps that leave so many GiB, and collections in some of them."""
    record_leak(folder, held=None, sizes=sizes)
    recording = PlantedRecording(folder)
    for step in collected:
        facts = {"step": step, "begin_ns": int((10.5 + step) * S), "seconds": 0.1, "collections": 1}
        recording.write_event(make_identity(0), 10.95 + step, events.Garbage, **facts)


def find_cycles(folder: Path, collected: list[int], sizes: list[float]) -> tuple[Finding, ...]:
    record_cycles(folder, collected, sizes)
    find_in_pieces(folder, collected_cycles.detect, (7, 16384))
    return find_at_end(folder, [collected_cycles.detect])


SAW = [4 + 0.05 * (step % EVERY) for step in range(100)]


def test_memory_that_falls_with_each_collection_was_kept_by_cycles(tmp_path: Path) -> None:
    (found,) = find_cycles(tmp_path, [20, 40, 60, 80], SAW)
    assert found.headline == "GPU memory grows 51.2 MiB a step until Python's garbage is collected"
    assert "fell 2 times, about every 20 steps" in found.details
    assert "Or collect every 5 steps." in found.advice
    assert found.fix == "import gc; gc.collect()"
    assert found.evidence["freed_bytes"] == pytest.approx(0.95 * GIB, rel=0.01)


@pytest.mark.parametrize(
    ("collected", "sizes"),
    [
        ([10, 30, 50, 70, 90], SAW),  # collections without a fall, falls without a collection
        (list(range(100)), SAW),  # collections in all steps
        ([20, 40, 60, 80], [4 + 0.05 * step for step in range(100)]),
        ([20, 40, 60, 80], [4 + (step % EVERY > 10) for step in range(100)]),  # no rise from step to step
        ([20], SAW),
    ],
)
def test_other_falls_are_no_cycles(collected: list[int], sizes: list[float], tmp_path: Path) -> None:
    assert find_cycles(tmp_path, collected, sizes) == ()


@pytest.mark.parametrize("leaks", [False, True])
def test_a_leak_is_told_beside_the_cycles_if_it_is_not_freed(leaks: bool, tmp_path: Path) -> None:
    sizes = [4 + 0.05 * (step % 60 if not leaks or step < 180 else step - 180) for step in range(360)]
    record_cycles(tmp_path, [60, 120, 180, 240], sizes)
    recording = PlantedRecording(tmp_path).open_recording()
    found = drop_superseded(detect_findings(recording, BEGIN_NS + 400 * S))
    told = [one.headline for one in found if one.name == "memory_creep"]
    assert told[0] == "GPU memory grows 51.2 MiB a step until Python's garbage is collected"
    assert len(told) == 1 + leaks
