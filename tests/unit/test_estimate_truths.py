"""Estimates against measured runs: what the benchmark's tables say stays true."""

from __future__ import annotations

import importlib
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def truths(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("estimate_truths")


def read_graded_rows() -> list[dict[str, Any]]:
    lines = (BENCHMARKS / "estimate_truths.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["graded"]]


def test_every_graded_row_is_expressed(truths: Any) -> None:
    assert [row["id"] for row in read_graded_rows() if isinstance(truths.express(row), str)] == []


@pytest.mark.parametrize(("figure", "most"), [("allocated", 0.02), ("reserved", 0.05), ("NVML", 0.05), ("host", 0.03)])
@pytest.mark.parametrize("is_held_out", [False, True])
def test_median_errors_with_all_settings_given_are_small(truths: Any, figure: str, most: float, is_held_out: bool) -> None:
    errors = [
        abs(part.likely / measured - 1)
        for row in read_graded_rows()
        if row["quality"] == "exact" and truths.is_held_out(row) == is_held_out
        for name, part, measured in truths.list_figures(row, truths.estimate_row(row))
        if name == figure
    ]
    assert len(errors) >= 10
    assert statistics.median(errors) <= most


def test_no_exact_row_fits_falsely(truths: Any) -> None:
    failed = [
        row
        for row in read_graded_rows()
        if row["measured"].get("oom") and row["quality"] == "exact" and row.get("gpu_memory")
    ]
    assert failed
    assert [row["id"] for row in failed if truths.estimate_row(row).needed < row["gpu_memory"]] == []
