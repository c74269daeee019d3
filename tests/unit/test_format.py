"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotop.analysis.formatting import format_parameters
from zerotop.ui.drawing import formatting as form
from zerotop.ui.drawing.units import BINARY, DECIMAL, DEFAULT_UNITS, PaceUnit, Sizes, UnitChoice, set_units

GIB = 1024**3


@pytest.mark.parametrize(
    ("value", "decimals", "width", "text"),
    [
        (21.84, 1, 5, " 21.8"),
        (139.8, 1, 5, "139.8"),
        (1024.5, 1, 5, " 1024"),  # a decimal goes before the width does
        (0.0, 2, 5, " 0.00"),
        (None, 1, 5, "    –"),
        (math.nan, 1, 5, "    –"),
    ],
)
def test_fixed_keeps_its_width(value: float | None, decimals: int, width: int, text: str) -> None:
    assert form.format_fixed(value, decimals, width) == text


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0.00014, "0.14 ms"),
        (0.0344, "34.4 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (2.668, "2.67 s"),
        (-0.0123, "-12.3 ms"),
    ],
)
def test_durations_have_three_digits(duration: float, text: str) -> None:
    assert form.format_duration(duration) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [([2.04, 1.2], "1.2 to 2.0"), ([2.04, 2.0], "2.0"), ([math.nan, 3.0], "3.0"), ([math.nan], "–"), ([], "–")],
)
def test_a_range_leaves_unknown_values_out(values: list[float], text: str) -> None:
    assert form.format_range(values, 1) == text


@given(st.floats(min_value=0, max_value=99999), st.integers(0, 3))
def test_fixed_never_changes_its_width(value: float, decimals: int) -> None:
    assert len(form.format_fixed(value, decimals, 6)) == 6


@pytest.mark.parametrize(
    ("sizes", "size", "text"),
    [
        (BINARY, GIB, "  1.0"),
        (DECIMAL, GIB, "  1.1"),
        (DECIMAL, 80_000_000_000, " 80.0"),
        (BINARY, 80_000_000_000, " 74.5"),
        (DECIMAL, 1000 * GIB, " 1074"),  # a decimal goes before the width does
        (DECIMAL, -GIB, " -1.1"),
        (DECIMAL, 0, "  0.0"),
        (DECIMAL, None, "    –"),
        (BINARY, None, "    –"),
    ],
)
def test_amounts_are_in_the_large_unit_that_was_chosen(sizes: Sizes, size: int | None, text: str) -> None:
    set_units(DEFAULT_UNITS._replace(sizes=sizes))
    assert form.format_giga(size) == text


@pytest.mark.parametrize(
    ("size", "binary", "decimal"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1000 B", "1.00 kB"),
        (1023, "1023 B", "1.02 kB"),
        (807 * 1024, "807 KiB", "826 kB"),
        ((1 << 20) - 1, "1.00 MiB", "1.05 MB"),
        (999_999, "977 KiB", "1.00 MB"),
        (int(1023.4 * 2**20), "1023 MiB", "1.07 GB"),
        (int(1023.9 * 2**20), "1.00 GiB", "1.07 GB"),
        (-5 * GIB, "-5.00 GiB", "-5.37 GB"),
        (16 * 10**9, "14.9 GiB", "16.0 GB"),
        (2**50, "1024 TiB", "1126 TB"),
    ],
)
def test_sizes_have_three_digits_and_their_unit(size: int, binary: str, decimal: str) -> None:
    assert form.format_size(size) == binary
    set_units(DEFAULT_UNITS._replace(sizes=DECIMAL))
    assert form.format_size(size) == decimal


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (823, "823"),
        (999.6, "1.00k"),
        (1490, "1.49k"),
        (63_200_000, "63.2M"),
        (494_032_768, "494M"),
        (8_030_261_248, "8.03B"),
        (1.2e12, "1.20T"),
        (math.nan, "–"),
    ],
)
def test_counts(number: float, text: str) -> None:
    assert form.format_number(number) == text


@pytest.mark.parametrize(
    ("seconds", "as_seconds", "as_rate"),
    [
        (2.75, "2.75 s/it", "0.364 it/s"),
        (13.04, "13.0 s/it", "0.0767 it/s"),
        (45.0, "45.0 s/it", "0.0222 it/s"),
        (1.0, "1.00 s/it", "1.00 it/s"),
        (0.9996, "1.00 s/it", "1.00 it/s"),
        (0.9994, "999 ms/it", "1.00 it/s"),
        (1.0049, "1.00 s/it", "1.00 it/s"),
        (0.25, "250 ms/it", "4.00 it/s"),
        (0.0123, "12.3 ms/it", "81.3 it/s"),
        (0.0, "– s/it", "– it/s"),
        (math.nan, "– s/it", "– it/s"),
    ],
)
def test_the_pace_either_way(seconds: float, as_seconds: str, as_rate: str) -> None:
    assert form.format_pace(seconds) == as_seconds
    set_units(UnitChoice(BINARY, PaceUnit.RATE))
    assert form.format_pace(seconds) == as_rate


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (42.9, "0:42"), (754, "12:34"), (3723, "1:02:03"), (183_840, "2d 03:04"), (-5, "0:00")],
)
def test_clock(seconds: float, text: str) -> None:
    assert form.format_clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45.2, "45 s"), (1620, "27 min"), (11_520, "3.2 h"), (181_440, "2.1 d"), (math.nan, "–")],
)
def test_rough_times_are_written_with_their_unit(seconds: float, text: str) -> None:
    assert form.format_rough_time(seconds) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.0, "0.00 %"), (2.2e-5, "0.002 %"), (0.0031, "0.31 %"), (0.042, "4.2 %"), (0.64, "64 %")],
)
def test_share(part: float, text: str) -> None:
    assert form.format_share(part) == text


def test_time_units() -> None:
    assert form.choose_time_unit(0.3) == ("ms", 1000.0)
    assert form.choose_time_unit(2.75) == ("s", 1.0)
    assert form.choose_time_unit(900) == ("min", 1 / 60)


@pytest.mark.parametrize(
    ("longest", "most", "expected"),
    [
        (2.75, 4, (1.0, 3.0)),
        (0.95, 2, (0.5, 1.0)),
        (320.0, 4, (100.0, 400.0)),
        (7.0, 2, (5.0, 10.0)),
        (0.0, 4, (1.0, 1.0)),
    ],
)
def test_ticks(longest: float, most: int, expected: tuple[float, float]) -> None:
    assert form.choose_ticks(longest, most) == pytest.approx(expected)


@given(st.floats(min_value=1e-6, max_value=1e9), st.integers(2, 6))
def test_ticks_reach_over_the_longest_in_1_2_5_steps(longest: float, most: int) -> None:
    distance, top = form.choose_ticks(longest, most)
    assert top >= longest * (1 - 1e-6)
    assert round(top / distance) <= most
    first_digit = distance / 10.0 ** math.floor(math.log10(distance) + 1e-9)
    assert min(abs(first_digit - digit) for digit in (1, 2, 5, 10)) < 1e-6


@pytest.mark.parametrize(
    ("count", "text"), [(8.03e9, "8,030.0 M"), (1e6, "1.0 M"), (999_999, "999,999"), (43_096, "43,096"), (0, "0")]
)
def test_parameters(count: float, text: str) -> None:
    assert format_parameters(count) == text
