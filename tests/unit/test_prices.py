"""Prices per hour: the forms that are understood, and costs as text."""

from __future__ import annotations

import pytest

from zerotop.analysis.prices import HourlyPrice


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("30", "$30.00 an hour"),
        ("$29.5", "$29.50 an hour"),
        ("28.50€", "28.50€ an hour"),
        ("28eur", "28.00 eur an hour"),
        ("CHF 31", "CHF 31.00 an hour"),
        (".5", "$0.50 an hour"),
        ("0", "$0.00 an hour"),
    ],
)
def test_prices_as_people_write_them(text: str, shown: str) -> None:
    assert HourlyPrice.parse(text).text == shown


@pytest.mark.parametrize("text", ["", "free", "-3", "3/h", "$3€", "1e5", "nan", "30 dollars", "3,5"])
def test_other_texts_are_refused_with_the_forms_that_exist(text: str) -> None:
    with pytest.raises(ValueError, match="is not a price per hour such as 30"):
        HourlyPrice.parse(text)


def test_costs_keep_the_digits_that_matter() -> None:
    price = HourlyPrice.parse("30")
    assert [price.format_cost(seconds) for seconds in (0.5, 90, 3600, 48 * 3600)] == ["$0.0042", "$0.75", "$30.00", "$1,440"]
    assert price.compute_cost(7200) == 60
