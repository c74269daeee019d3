"""Check the facts of events against :mod:`zerotop_probe.recording.events`, so that readers can rely on their types."""

from __future__ import annotations

import math
import re
from typing import Any

from zerotop.session.headers import MAX_NUMBER
from zerotop_probe.recording.events import EVENTS, Field

_DECIMAL = re.compile("[0-9]{1,18}")
MAX_DEPTH = 50  # of lists and objects inside each other; a configuration has about five


def drop_invalid_facts(name: str, facts: dict[str, Any]) -> bool:
    """Replace wrongly typed facts of an event with None, and return whether there were any.

    Facts and events that are not declared stay as they are. Raise ValueError if a required fact is missing or wrong, or if
    facts are nested too deeply.
    """
    if any(is_deeper(value, MAX_DEPTH) for value in facts.values()):
        raise ValueError(f"{name} is nested too deeply")
    invalid = [field for field in EVENTS.get(name, ()) if not is_valid(facts.get(field.name), field)]
    if any(field.required for field in invalid):
        raise ValueError(f"{name} lacks a required fact")
    facts.update(dict.fromkeys(field.name for field in invalid))
    return bool(invalid)


def is_valid(value: Any, field: Field) -> bool:
    return not field.required if value is None else _has_type(value, field.type)


def _has_type(value: Any, kind: Any) -> bool:
    if isinstance(kind, list):
        return isinstance(value, list) and all(_has_type(item, kind[0]) for item in value)
    if isinstance(kind, tuple):
        return isinstance(value, dict) and all(is_valid(value.get(field.name), field) for field in kind)
    if isinstance(kind, dict):
        return isinstance(value, dict) and _is_mapping(value, *kind.items())
    if kind in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= MAX_NUMBER
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, kind)


def _is_mapping(values: dict[str, Any], types: tuple[type, Any]) -> bool:
    key_type, value_type = types
    valid_keys = key_type is str or all(map(_DECIMAL.fullmatch, values))
    return valid_keys and all(_has_type(value, value_type) for value in values.values())


def is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects are inside each other more than ``limit`` times."""
    if not isinstance(value, (dict, list)):
        return False
    return limit == 0 or any(is_deeper(inner, limit - 1) for inner in (value.values() if isinstance(value, dict) else value))
