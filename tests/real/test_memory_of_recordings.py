"""The ledger on real recordings of H200s: it adds up at every moment, and what was expected is what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

import recordings
from zerotop.analysis.failures.out_of_memory import find_post_mortem
from zerotop.analysis.memory.allocator_health import read_allocator_health
from zerotop.analysis.memory.expected.zero_model import compare_ledger, compute_expected, parse_setup
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.host_ledger import read_host_ledgers
from zerotop.analysis.memory.ledger_rows import ALLOCATED, FREED, OUTSIDE, UNALLOCATED, UNEXPLAINED
from zerotop.analysis.memory.peak_ledger import read_peak_ledgers
from zerotop.analysis.memory.phase_peaks import read_rank_peaks
from zerotop.session.reader import Session
from zerotop.session.steps.step_table import read_steps
from zerotop_probe.recording.events import EngineFacts

NAMES = recordings.list_recordings()
MOMENTS = 150


@cache
def open_cached(name: str) -> Session:
    return recordings.open_recording(name)


ON_GPUS = [name for name in NAMES if open_cached(name).sources["allocator"]]


# Its memory grows in each step, and steps are short: seldom does NVML's reading match that of the allocator.
GROWING = ("gpu-counted-leak",)


def list_moments(session: Session) -> list[int]:
    """From the first reading of an allocator to the last."""
    tables = [source for source in session.sources["allocator"] if len(source.array)]
    first = min(int(source.array["time_ns"][0]) + source.offset_ns for source in tables)
    last = max(source.last_ns or 0 for source in tables)
    return [first + (last - first) * place // (MOMENTS - 1) for place in range(MOMENTS)]


@pytest.mark.parametrize("name", ON_GPUS)
def test_rows_add_up_at_every_moment_and_almost_nothing_is_unexplained(name: str) -> None:
    session = open_cached(name)
    for cursor in list_moments(session):
        for found in read_ledgers(session.at(cursor)):
            assert sum(row.bytes for row in found.rows) == found.total_bytes
            assert found.sum_bytes(*ALLOCATED) == found.allocated_bytes
            assert all(row.bytes >= 0 or row.key == FREED for row in found.rows)
            assert found.sum_bytes(UNEXPLAINED) <= 0.02 * found.allocated_bytes
        for host in read_host_ledgers(session.at(cursor)):
            assert sum(row.bytes for row in host.rows) == host.resident_bytes
    for at_peak in read_peak_ledgers(session.at(session.last_written_ns)):
        assert at_peak.ledger.sum_bytes(UNEXPLAINED) <= 0.02 * at_peak.ledger.allocated_bytes


@pytest.mark.parametrize("name", [name for name in ON_GPUS if open_cached(name).sources["gpu_processes"]])
def test_nvmls_process_is_pytorch_and_what_is_outside_of_it(name: str) -> None:
    """Exactly; between a reading of NVML and one of the allocator memory may be taken, but mostly is not.

    Where it was, the ledger says that what is free is derived.
    """
    session, seen, still = open_cached(name), 0, 0
    for cursor in list_moments(session):
        for found in read_ledgers(session.at(cursor)):
            if found.ranks and found.job_bytes is not None:
                seen += 1
                if found.rows[0].basis.startswith("NVML") and found.allocated_bytes:
                    still += 1
                    assert found.job_bytes == found.sum_bytes(OUTSIDE, UNALLOCATED, *ALLOCATED)
    assert still > (0.3 if name in GROWING else 0.7) * seen > 0


@pytest.mark.parametrize("name", ON_GPUS)
def test_what_formulas_say_is_what_was_counted(name: str) -> None:
    session = open_cached(name)
    rows = read_steps(session)
    cursor = int(rows["end_unix_ns"].max())
    engines = [event.facts for event in session.events if event.event_name == "engine"]
    known = parse_setup(EngineFacts(engines[0]))
    assert known is not None
    masters = () if engines[0].get("kind") == "loop" else ("master_weights",)
    ledgers = [
        found for found in read_ledgers(session.at(cursor)) if found.ranks
    ]  # a machine may have more GPUs than the job
    assert ledgers
    for found in ledgers:
        differences = {each.key: each for each in compare_ledger(found, compute_expected(known))}
        for name_ in ("parameters", "optimizer_state", *masters):
            each = differences[name_]
            # The allocator's blocks may be up to 1 MiB larger than their tensors, which counts in a small model.
            assert each.expected_bytes == pytest.approx(each.measured_bytes, rel=0.02, abs=1 << 20), (name_, each)
    for host in read_host_ledgers(session.at(cursor)):
        differences = {each.key: each for each in compare_ledger(host, compute_expected(known))}
        for name_ in ("optimizer_state", *masters):
            each = differences[name_]
            assert each.expected_bytes == pytest.approx(each.measured_bytes, rel=0.01, abs=1 << 20), (name_, each)


@dataclass(frozen=True)
class Owner:
    phase: str
    gib: float


# Which phase owns the peak of rank 0, and how high it is in GiB.
OWNERS = {
    "story": Owner("init", 29.915),
    "x4-z3": Owner("backward", 7.432),
    "z2": Owner("backward", 12.649),
    "z2-expandable": Owner("backward", 12.624),
    "z2-fp16": Owner("backward", 12.649),
    "z2-offload": Owner("backward", 7.423),
    "z2-oom": Owner("backward", 128.889),
    "z3-offload-all": Owner("backward", 7.193),
}


@pytest.mark.parametrize("name", OWNERS)
def test_who_owns_the_peak(name: str) -> None:
    session = open_cached(name)
    peaks = next(peaks for peaks in read_rank_peaks(session.at(session.last_written_ns)) if peaks.process.rank == 0)
    highest = peaks.phases[0]
    assert (highest.phase, highest.exact) == (OWNERS[name].phase, True)
    assert highest.allocated_bytes / 2**30 == pytest.approx(OWNERS[name].gib, abs=0.001)
    at_peak = read_peak_ledgers(session.at(session.last_written_ns))
    assert at_peak
    for found in at_peak:
        assert sum(row.bytes for row in found.ledger.rows) == found.ledger.total_bytes
        assert found.ledger.allocated_bytes >= found.peak.allocated_bytes


def test_pinned_memory_is_rounded_to_powers_of_two() -> None:
    """16 GB of 8 B parameters' shares: 7.48 + 7.48 + 3.74 + 0.98 GiB of tensors take 8 + 8 + 4 + 1."""
    session = open_cached("story")
    host_ledgers = read_host_ledgers(session.at(int(read_steps(session)["end_unix_ns"].max())))
    assert len(host_ledgers) == 4
    for host in host_ledgers:
        assert host.pinned is not None
        assert host.pinned.held_bytes / 2**30 == pytest.approx(21, abs=0.001)
        assert host.pinned.tensors_bytes / 2**30 == pytest.approx(19.675, abs=0.001)
        assert host.shared_bytes == pytest.approx(host.pinned.held_bytes, rel=0.01)
        per = {row.key: row.per_parameter for row in host.rows}
        assert (per["master_weights"], per["optimizer_state"]) == (pytest.approx(4, rel=1e-3), pytest.approx(8, rel=1e-3))


