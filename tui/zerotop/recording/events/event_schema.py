"""Check the facts of events against :mod:`zerotop_probe.recording.events`, so that readers can rely on their types."""

from __future__ import annotations

import math
import re
from typing import Any

from zerotop.recording.headers import MAX_NUMBER
from zerotop_probe.recording.event_base import Facts, read_fields

_DECIMAL = re.compile("[0-9]{1,18}")
_MAX_DEPTH = 50  # of lists and objects inside each other; a configuration has about five


def drop_invalid_facts(declared: type[Facts], facts: dict[str, Any]) -> bool:
    """Replace wrongly typed facts with None, and return whether there were any.

    Facts that are not declared stay as they are. Raise ValueError if a required fact is missing or wrong, or if facts are
    nested too deeply.
    """
    if any(_is_deeper(value, _MAX_DEPTH) for value in facts.values()):
        raise ValueError("an event is nested too deeply")
    invalid = _list_invalid(declared, facts)
    if any(is_required for _, is_required in invalid):
        raise ValueError(f"{declared.__name__} lacks a required fact")
    facts.update(dict.fromkeys(key for key, _ in invalid))
    return bool(invalid)


def _list_invalid(declared: type[Facts], facts: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return the names of missing and wrong facts, and whether each is required."""
    return [
        (key, is_required)
        for key, kind, is_required in read_fields(declared).values()
        if (is_required if (value := facts.get(key)) is None else not _has_kind(value, kind))
    ]


def _has_kind(value: Any, kind: Any) -> bool:
    if kind is str:
        return isinstance(value, str)
    if isinstance(kind, list):
        return isinstance(value, list) and all(_has_kind(item, kind[0]) for item in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and _is_mapping(value, *kind.items())
    if kind in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= MAX_NUMBER
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    if not issubclass(kind, Facts):
        return isinstance(value, kind)
    return isinstance(value, dict) and not _list_invalid(kind, value)


def _is_mapping(values: dict[str, Any], types: tuple[type, Any]) -> bool:
    key_type, value_type = types
    valid_keys = key_type is str or all(map(_DECIMAL.fullmatch, values))
    return valid_keys and all(_has_kind(value, value_type) for value in values.values())


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects are inside each other more than ``limit`` times."""
    if not isinstance(value, (dict, list)):
        return False
    return limit == 0 or any(
        _is_deeper(inner, limit - 1) for inner in (value.values() if isinstance(value, dict) else value)
    )
