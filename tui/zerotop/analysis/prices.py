"""The price per hour of a job's hardware."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_DEFAULT_CURRENCY = "$"
_PRICE = re.compile(r"(?P<before>[^\W\d_]{3} ?|[$€£¥])?(?P<amount>\d+(?:\.\d+)?|\.\d+)(?P<after> ?[^\W\d_]{3}|[€£¥])?")
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class HourlyPrice:
    """The price of one hour of all hardware of a job together, with the currency written as the user wrote it."""

    amount: float
    before: str = _DEFAULT_CURRENCY  # text in front of the amount, such as "$" or "EUR "
    after: str = ""  # or after it, such as " EUR"

    @classmethod
    def parse(cls, text: str) -> HourlyPrice:
        """Parse ``30``, ``$30``, ``28.50€`` or ``30 EUR``. Raises ValueError with a reason."""
        match = _PRICE.fullmatch(text.strip())
        if match is None or (match["before"] and match["after"]):
            raise ValueError(f"{text} is not a price per hour such as 30, $29.50 or 28EUR")
        before, after = match["before"] or "", match["after"] or ""
        if before[-1:].isalpha():
            before += " "
        if after[:1].isalpha():
            after = f" {after}"
        return cls(float(match["amount"]), before or ("" if after else _DEFAULT_CURRENCY), after)

    @property
    def source_text(self) -> str:
        """Return it as :meth:`parse` reads it."""
        return f"{self.before}{self.amount:.12g}{self.after}"

    @property
    def text(self) -> str:
        """Return the price: ``$30.00 an hour``."""
        return f"{self.format_amount(self.amount)} an hour"

    def compute_cost(self, seconds: float) -> float:
        """Return the cost of so much time, in the price's currency."""
        return self.amount * seconds / _HOUR_S

    def format_cost(self, seconds: float) -> str:
        """Return the cost of so much time: ``$12.34``, ``$0.0042`` or ``$1,234``."""
        return self.format_amount(self.compute_cost(seconds))

    def format_amount(self, amount: float) -> str:
        """Return an amount with its currency: two decimals, none from 1,000 on, four below 0.10."""
        decimals = 0 if amount >= 1000 else 2 if amount >= 0.1 or amount == 0 else 4
        return f"{self.before}{amount:,.{decimals}f}{self.after}"


def read_price(info: Mapping[str, Any]) -> HourlyPrice | None:
    """Return the price in a recording file; None without one."""
    with suppress(ValueError):
        if text := info.get("price_per_hour"):
            return HourlyPrice.parse(text)
    return None
