"""The units that a user chose, in sentences that were made without knowing them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotop.analysis import formatting
from zerotop.ui.drawing.units import (
    BINARY,
    DECIMAL,
    DEFAULT_UNITS,
    Pace,
    UnitChoice,
    convert_sizes,
    get_units,
    other_pace,
    other_sizes,
    parse_units,
    set_units,
)


def test_what_was_kept_is_chosen_again_and_nonsense_is_not() -> None:
    for sizes in (BINARY, DECIMAL):
        for pace in Pace:
            assert parse_units(sizes.name, pace.value) == (sizes, pace)
    assert parse_units("", "") == parse_units("furlongs", "/it") == DEFAULT_UNITS == get_units()
    set_units(UnitChoice(DECIMAL, Pace.RATE))
    assert (other_sizes(), other_pace()) == (BINARY, Pace.SECONDS)


@pytest.mark.parametrize(
    ("sentence", "decimal"),
    [
        ("It holds 14.90 GiB of 79.65 GiB.", "It holds 16.00 GB of 85.52 GB."),
        ("elsewhere 1.3 to 2.2 GiB: other libraries", "elsewhere 1.4 to 2.4 GB: other libraries"),
        ("asked 1002.0 MiB (3 %)", "asked 1050.7 MB (3 %)"),
        ("140 GiB, 2.75 s, 12 GB/s", "150 GB, 2.75 s, 12 GB/s"),
        ("Nothing to reword in 24 GiBs.", "Nothing to reword in 24 GiBs."),
        ("", ""),
    ],
)
def test_sizes_in_sentences_are_reworded(sentence: str, decimal: str) -> None:
    assert convert_sizes(sentence) == sentence
    set_units(DEFAULT_UNITS._replace(sizes=DECIMAL))
    assert convert_sizes(sentence) == decimal


@given(st.lists(st.integers(10 * 2**20, 200 * 2**30), min_size=1, max_size=6))
def test_a_size_whose_number_is_known_is_not_rounded_twice(counts: list[int]) -> None:
    set_units(DEFAULT_UNITS._replace(sizes=DECIMAL))
    for count in counts:
        written = formatting.format_bytes(count)
        alike = [each for each in counts if formatting.format_bytes(each) == written]
        unit, size = ("GB", 1e9) if "GiB" in written else ("MB", 1e6)
        decimals = len(written.split()[0].partition(".")[2])
        assert convert_sizes(f"now {written}.", counts) in {f"now {each / size:.{decimals}f} {unit}." for each in alike}
