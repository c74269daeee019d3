"""Numbers in sentences and printed tables, and sentences that can be rendered in other units."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_Unit = tuple[str, int]  # name, bytes
ByteUnits = tuple[_Unit, _Unit, _Unit]
BINARY: ByteUnits = (("KiB", KIB), ("MiB", MIB), ("GiB", GIB))
DECIMAL: ByteUnits = (("kB", 10**3), ("MB", 10**6), ("GB", 10**9))


class GivenBytes(int):
    """A size that the user gave: it is printed in the same unit, and so can be found again."""

    text: str


def format_bytes(count: float, units: ByteUnits = BINARY) -> str:
    """Return ``1.25 GiB``, ``40.2 MiB`` or ``37 KiB``; in other units of the same size and with as many decimals."""
    if isinstance(count, GivenBytes):
        return count.text
    size = abs(count)
    place, decimals = (0, 0) if 0 < size < MIB / 10 else (1, 1)
    if size >= GIB / 10:
        place, decimals = 2, 2 if size < 100 * GIB else 0
    name, unit = units[place]
    return f"{count / unit:,.{decimals}f} {name}"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(K|M|G|T)(i?)B?", re.IGNORECASE)


def parse_bytes(text: str) -> GivenBytes:
    """Return a size such as ``2GB``, ``500M`` or ``60 GiB`` in bytes. Raises ValueError with a reason."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        meant = f"; did you mean {text}GB?" if text.strip().isdecimal() and 0 < int(text) < 10_000 else ""
        raise ValueError(f"{text} is not a size such as 500MB or 2GB{meant}")
    base, prefix, infix = 1024 if match[3] else 1000, match[2].upper(), match[3].lower()
    size = GivenBytes(float(match[1]) * base ** ("KMGT".index(prefix) + 1))
    size.text = f"{match[1]} {prefix if infix or prefix != 'K' else 'k'}{infix}B"
    return size


def format_gib(count: float, *, sign: bool = False) -> str:
    """Return GiB with three decimals and no unit, for columns of sizes."""
    return f"{count / GIB:{'+' if sign else ''}.3f}"


def format_seconds(duration: float) -> str:
    """Return ``2.67 s``, ``12 s``, ``34 ms``, ``3.4 ms`` or ``0.34 ms``."""
    if duration >= 1:
        return f"{duration:.2f} s" if duration < 10 else f"{duration:,.0f} s"
    milliseconds = max(0.0, duration * 1e3)
    decimals = 0 if milliseconds >= 9.95 or milliseconds == 0 else 1 if milliseconds >= 0.995 else 2
    return f"{milliseconds:.{decimals}f} ms"


def format_long_time(seconds: float) -> str:
    """Return ``42 s``, ``3 min 20 s``, ``2 h 05 min`` or ``3 d 4 h``."""
    whole = round(max(0.0, seconds))
    if whole < 100:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hours} h {minute:02} min" if hours else f"{minutes} min {second:02} s"


def format_percent(share: float, decimals: int = 0) -> str:
    """Return a share from 0 to 1 as ``67 %``."""
    return f"{share * 100:.{decimals}f} %"


def format_parameters(count: float) -> str:
    """Return a number of parameters: ``8,030.0 M``, or each of fewer than a million: ``43,096``."""
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,.0f}"


def format_count(count: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{count} {pluralize(count, noun)}"


def join_words(words: Sequence[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``; "" for none."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def pluralize(count: int, noun: str) -> str:
    """Return the noun in the number that fits the count: ``rank``, ``ranks``, ``batches``, ``flushes``, ``retries``."""
    if count == 1:
        return noun
    return f"{noun[:-1]}ies" if noun.endswith("ry") else noun + ("es" if noun.endswith(("s", "sh", "tch")) else "s")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0 and 1``, ``ranks 0 to 3`` or ``ranks 0, 2, 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == 2:
        return f"ranks {ranks[0]} and {ranks[1]}"
    if all(late - early == 1 for early, late in pairwise(ranks)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks)


class Text(str):
    """A sentence with sizes in GiB, and its template and values, to render it again in other units.

    A placeholder is ``{name}`` or ``{name:format}``; a number may replace the name. Formats: ``bytes``, ``size`` (bytes,
    always two decimals in GiB), ``seconds``, ``percent`` (of a share), ``change`` (the same with a sign), ``ranks`` and
    ``Ranks`` (for the start of a sentence), ``count NOUN``, and Python's. A part in brackets is left out if one of its
    values is None or missing; parts can be nested.
    """

    __slots__ = ("template", "values")
    template: str
    values: Mapping[str, Any]

    def __new__(cls, template: str, values: Mapping[str, Any] | None = None) -> Text:
        """Render the template. Raises KeyError if a value outside of all brackets is missing."""
        text = super().__new__(cls, _render(template, values or {}, BINARY))
        text.template, text.values = template, values or {}
        return text

    def __getnewargs__(self) -> tuple[str, Mapping[str, Any]]:  # type: ignore[override]
        return self.template, self.values

    def render(self, units: ByteUnits) -> str:
        """Return the sentence with its sizes in ``units``."""
        return _render(self.template, self.values, units)


_TOKEN = re.compile(r"([\[\]])|\{(-?\w+)(?::([^{}]*))?\}")


def _render(template: str, values: Mapping[str, Any], units: ByteUnits) -> str:
    parts: list[str | None] = [""]  # the text of each bracket that is open; None where a value is missing
    end = 0
    for match in _TOKEN.finditer(template):
        bracket, name, style = match.groups()
        _append(parts, template[end : match.start()])
        end = match.end()
        if bracket == "[":
            parts.append("")
        elif bracket == "]":
            _append(parts, parts.pop() or "")
        elif (value := int(name) if name.lstrip("-").isdecimal() else values.get(name)) is not None:
            _append(parts, _format_value(value, style or "", units))
        elif len(parts) > 1:
            parts[-1] = None
        else:
            raise KeyError(name)
    return f"{parts[0]}{template[end:]}"


def _append(parts: list[str | None], text: str) -> None:
    if parts[-1] is not None:
        parts[-1] += text


def _format_value(value: Any, style: str, units: ByteUnits) -> str:
    if isinstance(value, Text):
        return value.render(units)
    if style == "bytes":
        return format_bytes(value, units)
    if style == "size":
        _, (mega, mega_bytes), (giga, giga_bytes) = units
        return f"{value / giga_bytes:.2f} {giga}" if value >= GIB / 8 else f"{value / mega_bytes:.1f} {mega}"
    if style.startswith("count "):
        return format_count(int(value), style.removeprefix("count "))
    return _STYLES[style](value) if style in _STYLES else format(value, style)


_STYLES: dict[str, Callable[[Any], str]] = {
    "seconds": format_seconds,
    "percent": format_percent,
    "change": lambda share: f"{'+' if share > 0 else '-'}{format_percent(abs(share))}",
    "ranks": format_ranks,
    "Ranks": lambda ranks: format_ranks(ranks).capitalize(),
}
