"""Evaluations that need more host memory than training, in small recordings: which of them are told, and how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from in_pieces import find_at_end
from small_recording import S, make_identity, make_record, make_span, write_table
from zerotop.analysis.findings import Finding, Severity
from zerotop.analysis.findings.memory import validation_host_memory
from zerotop_probe.recording.tables import BOUNDARY, EVAL, HOSTS, PROCESSES, SPANS

GIB = 1 << 30
TRAINING, EVALUATION = GIB, 2 * GIB
TRAINING_ROWS = 2
# Steps of a second, and evaluations of two before some of them.
STEPS, EVALUATION_S = 30, 2


def make_forward(begin: float, end: float, step: int, rows: int, flags: int = 0, depth: int = 0) -> tuple[int, ...]:
    """Return a span of a forward of so many rows."""
    span = make_span(begin, end, "forward", step, flags, depth=depth)
    return (*span[:5], rows, *span[6:])


def write_job(
    folder: Path, *, rows: int, kept: bool = False, free: int = 20 * GIB, evaluated: Sequence[int] = (10, 20)
) -> None:
    """Write a rank that evaluates with so many rows in twice the memory of training, and may keep all of it."""
    at, spans, samples, resident = 0.0, [], [], TRAINING
    for step in range(STEPS):
        if step in evaluated:
            spans.append(make_forward(at + 0.1, at + 1.9, step, rows, EVAL, depth=1))
            spans.append(make_span(at, at + EVALUATION_S, "eval", step))
            samples += [(at + tick / 10 + 0.05, EVALUATION) for tick in range(10 * EVALUATION_S)]
            at, resident = at + EVALUATION_S, EVALUATION if kept else resident
        spans.append(make_forward(at, at + 0.5, step, TRAINING_ROWS))
        spans.append(make_span(at + 0.5, at + 1, "step", step, BOUNDARY))
        samples += [(at + tick / 10 + 0.05, resident) for tick in range(10)]
        at += 1
    node = make_identity(-1)
    memory = {"memory_total_bytes": 24 * GIB, "memory_available_bytes": free}
    sizes = [make_record(PROCESSES, time_ns=int(time * S), rss_bytes=size, pid=100, rank=0) for time, size in samples]
    hosts = [make_record(HOSTS, time_ns=int(time * S), **memory) for time, _ in samples]
    write_table(folder, SPANS, make_identity(0), *spans).close()
    write_table(folder, PROCESSES, node, *sizes).close()
    write_table(folder, HOSTS, node, *hosts).close()


def find_peaks(folder: Path) -> tuple[Finding, ...]:
    """Return the findings, the same however many phases are read at a time."""
    found = [find_at_end(folder, [validation_host_memory.detect], piece) for piece in (16384, 7, 1)]
    assert found[1:] == found[:-1]
    return found[0]


def test_a_larger_batch_is_reported_at_once(tmp_path: Path) -> None:
    write_job(tmp_path, rows=16)
    (finding,) = find_peaks(tmp_path)
    assert (finding.step, finding.severity) == (10, Severity.INFO)
    assert str(finding.headline) == "Evaluation raised host memory by 1.00 GiB to 2.00 GiB on rank 0"
    assert "20.00 GiB were free on the node" in finding.details
    assert "1.00 GiB were released" in finding.details
    assert "its micro-batch has 16 rows, training's 2" in finding.details
    assert not finding.advice


def test_where_the_node_is_nearly_full_it_is_a_warning(tmp_path: Path) -> None:
    write_job(tmp_path, rows=16, free=2 * GIB)
    (finding,) = find_peaks(tmp_path)
    assert finding.severity is Severity.WARNING
    assert "training's batch" in finding.advice


def test_other_evaluations_are_reported_from_the_second_on(tmp_path: Path) -> None:
    """The first one may load what it needs."""
    write_job(tmp_path, rows=TRAINING_ROWS)
    assert [finding.step for finding in find_peaks(tmp_path)] == [20]


@pytest.mark.parametrize("kept", [True, False])
def test_data_loaded_once_is_no_peak(tmp_path: Path, kept: bool) -> None:
    write_job(tmp_path, rows=16 if kept else TRAINING_ROWS, kept=kept, evaluated=(10, 20) if kept else (10,))
    assert find_peaks(tmp_path) == ()
