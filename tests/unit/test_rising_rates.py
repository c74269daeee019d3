"""A learning rate that rises without bound, which is told; and rates that rise as they should, which are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from small_recording import make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings import Finding
from zerotop.analysis.findings.loops import rising_rates
from zerotop.analysis.findings.support.detection import Detection
from zerotop_probe.recording.tables import BOUNDARY, LOGGED, LOGGED_BITS, OPTIMIZER_RATE, SPANS


def find_rates(folder: Path, rates: Sequence[float]) -> tuple[Finding, ...]:
    """Return the findings about rates that were read after steps 0, 10, 20 and so on."""
    spans = [make_span(step, step + 0.9, "step", step, BOUNDARY) for step in range(10 * len(rates))]
    known = LOGGED_BITS["learning_rate"] | OPTIMIZER_RATE
    logged = [
        make_record(LOGGED, time_ns=int((10 * place + 0.95) * 1e9), known=known, learning_rate=rate)
        for place, rate in enumerate(rates)
    ]
    write_table(folder, SPANS, make_identity(0), *spans).close()
    write_table(folder, LOGGED, make_identity(0), *logged).close()
    recording = read_recording(folder)
    detection = Detection(recording, [rising_rates.detect])
    detection.update()
    return detection.findings_at(recording.end_ns)


def test_a_rate_that_rises_without_bound_is_told_with_its_last_reading(tmp_path: Path) -> None:
    (found,) = find_rates(tmp_path, [0.01, 0.01, 193.4, 6e7, 2e14])
    assert (found.name, found.step) == ("learning_rate_rises", 21)
    assert found.headline == "The learning rate rose from 0.01 to 2e+14 by step 41"
    assert found.details == "It was read as 0.01 before step 21, and as 193 then."


@pytest.mark.parametrize(
    "rates",
    [[1e-7, 1e-4, 0.1, 10.0], [0.0, 0.5, 30.0, 29.0], [500.0, 600.0], [float("nan"), 0.1], [0.01, float("nan"), 0.01]],
    ids=["a search for a rate", "a warm-up for large batches", "high from the begin", "unknown first", "unknown once"],
)
def test_other_rates_are_not_told(tmp_path: Path, rates: list[float]) -> None:
    assert find_rates(tmp_path, rates) == ()
