"""Plain-text tables, sizes and the description of an engine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zerotop.analysis.engine import EngineSummary, add_stages, parse_engine
from zerotop.analysis.failures.oom_evidence import describe_batch
from zerotop.analysis.formatting import GIB, KIB, MIB, format_bytes, format_count, format_gib
from zerotop.analysis.text_tables import align_columns, format_tsv
from zerotop_probe.recording.events import EngineFacts, PipelineStage


def test_columns_are_aligned_without_trailing_spaces() -> None:
    rows = [("name", "GiB", "source"), ("a", "10.000", ""), ("longer", "1.000", "NVML")]
    assert align_columns(rows, "<><") == ["name       GiB  source", "a       10.000", "longer   1.000  NVML"]
    assert align_columns([], "<>") == []


def test_tsv_has_empty_cells_for_missing_values() -> None:
    assert format_tsv([("step", "s"), (1, 0.123456789), (None, math.nan)]) == "step\ts\n1\t0.123457\n\t"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.0 MiB"),
        (37 * KIB, "37 KiB"),
        (40.2 * MIB, "40.2 MiB"),
        (1.25 * GIB, "1.25 GiB"),
        (140 * GIB, "140 GiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_sizes_are_formatted_in_binary_units(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_sizes_in_columns() -> None:
    assert (format_gib(GIB), format_gib(GIB // 2, sign=True)) == ("1.000", "+0.500")


def test_one_of_a_kind_is_in_the_singular() -> None:
    counts = [format_count(1, noun) for noun in ("retry", "process", "log record")]
    assert counts == ["1 retry", "1 process", "1 log record"]
    counts = [format_count(2, noun) for noun in ("retry", "flush", "key")]
    assert counts == ["2 retries", "2 flushes", "2 keys"]
    assert (describe_batch(1, None), describe_batch(2, None), describe_batch(1, 512)) == (
        "1 row",
        "2 rows",
        "1 x 512 tokens",
    )


def test_pipeline_texts() -> None:
    stage: dict[str, Any] = {"stages": 2, "parameters": 1_000_000, "trainable_parameters": 900_000}
    facts: dict[str, Any] = {
        "zero_stage": 1,
        "micro_batch": 4,
        "gradient_accumulation": 4,
        "train_batch": 32,
        "world_size": 4,
    }
    facts |= {"pipeline": {"stage": 1, **stage}, "model": "Net"}
    whole = add_stages([PipelineStage({"stage": number, **stage}) for number in (0, 1, 0)])
    assert whole == {"parameters": 2_000_000, "trainable_parameters": 1_800_000}
    assert add_stages([PipelineStage({"stage": 0, **stage}), None]) == {}  # the other stage has not reported yet
    engine = EngineSummary(**parse_engine(EngineFacts(facts | whole)))
    assert engine.describe_engine() == (
        "Net, 2.0 M parameters (1.8 M trained), 2 stages, ZeRO-1, "
        "batch 4 x 4 x 2 (micro-batch x accumulation x data-parallel groups)"
    )


def test_an_engine_is_described_by_what_is_known_of_it() -> None:
    assert EngineSummary().describe_engine() == "no training was recorded"
    facts = {"model": "Tiny", "zero_stage": 3, "offload_parameters": "nvme", "dtype": "fp16", "world_size": 8}
    assert (
        EngineSummary(**parse_engine(EngineFacts(facts))).describe_engine()
        == "Tiny, ZeRO-3, parameters on NVMe, fp16, 8 ranks"
    )
    facts |= {"parameters": 8_030_000_000, "micro_batch": 2, "gradient_accumulation": 4}
    assert EngineSummary(**parse_engine(EngineFacts(facts))).describe_engine() == (
        "Tiny, 8,030.0 M parameters, ZeRO-3, parameters on NVMe, fp16, batch 2 x 4 x 8 (micro-batch x accumulation x ranks)"
    )
