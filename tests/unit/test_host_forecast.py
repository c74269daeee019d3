"""When the kernel kills a rank for host memory, in small recordings: what is forecast, for whom, and where nothing is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from in_pieces import find_in_pieces
from small_recording import S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop.analysis.findings.host import host_forecast
from zerotop_probe.recording.events import GpuProcess, RayMonitor
from zerotop_probe.recording.tables import BOUNDARY, HOSTS, PROCESSES, SPANS
from zerotop_probe.recording.writer import EventWriter

GIB, MIB = 1 << 30, 1 << 20
RANKS, ENGINE = 3, 300
# Memory of the node and limit of the job's control group.
NODE, LIMIT = 64 * GIB, 16 * GIB
# Each rank's memory at first.
RESIDENT = 2 * GIB
WARMUP_S = 10

Amount = Callable[[float], float]


def nothing(_: float) -> float:
    """Return no growth."""
    return 0


@dataclass
class Plan:
    """Three ranks with steps of a second, of which rank 2 grows by ``growth`` bytes at each time."""

    seconds: int
    growth: Amount = nothing
    part: str = ""  # the column with this growth, besides that of all memory
    cache: Amount = nothing  # pages of files
    others: Amount = nothing  # on the node
    files: Amount = nothing  # in memory
    limit: int = LIMIT
    swap: int = 0
    engine: Amount = nothing  # memory of an inference engine that the job has started
    ray: tuple[float, int | None] | None = None  # the limit of Ray's memory monitor
    saves: tuple[tuple[float, float], ...] = ()  # begins and ends of checkpoints


def write_job(folder: Path, plan: Plan) -> None:
    """Write the recording of a plan."""
    training = [at for at in range(plan.seconds) if not any(begin <= at < end for begin, end in plan.saves)]
    spans = [make_span(at + 0.3, at + 1.3, "step", at, BOUNDARY) for at in training]
    spans += [make_span(begin, end, "checkpoint_save", int(begin)) for begin, end in plan.saves]
    processes, hosts = [], []
    for tick in range(2 * plan.seconds):
        at = tick / 2
        for rank in range(RANKS):
            grown = int(plan.growth(at)) if rank == 2 else 0
            held = RESIDENT + grown
            sizes = {"rss_bytes": held, "held_bytes": held, "swap_bytes": 0, "shared_bytes": 0, "pinned_bytes": 0}
            sizes |= {plan.part: grown} if plan.part else {}
            processes.append(make_record(PROCESSES, time_ns=int(at * S), pid=100 + rank, rank=rank, **sizes))
        engine = int(plan.engine(at))
        sizes = {"rss_bytes": RESIDENT + engine, "held_bytes": RESIDENT + engine, "swap_bytes": 0}
        processes.append(make_record(PROCESSES, time_ns=int(at * S), pid=ENGINE, rank=-1, **sizes))
        used = RANKS * RESIDENT + int(plan.growth(at)) + int(plan.files(at)) + engine
        group = {
            "cgroup_used_bytes": used + int(plan.cache(at)),
            "cgroup_limit_bytes": plan.limit,
            "cgroup_cache_bytes": int(plan.cache(at)),
        }
        left = {"memory_available_bytes": NODE - used - int(plan.others(at)), "swap_left_bytes": plan.swap}
        shared = int(plan.files(at)) + (int(plan.growth(at)) if plan.part == "shared_bytes" else 0)
        row = {"memory_total_bytes": NODE, "shared_bytes": shared, **left, **(group if plan.limit > 0 else {})}
        hosts.append(make_record(HOSTS, time_ns=int(at * S), **row))
    for rank in range(RANKS):
        write_table(folder, SPANS, make_identity(rank), *sorted(spans, key=lambda span: span[1])).close()
    write_table(folder, PROCESSES, make_identity(-1), *processes).close()
    write_table(folder, HOSTS, make_identity(-1), *hosts).close()
    writer = EventWriter(str(folder), make_identity(-1))
    writer.write(S, GpuProcess, pid=ENGINE, program="vllm", user="me", of_job=True)
    if plan.ray is not None:
        writer.write(S, RayMonitor, pid=90, share=plan.ray[0], free_bytes=plan.ray[1])
    writer.close()


def find_all(folder: Path) -> tuple[Finding, ...]:
    """Return all findings, each of which is known at its time and not before."""
    found = find_in_pieces(folder, host_forecast.detect, (16384, 40, 3))
    for one in found:
        early, late = (detect_findings(read_recording(folder), one.known_ns - before) for before in (1, 0))
        assert one not in early
        assert one in late
    return found


def leak(bytes_per_s: float, since: float = 0, until: float = 10**9) -> Amount:
    """Return an amount that grows evenly between two times."""
    return lambda at: bytes_per_s * max(0, min(at, until) - since)


@pytest.mark.parametrize(("ray", "limit"), [((0.75, None), 12), ((0.5, 2 * GIB), 14), ((0.9375, 8 * GIB), 15)])
def test_ray_kills_at_its_own_limit_and_counts_no_swap(tmp_path: Path, ray: tuple[float, int | None], limit: int) -> None:
    """Of 16 GiB 6 are in use, which grow by 4 MiB a second."""
    write_job(tmp_path, Plan(400, leak(4 * MIB), swap=8 * GIB, ray=ray))
    first = find_all(tmp_path)[0]
    assert first.evidence["limit_bytes"] == limit * GIB
    at_s = first.known_ns / S - 1000 + first.evidence["expected_s"]
    assert at_s == pytest.approx((limit - 6) * GIB / (4 * MIB), rel=0.05)
    assert first.headline.startswith("Ray will kill a worker in about")
    assert f"of Ray's limit of {limit}" in first.details
    assert "swap" not in first.details


def test_the_rank_that_leaks_is_reported_with_its_time(tmp_path: Path) -> None:
    """16 GiB, 6 of them in use: at 4 MiB a second they are full after 2560 s."""
    write_job(tmp_path, Plan(400, leak(4 * MIB), cache=lambda at: 3 * GIB + at * 8 * MIB))
    findings = find_all(tmp_path)
    first, last = findings[0], findings[-1]
    for finding in findings:
        assert finding.known_ns / S - 1000 + finding.evidence["expected_s"] == pytest.approx(2560, rel=0.05)
        assert finding.event == first.event
    assert "The kernel will kill rank 2 in about 40 minutes: host memory runs out" in {str(one.headline) for one in findings}
    assert "the control group's limit of 16.00 GiB" in first.details
    assert "rank 2 grew by" in first.details
    assert last.evidence["last_step"] == pytest.approx(2560, rel=0.05)


@pytest.mark.parametrize(("part", "text"), [("shared_bytes", "are shared memory"), ("pinned_bytes", "pinned")])
def test_the_growing_part_is_named(tmp_path: Path, part: str, text: str) -> None:
    write_job(tmp_path, Plan(200, leak(10 * MIB), part=part))
    assert text in find_all(tmp_path)[0].details


def test_files_in_memory_are_no_rank_s(tmp_path: Path) -> None:
    write_job(tmp_path, Plan(200, nothing, files=leak(10 * MIB)))
    finding = find_all(tmp_path)[0]
    assert "Files in memory (/dev/shm, memfd) grew by" in finding.details
    assert "/dev/shm" in finding.fix
    assert str(finding.headline).startswith("The kernel will kill a rank in about")


def test_an_engine_of_the_job_may_grow_and_be_killed(tmp_path: Path) -> None:
    write_job(tmp_path, Plan(200, engine=leak(10 * MIB)))
    finding = find_all(tmp_path)[-1]
    assert str(finding.headline).startswith("The kernel will kill process 300 in about")
    assert "process 300 (vllm) grew by" in finding.details


def test_swap_takes_a_part_of_it(tmp_path: Path) -> None:
    write_job(tmp_path, Plan(320, leak(10 * MIB), swap=10 * GIB))
    finding = find_all(tmp_path)[-1]
    assert finding.known_ns / S - 1000 + finding.evidence["expected_s"] == pytest.approx(2048, rel=0.05)
    assert "10.00 GiB of them swap" in finding.details


def test_without_a_limit_it_is_the_node(tmp_path: Path) -> None:
    write_job(tmp_path, Plan(300, leak(50 * MIB), limit=-1))
    finding = find_all(tmp_path)[-1]
    assert finding.known_ns / S - 1000 + finding.evidence["expected_s"] == pytest.approx(58 * 1024 / 50, rel=0.05)
    assert "node1's memory" in finding.details


def test_it_is_reported_again_nearer_the_end_and_taken_back(tmp_path: Path) -> None:
    write_job(tmp_path, Plan(400, leak(20 * MIB, 50, 350)))
    *told, over = find_all(tmp_path)
    assert len(told) >= 2
    assert told[-1].evidence["expected_s"] <= told[0].evidence["expected_s"] / 2
    assert (over.severity, over.event) == (Severity.INFO, told[0].event)
    assert "no longer" in over.headline
    assert 350 < over.known_ns / S - 1000 < 390


def test_a_rate_that_varies_gives_an_interval(tmp_path: Path) -> None:
    write_job(tmp_path, Plan(200, lambda at: 10 * MIB * (at + 6 * math.sin(at / 20))))
    texts = [str(finding.headline) for finding in find_all(tmp_path)]
    assert any(" to " in text for text in texts), texts


def find_sawtooth(at: float) -> float:
    """Return memory that is filled for 20 s and then freed."""
    return 100 * MIB * (at % 20)


STEADY_NOT = {
    "page cache": Plan(0, growth=nothing, cache=leak(20 * MIB)),
    "others on the node": Plan(0, growth=nothing, others=leak(200 * MIB), limit=-1),
    "a cache that fills up": Plan(0, growth=lambda at: 8 * GIB * (1 - 0.5 ** (at / 25))),
    "loading at the start": Plan(0, growth=leak(500 * MIB, 0, WARMUP_S)),
    "one jump": Plan(0, growth=lambda at: 6 * GIB * (at > 60)),
    "bursts": Plan(0, growth=find_sawtooth),
    "a checkpoint's copy": Plan(
        0,
        growth=lambda at: max(leak(100 * MIB, begin, begin + 45)(at) * (at < begin + 50) for begin in (50, 150)),
        saves=((50, 100), (150, 200)),
    ),
    "slow": Plan(0, growth=leak(MIB / 2)),
}


@pytest.mark.parametrize("name", STEADY_NOT)
def test_unsteady_growth_gives_no_forecast(tmp_path: Path, name: str) -> None:
    write_job(tmp_path, replace(STEADY_NOT[name], seconds=240))
    assert find_all(tmp_path) == ()


def test_a_recording_without_the_columns_says_nothing(tmp_path: Path) -> None:
    write_job(tmp_path, Plan(200, leak(20 * MIB), swap=-1))
    assert find_all(tmp_path) == ()
