"""Ranks that delay the others one after the other, each for a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from small_recording import BEGIN_NS, S, make_identity, make_span, read_recording, write_table
from zerotop.analysis.findings import Finding, Severity
from zerotop.analysis.findings.ranks import straggler
from zerotop.analysis.findings.support import detection
from zerotop.analysis.ranks.delays import list_delays
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, SPANS
from zerotop_probe.recording.writer import EventWriter

Late = Callable[[int, int], float]  # the seconds of a rank's own work in a step


def find(folder: Path, late: Late, count: int = 160, *, searches: int = 1) -> list[Finding]:
    """Return the findings about two ranks that synchronize in each step."""
    spans: dict[int, list[tuple[object, ...]]] = {0: [], 1: []}
    at = 0.0
    for step in range(count):
        own = [0.01 + late(rank, step) for rank in (0, 1)]
        end = at + max(own) + 0.1
        for rank in (0, 1):
            spans[rank].append(make_span(at + own[rank], end - 0.02, "forward", step))
            spans[rank].append(make_span(end - 0.02, end, "step", step, BOUNDARY))
        at = end
    for rank in (0, 1):
        write_table(folder, SPANS, make_identity(rank), *spans[rank]).close()
        writer = EventWriter(str(folder), make_identity(rank), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
        writer.write(0, events.Engine, engine=0, kind="loop", device="cpu")
        writer.close()
    recording = read_recording(folder)
    runner = detection.Detection(recording, [straggler.detect])
    for number in range(1, searches + 1):
        runner.update(BEGIN_NS + int(at * S * number / searches) + S)
    return list(runner.findings_at(recording.end_ns))


def list_spells(found: list[Finding]) -> list[tuple[tuple[int, ...], int | None, float | None]]:
    return [(one.ranks, one.step, one.evidence.get("until_step")) for one in found]


def two_ranks(rank: int, step: int) -> float:
    return 0.08 if rank == 1 and 5 <= step < 25 else 0.15 if rank == 0 and step >= 80 else 0.0


def one_rank(rank: int, step: int) -> float:
    return 0.08 if rank == 1 and (30 <= step < 70 or step >= 120) else 0.0


def without_a_break(rank: int, step: int) -> float:
    return 0.08 if rank == (step >= 60) and step >= 20 else 0.0


def grows(rank: int, step: int) -> float:
    return 0.0 if rank == 0 or step < 20 else 0.05 if step < 80 else 0.2


@pytest.mark.parametrize("searches", [1, 40])
@pytest.mark.parametrize(
    ("late", "spells"),
    [
        (two_ranks, [((1,), 5, 24.0), ((0,), 80, None)]),
        (one_rank, [((1,), 30, 69.0), ((1,), 120, None)]),
        (without_a_break, [((0,), 20, 59.0), ((1,), 60, None)]),
        (grows, [((1,), 20, 79.0), ((1,), 80, None)]),
    ],
    ids=["two ranks", "one rank twice", "one after the other", "a longer delay"],
)
def test_each_is_told_with_its_end(tmp_path: Path, late: Late, spells: list[object], searches: int) -> None:
    found = find(tmp_path, late, searches=searches)
    assert list_spells(found) == spells
    first, second = found
    assert first.headline.startswith(f"Rank {first.ranks[0]} delayed iterations by ")
    assert str(first.headline).endswith(f" to {int(first.evidence['until_step'])}")
    assert second.headline.startswith(f"Rank {second.ranks[0]} delays each iteration by ")
    assert [one.step for one in list_delays(found, 2)] == [second.step]


def test_a_rank_that_is_late_in_most_steps_goes_on(tmp_path: Path) -> None:
    found = find(tmp_path, lambda rank, step: 0.1 * (rank == 1 and step > 20 and (step < 40 or step % 3 > 0)))
    assert list_spells(found) == [((1,), 21, None)]


def test_a_rank_that_was_late_only_for_a_moment_of_a_long_training_is_no_warning(tmp_path: Path) -> None:
    (found,) = find(tmp_path, lambda rank, step: 0.03 * (rank == 1 and 300 <= step < 310), 400)
    assert found.evidence["until_step"] == 309
    assert (found.severity, found.advice) == (Severity.INFO, "")
