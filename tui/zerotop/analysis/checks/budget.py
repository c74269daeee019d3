"""The budget file of ``zerotop check``: its keys, and error messages about invalid ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotop.analysis.findings import load_kinds
from zerotop.analysis.formatting import BINARY, DECIMAL, ByteUnits, format_bytes, parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SEVERITIES = ("error", "warning")
"""Words in ``forbidden`` that stand for all findings of that severity or a worse one."""


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """A size, and as the user wrote it."""

    bytes: int
    text: str

    @property
    def units(self) -> ByteUnits:
        """The units that it is in."""
        return DECIMAL if self.text.upper().endswith("B") and "i" not in self.text else BINARY


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bounds on a recording. None and empty: not bounded."""

    warmup_steps: int = 5  # left out of times
    gpu_memory: SizeLimit | None = None  # that any GPU may have reserved
    host_memory: SizeLimit | None = None  # of RSS that any rank may have
    iteration_seconds: float | None = None  # median
    tokens_per_second: float | None = None  # at least
    steps: int | None = None  # finished steps, at least
    forbidden: tuple[str, ...] = ()  # names of findings, or SEVERITIES
    recording: str | None = None  # the baseline: a path, from the budget's folder, or a name
    slowdown_percent: float = 2.0  # fails if slower by more, and by more than noise explains
    memory_growth_percent: float = 5.0  # fails if the peak of memory is higher by more


class BudgetError(ValueError):
    """A sentence about a budget file that cannot be used."""


def read_budget(path: Path) -> Budget:
    """Read a budget. Raises BudgetError and OSError."""
    try:
        return parse_budget(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise BudgetError(f"{path} is not valid TOML: {error}") from None
    except UnicodeDecodeError:
        raise BudgetError(f"{path} is not a text file in UTF-8") from None
    except ValueError as error:
        raise BudgetError(f"{path}: {error}") from None


def parse_budget(content: Mapping[str, Any]) -> Budget:
    """Check a budget's content. Raises ValueError with a sentence that names the valid keys."""
    values: dict[str, Any] = {}
    for name, value in content.items():
        if name in _SECTIONS and isinstance(value, dict):
            section = _SECTIONS[name]
            for key, item in value.items():
                values[key] = _parse_value(f"{name}.{key}", key, item, section)
        elif name in _SECTIONS:
            raise ValueError(f"{name} is a table: write [{name}] above its keys")
        else:
            values[name] = _parse_value(name, name, value, _TOP)
    return Budget(**values)


def _parse_value(place: str, key: str, value: object, readers: Mapping[str, Callable[[Any], Any]]) -> object:
    if key not in readers:
        known = ", ".join(readers)
        tables = f"; tables: {', '.join(f'[{name}]' for name in _SECTIONS)}" if readers is _TOP else ""
        raise ValueError(f"unknown key {place}. Keys here: {known}{tables}")
    try:
        return readers[key](value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _read_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a number above zero")
    return float(value)


def _read_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _read_size(value: object) -> SizeLimit:
    size = parse_bytes(value) if isinstance(value, str) else round(_read_number(value))
    return SizeLimit(size, value if isinstance(value, str) else format_bytes(size))


def _read_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a text")
    return value


def _read_findings(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("write a list of names of findings")
    known = load_kinds()
    unknown = [name for name in names if name not in known and name not in SEVERITIES]
    if unknown:
        raise ValueError(f"unknown finding {unknown[0]!r}. Choose from: {', '.join((*SEVERITIES, *known))}")
    return tuple(names)


_TOP: dict[str, Callable[[Any], Any]] = {"warmup_steps": _read_count}
_SECTIONS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "limits": {
        "gpu_memory": _read_size,
        "host_memory": _read_size,
        "iteration_seconds": _read_number,
        "tokens_per_second": _read_number,
        "steps": _read_count,
    },
    "findings": {"forbidden": _read_findings},
    "baseline": {"recording": _read_text, "slowdown_percent": _read_number, "memory_growth_percent": _read_number},
}