def test_an_evaluation_that_did_not_fit() -> None:
    session = open_cached("z2-oom")
    post_mortem = find_post_mortem(session.at(session.last_written_ns))
    assert post_mortem is not None
    assert (post_mortem.kind, post_mortem.source, post_mortem.outer_phase, post_mortem.phase, post_mortem.step) == (
        "cuda",
        "rank",
        "eval",
        "forward",
        4,
    )
    assert (post_mortem.requested_bytes, post_mortem.rows, post_mortem.sequence, post_mortem.survived) == (
        99572776960,
        160,
        1024,
        False,
    )
    assert "607,744 bytes for each of the 163,840 tokens" in post_mortem.cause  # 151 936 logits of 4 bytes
    assert post_mortem.setting == "per_device_eval_batch_size"
    assert "Tried to allocate 92.73 GiB" in post_mortem.text
    before = next(event for event in session.events if event.event_name == "out_of_memory").unix_ns - 1
    assert find_post_mortem(session.at(before)) is None


HAD_ENOUGH = [
    name for name, labels in recordings.read_labels().items() if "out_of_memory" not in {label.name for label in labels}
]


@pytest.mark.parametrize("name", HAD_ENOUGH)
def test_who_did_not_run_out_of_memory(name: str) -> None:
    session = open_cached(name)
    assert find_post_mortem(session.at(session.last_written_ns)) is None


def test_flushes_of_the_cache_are_counted() -> None:
    session = open_cached("z2-oom")
    (health,) = read_allocator_health(session.at(session.last_written_ns), read_steps(session))
    assert (health.retries, health.ooms, len(health.flushes)) == (3, 1, 3)
    assert health.flushes[1].freed_bytes / 2**30 == pytest.approx(73.2, abs=0.1)
    assert [flush.phase for flush in health.flushes] == ["backward", "forward", "forward"]
    (expandable,) = read_allocator_health(open_cached("z2-expandable").at(open_cached("z2-expandable").last_written_ns))
    assert expandable.settings.has_expandable_segments
