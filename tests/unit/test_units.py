"""The chosen units, also in sentences that were rendered in GiB."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotop.analysis import formatting
from zerotop.analysis.formatting import Text
from zerotop.ui.drawing.units import (
    BINARY,
    DECIMAL,
    DEFAULT_UNITS,
    PaceUnit,
    UnitChoice,
    convert_sizes,
    get_units,
    other_pace,
    other_sizes,
    parse_units,
    set_units,
)


def test_saved_units_are_parsed_and_invalid_ones_are_not() -> None:
    for sizes in (BINARY, DECIMAL):
        for pace in PaceUnit:
            assert parse_units(sizes.name, pace.value) == (sizes, pace)
    assert parse_units("", "") == parse_units("furlongs", "/it") == DEFAULT_UNITS == get_units()
    set_units(UnitChoice(DECIMAL, PaceUnit.RATE))
    assert (other_sizes(), other_pace()) == (BINARY, PaceUnit.SECONDS)


@pytest.mark.parametrize(
    ("template", "binary", "decimal"),
    [
        ("It holds {a:bytes} of {b:bytes}.", "It holds 14.90 GiB of 140 GiB.", "It holds 16.00 GB of 150 GB."),
        ("asked {c:size} (3 %)", "asked 0.98 GiB (3 %)", "asked 1.05 GB (3 %)"),
        ("{d:bytes}, 2.75 s, 12 GB/s", "8.0 MiB, 2.75 s, 12 GB/s", "8.4 MB, 2.75 s, 12 GB/s"),
        ("Because {cause}.", "Because 14.90 GiB were used.", "Because 16.00 GB were used."),
    ],
)
def test_sizes_in_sentences_are_converted(template: str, binary: str, decimal: str) -> None:
    values = {"a": 16e9, "b": 150e9, "c": 1002 << 20, "d": 8 << 20, "cause": Text("{16000000000:bytes} were used")}
    sentence = Text(template, values)
    assert sentence == convert_sizes(sentence) == binary
    set_units(DEFAULT_UNITS._replace(sizes=DECIMAL))
    assert convert_sizes(sentence) == decimal
    assert sentence == binary
    assert convert_sizes("Plain text keeps its 24 GiB.") == "Plain text keeps its 24 GiB."


@given(st.integers(10 * 2**20, 200 * 2**30))
def test_a_size_is_rounded_once(count: int) -> None:
    set_units(DEFAULT_UNITS._replace(sizes=DECIMAL))
    binary = formatting.format_bytes(count)
    unit, size = ("GB", 1e9) if "GiB" in binary else ("MB", 1e6)
    decimals = len(binary.split()[0].partition(".")[2])
    assert convert_sizes(Text("now {count:bytes}.", {"count": count})) == f"now {count / size:.{decimals}f} {unit}."
