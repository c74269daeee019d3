"""Steady growth of a rank's host memory, in small recordings: which growth is told, when, and with which numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import in_pieces
from in_pieces import find_at_end, find_in_pieces
from small_recording import S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings import Finding, Severity
from zerotop.analysis.findings.host import host_growth
from zerotop.recording.reader import Recording
from zerotop_probe.recording.directory import STACKS_SETTING
from zerotop_probe.recording.events import GrowingContainers
from zerotop_probe.recording.tables import BOUNDARY, HOSTS, PROCESSES, SPANS
from zerotop_probe.recording.writer import EventWriter

GIB, MIB = 1 << 30, 1 << 20
STEP_S, RESIDENT = 0.25, 300 * MIB
Amount = Callable[[int], float]
"""The mebibytes by which memory has grown after a step."""


def write_job(
    folder: Path,
    steps: int,
    *amounts: Amount,
    step_s: float = STEP_S,
    free: int = 16 * GIB,
    container: Any = None,
    tokens: Callable[[int], int] | None = None,
    files: int = 0,
) -> None:
    """Write the recording of a job with a rank for each amount.

    ``container``: steps of a look, and facts of a container. ``tokens``: those of every fifth step's forward.
    ``files``: bytes of resident pages of files.
    """
    processes, hosts = [], []
    for step in range(steps):
        time_ns = int((step * step_s + 0.99 * step_s) * S)
        grown = [round(amount(step) * MIB) for amount in amounts]
        for rank, bytes_ in enumerate(grown):
            sizes = {
                "rss_bytes": RESIDENT + bytes_ + files,
                "held_bytes": RESIDENT + bytes_,
                "swap_bytes": 0,
                "shared_bytes": 0,
            }
            processes.append(make_record(PROCESSES, time_ns=time_ns, pid=100 + rank, rank=rank, **sizes))
        node = {"memory_total_bytes": 64 * GIB, "memory_available_bytes": free - sum(grown), "shared_bytes": 0}
        hosts.append(make_record(HOSTS, time_ns=time_ns, **node))
    for rank in range(len(amounts)):
        spans = [make_span(step * step_s, (step + 1) * step_s, "step", step, BOUNDARY) for step in range(steps)]
        if tokens is not None:
            forwards = [
                make_span(step * step_s, (step + 0.4) * step_s, "forward", step, tokens=tokens(step))
                for step in range(0, steps, 5)
            ]
            spans = sorted([*spans, *forwards], key=lambda span: span[1])
        write_table(folder, SPANS, make_identity(rank), *spans).close()
    write_table(folder, PROCESSES, make_identity(-1), *processes).close()
    write_table(folder, HOSTS, make_identity(-1), *hosts).close()
    if container is not None:
        (first, last), facts = container
        times = {
            "first_step": first,
            "last_step": last,
            "begin_ns": int(first * step_s * S),
            "end_ns": int(last * step_s * S),
        }
        kept = {"name": "kept", "scope": "global", "owner": "train", "file": "train.py", "own": True, "levels": 0}
        kept |= {"kind": "list", "length": 100, "added": last - first, "entry": "Tensor", "keeps_graph": False} | facts
        writer = EventWriter(str(folder), make_identity(0))
        look = {"grown_bytes": 24 * MIB, "seconds": 0.1, "containers": [kept]}
        writer.write(int((last + 1) * step_s * S), GrowingContainers, **times, **look)
        writer.close()


def find_growth(folder: Path, *plan: Any, **more: Any) -> tuple[Finding, ...]:
    """Return the findings at the end; those of all times are the same however the recording is read."""
    write_job(folder, *plan, **more)
    find_in_pieces(folder, host_growth.detect, (7, 300, 16384))
    return find_at_end(folder, [host_growth.detect])


def grow_from(begin: int, megabytes: float) -> Amount:
    """Return growth by so much a step from a step on."""
    return lambda step: megabytes * max(0, step - begin)


def rise_in_stairs(steps: Sequence[int], megabytes: float) -> Amount:
    """Return growth by so much at once in some steps."""
    return lambda step: megabytes * sum(step >= one for one in steps)


@pytest.mark.parametrize(("files", "left_out"), [(0, False), (400 * MIB, True)])
def test_pages_of_files_that_are_left_out_are_named(tmp_path: Path, files: int, left_out: bool) -> None:
    (finding,) = find_growth(tmp_path, 300, grow_from(100, 1.2), files=files)
    assert str(finding.details).startswith("Rank 0's memory without pages of files grew by") == left_out


def test_a_small_leak_is_reported_when_it_is_steady(tmp_path: Path) -> None:
    (finding,) = find_growth(tmp_path, 300, grow_from(100, 1.2))
    assert finding.step == pytest.approx(100, abs=32)
    assert finding.evidence["bytes_per_step"] == pytest.approx(1.2 * MIB, rel=0.2)
    assert 96 * MIB <= finding.evidence["grown_bytes"] <= 200 * 1.2 * MIB


@pytest.mark.parametrize("begin", [0, 40])
def test_the_growth_that_is_told_is_that_of_the_steps_that_are_told(tmp_path: Path, begin: int) -> None:
    (finding,) = find_growth(tmp_path, 300, grow_from(begin, 3))
    steps, first, last = finding.evidence["steps"], finding.step, finding.evidence["resident_bytes"]
    assert first is not None
    assert last == RESIDENT + 3 * MIB * (first + steps - 1 - begin)
    assert finding.evidence["grown_bytes"] == 3 * MIB * min(steps, first + steps - 1 - begin)


@pytest.mark.parametrize("begin", [72, 74, 100])
def test_growth_begins_where_memory_begins_to_grow_and_has_one_pace(tmp_path: Path, begin: int) -> None:
    (finding,) = find_growth(tmp_path, 300, grow_from(begin, 3))
    assert finding.step == pytest.approx(begin + 1, abs=1)
    evidence = finding.evidence
    assert evidence["bytes_per_step"] * evidence["steps"] == evidence["grown_bytes"]
    assert evidence["bytes_per_step"] == pytest.approx(3 * MIB, rel=0.01)


@pytest.mark.parametrize("steps", [250, 333, 470])
def test_growth_is_told_up_to_the_last_step(tmp_path: Path, steps: int) -> None:
    (finding,) = find_growth(tmp_path, steps, grow_from(40, 3))
    assert finding.evidence["resident_bytes"] == pytest.approx(RESIDENT + 3 * MIB * (steps - 41), rel=0.001)
    assert finding.evidence["grown_bytes"] == pytest.approx(3 * MIB * (steps - 41), rel=0.05)


@pytest.mark.parametrize(
    "amount",
    [
        rise_in_stairs((60, 110, 200), 50),  # arenas and pools
        rise_in_stairs((80, 140, 200), 70),  # kernels that are loaded when they first run
        lambda step: 150 * (1 - 0.98**step),  # a cache that fills up
        grow_from(250, 1.5),  # too little yet
        lambda step: 150 * min(1.0, step / 40),  # the first steps
        lambda step: 120 * (step // 30 % 2),
    ],
)
def test_clean_jobs_have_no_growth(tmp_path: Path, amount: Amount) -> None:
    assert find_growth(tmp_path, 300, amount) == ()


@pytest.mark.parametrize(
    ("tokens", "is_told"),
    [
        (lambda step: 512 + 8 * step, False),
        (lambda step: 512 * (1 + step // 60), False),
        (lambda step: 4096 + step // 60, True),  # hardly larger
        (lambda step: 512 + 64 * (step * 7919 % 31), True),  # as they come
        (lambda step: 512, True),
    ],
)
def test_memory_that_grows_with_the_batches_is_no_leak(tmp_path: Path, tokens: Callable[[int], int], is_told: bool) -> None:
    assert bool(find_growth(tmp_path, 300, grow_from(50, 1.2), tokens=tokens)) is is_told


def test_a_list_that_grows_beside_the_batches_is_told(tmp_path: Path) -> None:
    kept = (240, 270), {"added_bytes": 20 * MIB}
    assert find_growth(tmp_path, 600, grow_from(50, 1.2), tokens=lambda step: 512 + 8 * step, container=kept)


def test_a_small_leak_that_would_take_days_is_not_told(tmp_path: Path) -> None:
    assert find_growth(tmp_path, 300, grow_from(20, 0.6), step_s=60.0, free=900 * GIB) == ()


@pytest.mark.parametrize(
    ("facts", "is_told"),
    [
        ({"added_bytes": 20 * MIB}, True),
        ({"added_bytes": 0, "keeps_graph": True}, True),
        ({"added_bytes": 6 * MIB}, False),  # a fourth of the growth
    ],
)
def test_less_growth_suffices_where_a_container_explains_it(tmp_path: Path, facts: dict[str, Any], is_told: bool) -> None:
    found = find_growth(tmp_path, 300, grow_from(160, 0.8), container=((240, 270), facts))
    assert bool(found) is is_told
    assert all("'kept'" in one.headline for one in found)


def test_the_finding_has_newer_numbers_while_memory_grows(tmp_path: Path) -> None:
    (finding,) = find_growth(tmp_path, 1000, grow_from(0, 1.0), container=((240, 270), {"added_bytes": 20 * MIB}))
    assert finding.evidence["grown_bytes"] > 500 * MIB
    assert "'kept'" in finding.headline


def test_growth_that_ends_is_no_warning(tmp_path: Path) -> None:
    """As that of a cache of all samples, which the first epoch fills."""
    (finding,) = find_growth(tmp_path, 900, lambda step: 1.0 * min(max(0, step - 50), 300))
    assert finding.severity is Severity.INFO
    assert finding.headline == "Host memory grew 1.0 MiB a step on rank 0 to step 338"
    assert finding.details.endswith(", and not since.")


@pytest.mark.parametrize(
    ("amount", "free", "container", "severity"),
    [
        pytest.param(
            rise_in_stairs(sorted([*range(60, 650, 150), *range(61, 650, 150)]), 190), 16, None, "info", id="few jumps"
        ),
        pytest.param(rise_in_stairs(range(80, 601, 30), 100), 16, None, "warning", id="many jumps"),
        pytest.param(grow_from(50, 1.0), 63, None, "info", id="far away"),
        pytest.param(grow_from(50, 3.0), 63, None, "warning", id="nearer"),
        pytest.param(grow_from(50, 1.0), 40, None, "warning", id="other memory is used"),
        pytest.param(grow_from(50, 1.0), 63, ((240, 270), {"added_bytes": 20 * MIB}), "warning", id="a known list"),
    ],
)
def test_a_growth_that_may_be_over_is_no_warning(
    tmp_path: Path, amount: Amount, free: int, container: Any, severity: str
) -> None:
    (finding,) = find_growth(tmp_path, 650, amount, free=free * GIB, container=container)
    assert finding.severity.value == severity
    assert ("full near" in finding.headline) is (severity == "warning")


def test_a_rise_after_one_that_ended_is_another_finding(tmp_path: Path) -> None:
    first, second = find_growth(tmp_path, 1200, lambda step: min(max(0, step - 50), 200) + max(0, step - 900))
    assert (first.severity, second.severity) == (Severity.INFO, Severity.WARNING)


def test_a_steeper_rise_is_another_finding(tmp_path: Path) -> None:
    assert len(find_growth(tmp_path, 1000, lambda step: 0.5 * step + 2.5 * max(0, step - 600))) == 2


def test_ranks_that_grow_alike_share_a_finding(tmp_path: Path) -> None:
    (finding,) = find_growth(tmp_path, 300, grow_from(50, 1.0), grow_from(50, 0.9), grow_from(300, 1.0))
    assert finding.ranks == (0, 1)


def test_parts_of_a_growth_that_has_ended_are_no_findings_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 14 ms: it has ended before it is known that the probe named no list for its later parts."""

    def read_with_stacks(folder: Path) -> Recording:
        recording = read_recording(folder)
        recording.info[STACKS_SETTING] = True
        return recording

    monkeypatch.setattr(in_pieces, "read_recording", read_with_stacks)
    container = (705, 740), {"added_bytes": 1000 * MIB}
    growth: Amount = lambda step: 32.0 * (min(max(0, step - 700), 80) + min(max(0, step - 820), 150))  # noqa: E731
    (finding,) = find_growth(tmp_path, 3500, growth, step_s=0.014, free=200 * GIB, container=container)
    assert "'kept'" in finding.headline
