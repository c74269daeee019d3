"""The ledger on real recordings of H200s: it adds up at every moment, and what was expected is what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

import recordings
from zerotop.analysis.failures.out_of_memory import find_post_mortem
from zerotop.analysis.memory.allocator_health import read_allocator_health
from zerotop.analysis.memory.host_ledger import read_host_ledgers
from zerotop.analysis.memory.peak_ledger import read_peak_ledgers
from zerotop.analysis.memory.phase_peaks import read_rank_peaks
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_steps

NAMES = recordings.list_recordings()
MOMENTS = 150


@cache
def open_cached(name: str) -> Recording:
    return recordings.open_recording(name)


ON_GPUS = [name for name in NAMES if open_cached(name).sources["allocator"]]


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
    recording = open_cached(name)
    peaks = next(peaks for peaks in read_rank_peaks(recording.at(recording.last_written_ns)) if peaks.process.rank == 0)
    highest = peaks.phases[0]
    assert (highest.phase, highest.exact) == (OWNERS[name].phase, True)
    assert highest.allocated_bytes / 2**30 == pytest.approx(OWNERS[name].gib, abs=0.001)
    at_peak = read_peak_ledgers(recording.at(recording.last_written_ns))
    assert at_peak
    for found in at_peak:
        assert sum(row.bytes for row in found.ledger.rows) == found.ledger.total_bytes
        assert found.ledger.allocated_bytes >= found.peak.allocated_bytes


def test_pinned_memory_is_rounded_to_powers_of_two() -> None:
    """16 GB of 8 B parameters' shares: 7.48 + 7.48 + 3.74 + 0.98 GiB of tensors take 8 + 8 + 4 + 1."""
    recording = open_cached("story")
    host_ledgers = read_host_ledgers(recording.at(int(read_steps(recording)["end_unix_ns"].max())))
    assert len(host_ledgers) == 4
    for host in host_ledgers:
        assert host.pinned is not None
        assert host.pinned.held_bytes / 2**30 == pytest.approx(21, abs=0.001)
        assert host.pinned.tensors_bytes / 2**30 == pytest.approx(19.675, abs=0.001)
        assert host.shared_bytes == pytest.approx(host.pinned.held_bytes, rel=0.01)
        per = {row.key: row.per_parameter for row in host.rows}
        assert (per["master_weights"], per["optimizer_state"]) == (pytest.approx(4, rel=1e-3), pytest.approx(8, rel=1e-3))


def test_an_evaluation_that_did_not_fit() -> None:
    recording = open_cached("z2-oom")
    post_mortem = find_post_mortem(recording.at(recording.last_written_ns))
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
    before = next(event for event in recording.events if event.event_name == "out_of_memory").unix_ns - 1
    assert find_post_mortem(recording.at(before)) is None


def test_flushes_of_the_cache_are_counted() -> None:
    recording = open_cached("z2-oom")
    (health,) = read_allocator_health(recording.at(recording.last_written_ns), read_steps(recording))
    assert (health.retries, health.ooms, len(health.flushes)) == (3, 1, 3)
    assert health.flushes[1].freed_bytes / 2**30 == pytest.approx(73.2, abs=0.1)
    assert [flush.phase for flush in health.flushes] == ["backward", "forward", "forward"]
    (expandable,) = read_allocator_health(open_cached("z2-expandable").at(open_cached("z2-expandable").last_written_ns))
    assert expandable.settings.has_expandable_segments
