"""The search for the largest value that fits, on memory that grows along a line beyond a flat part."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zerotop.analysis.sweeps.search import LargestResult, LargestSearch, Line, SearchShortage, describe_fragmentation
from zerotop.commands.fit import _print_results
from zerotop.commands.sweeping.fit_runner import FitRunner

GIB = float(1 << 30)


def run_search(
    search: LargestSearch, largest: int, measure: float | None = None, flat: float = 0.0, base: float = 0.0
) -> int:
    """Returns how many values were tried. ``measure``: bytes for each unit, None if memory is not measured."""
    tried: list[int] = []
    while (value := search.choose_next()) is not None:
        assert value not in tried
        tried.append(value)
        if value <= largest:
            search.note_fitting(value, None if measure is None else max(flat, base + measure * value))
        else:
            search.note_failing(value)
    return len(tried)


SIZES = st.floats(0, 1e6)


@given(
    st.integers(1, 400),
    st.integers(0, 500),
    st.one_of(st.none(), st.builds(Line, SIZES, SIZES)),
    st.one_of(st.none(), st.floats(1, 1e4)),
    st.lists(st.one_of(st.none(), st.builds(SearchShortage, SIZES, SIZES)), min_size=1),
)
@example(295, 146, None, None, [SearchShortage(0.0, 121312.0)])  # each failed run predicts what is known to fit
def test_always_finds_the_largest(
    count: int, largest: int, formula: Line | None, measure: float | None, shortages: list[SearchShortage | None]
) -> None:
    """Whatever the formulas say, and whatever failed runs say."""
    search = LargestSearch(list(range(1, count + 1)), 1e5, formula)
    runs = 0
    while (value := search.choose_next()) is not None:
        runs += 1
        if value <= largest:
            search.note_fitting(value, None if measure is None else measure * value)
        else:
            search.note_failing(value, shortages[runs % len(shortages)])
    assert search.largest_fitting == min(largest, count) - 1
    assert runs <= 3 * math.log2(count + 1) + 5


@pytest.mark.parametrize("error", [0.3, 0.7, 1.0, 1.5, 3.0])
def test_the_line_saves_runs(error: float) -> None:
    """3 MB a unit and 6 GiB below; the first prediction is wrong by a factor."""
    values = list(range(128, 65537, 128))
    limit, slope, base = 78 * GIB, 3e6, 6 * GIB
    largest = int((limit - base) / slope)
    search = LargestSearch(values, limit, Line((limit - base) / largest / error, base))
    assert search.predict_largest() == pytest.approx(largest * error)
    assert run_search(search, largest, slope, 10 * GIB, base) <= 6
    assert values[search.largest_fitting] == largest // 128 * 128


def test_nothing_fits_and_everything_fits() -> None:
    search = LargestSearch([1, 2, 4, 8], 4.0, Line(1.0, 0.0))
    run_search(search, 0)
    assert (search.largest_fitting, search.smallest_failing) == (-1, 0)
    search = LargestSearch([1, 2, 4, 8], 1000.0, Line(1.0, 0.0))
    assert run_search(search, 8) == 1
    assert (search.largest_fitting, search.smallest_failing) == (3, -1)


# Qwen2 0.5 B in ZeRO-3 with 4 rows on an H100: bytes for each token of a row and below, the same by the formulas, and what
# failed runs had and requested, and had in blocks too small.
SLOPE, BASE = 4 * 3_207_400, 7.45 * GIB
LENGTHS = list(range(256, 16385, 256))
LIMIT = 78.65 * GIB  # by NVML, less a GiB for CUDA
ROOM = 77.95 * GIB  # that PyTorch really had
FORMULA = Line(4 * 3_208_000, 7.36 * GIB)
WITHOUT_LOSS = Line(4 * 1_343_360, 7.36 * GIB)  # the rule of thumb, which counts the logits once
RECORDED = {
    14080: SearchShortage(92.30 * GIB, 0.64 * GIB),
    6912: SearchShortage(78.54 * GIB, 0.43 * GIB),
    5120: SearchShortage(68.67 * GIB, 13.85 * GIB),
    4864: SearchShortage(65.61 * GIB, 13.24 * GIB),
}
FRAGMENTED = 13.24 * GIB / 4864  # bytes for each token of a row
LOGITS = 4 * 4 * 151936  # bytes for each token of a row: the requests that fail


def replay_search(formula: Line) -> list[int]:
    """Return the lengths that a search tries; failed runs are those recorded, else as fragmentation made them fail."""
    search = LargestSearch(LENGTHS, LIMIT, formula)
    tried: list[int] = []
    while (length := search.choose_next()) is not None:
        tried.append(length)
        needed, unusable = SLOPE * length + BASE, FRAGMENTED * length
        if needed + unusable <= ROOM:
            search.note_fitting(length, needed)
            continue
        while needed - LOGITS * length + unusable > ROOM:
            needed -= LOGITS * length  # an earlier request failed
        search.note_failing(length, RECORDED.get(length, SearchShortage(needed, unusable)))
    assert search.values[search.largest_fitting] == 4608
    return tried


def test_recorded_runs_without_offload() -> None:
    """The search that was recorded tried 14080, 6912, 3328, 5120, 4096, 4864 and 4608."""
    assert replay_search(FORMULA) == [5888, 4608, 4864]
    assert replay_search(WITHOUT_LOSS)[:2] == [14080, 6912]
    assert len(replay_search(WITHOUT_LOSS)) <= 7


def test_recorded_runs_with_the_optimizer_offloaded() -> None:
    """By the formulas alone, without the series before."""
    search = LargestSearch(LENGTHS, LIMIT, Line(FORMULA.slope, 0.92 * GIB))
    assert search.choose_next() == 6400
    search.note_fitting(6400, 77.56 * GIB)
    assert search.choose_next() == 6656
    search.note_failing(6656, SearchShortage(80.72 * GIB, 0.17 * GIB))
    assert search.is_over


def test_a_failed_run_bounds_the_line_without_formulas() -> None:
    """Half of the memory that a run needed at least is free: half its value is too much already."""
    search = LargestSearch(LENGTHS, 40 * GIB)
    assert search.predict_largest() is None
    search.note_failing(1024, SearchShortage(80 * GIB))
    assert search.predict_largest() == pytest.approx(512)


def test_the_json_has_the_notes_of_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    result = LargestResult({"stage": 3}, 4608, 4864, True, None, None, 3, fragmented_bytes=int(13.24 * GIB))
    sweep = SimpleNamespace(path=Path("fit"), points=())
    runner = cast(FitRunner, SimpleNamespace(results=[result], searched="seq_length", runs=3, sweep=sweep))
    _print_results(runner, argparse.Namespace(json=True))
    assert json.loads(capsys.readouterr().out)["notes"] == describe_fragmentation([result], "seq_length")


def test_fragmentation_is_reported_with_the_option_that_helps() -> None:
    result = LargestResult({"stage": 3}, 4608, 4864, True, None, None, 3, fragmented_bytes=int(13.24 * GIB))
    (sentence,) = describe_fragmentation([result], "seq_length")
    assert "seq-length 4,864 failed with 13.24 GiB" in sentence
    assert "--allocator expandable_segments:True" in sentence
    expandable = LargestResult({"allocator": "expandable_segments:True"}, 1, 2, True, None, None, 3, fragmented_bytes=5)
    fitting = LargestResult({"stage": 3}, 4608, 4864, True, None, None, 3)
    assert describe_fragmentation([expandable, fitting], "seq_length") == []
