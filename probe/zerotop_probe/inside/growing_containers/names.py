"""Name a container by the variable or attribute that holds it. Names are recorded, values are not."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from zerotop_probe.inside.stacks.paths import PathNames

LOCAL, GLOBAL, ATTRIBUTE = "local", "global", "attribute"
"""Where a name belongs: to a function, a module or a class."""

# Containers within containers are named by the outermost one, over so many levels.
_LEVELS = 3
_LONGEST_NAME = 60
# Objects of a level that are followed further, and dicts of which the owner is searched: each search visits all objects.
_MOST_HOLDERS = 4
_MOST_DICTS = 3


class Place(NamedTuple):
    """The variable or attribute that holds a container, perhaps within another one."""

    name: str
    scope: str
    owner: str  # function, module or class
    file: str
    own: bool  # the job's own code, neither a library nor Python itself
    levels: int  # 0: it is the value itself; 1: within that value, and so on


def find_place(container: Any, innermost: FrameType | None, paths: PathNames) -> Place | None:
    """Return what holds a container; None if that is unknown. ``innermost``: the frame of the thread that trains."""
    values: list[Any] = [container]
    for level in range(_LEVELS):
        for value in values:
            found = _find_variable(value, innermost, paths) or _find_holder(value, paths)
            if found is not None:
                return Place(*found[:3], *found[3:], levels=level)
        values = [one for value in values for one in _list_referrers(value) if _is_container(one)][:_MOST_HOLDERS]
    return None


_Named = tuple[str, str, str, str, bool]


def _find_variable(value: Any, innermost: FrameType | None, paths: PathNames) -> _Named | None:
    """Look for a local variable of the job's own functions."""
    frame = innermost
    while frame is not None:
        code = frame.f_code
        file = paths.name_file(code.co_filename)
        if file is not None and file.is_own and code.co_flags & inspect.CO_OPTIMIZED:
            for name in _find_names(frame, value):
                return name, LOCAL, getattr(code, "co_qualname", code.co_name), file.text, True
        frame = frame.f_back
    return None


def _find_names(frame: FrameType, value: Any) -> list[str]:
    variables = frame.f_locals
    names = [name for name, one in variables.items() if one is value and _is_good(name)]
    # Before Python 3.13 this is a copy that the frame keeps, and with it the values, until the function ends.
    if sys.version_info < (3, 13) and sys.getrefcount(variables) <= 3:
        variables.clear()
    return names


def _find_holder(value: Any, paths: PathNames) -> _Named | None:
    """Look for a module, class or instance that has the value as an attribute."""
    dicts = 0
    for holder in _list_referrers(value):
        if type(holder) is dict and (dicts := dicts + 1) <= _MOST_DICTS:
            for owner in [one for one in _list_referrers(holder) if _get_attributes(one) is holder]:
                return _name_attribute(owner, holder, value, paths)
        attributes = _get_attributes(holder)
        if attributes is not None:
            return _name_attribute(holder, attributes, value, paths)
    return None


def _name_attribute(owner: Any, attributes: dict[str, Any], value: Any, paths: PathNames) -> _Named | None:
    name = next((name for name, one in attributes.items() if one is value), "")
    if not _is_good(name):
        return None
    module = owner if type(owner) is ModuleType else sys.modules.get(str(type(owner).__module__))
    path = getattr(module, "__file__", None)
    file = paths.name_file(path) if isinstance(path, str) else None
    if isinstance(path, str) and file is None:  # the probe's own
        return None
    scope, title = (GLOBAL, owner.__name__) if type(owner) is ModuleType else (ATTRIBUTE, type(owner).__qualname__)
    return name, scope, str(title), file.text if file is not None else "", file is not None and file.is_own


def _get_attributes(owner: Any) -> dict[str, Any] | None:
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except Exception:
        return None
    return attributes if type(attributes) is dict else None


def _list_referrers(value: Any) -> list[Any]:
    own = {id(frame) for frame in _list_frames()}
    return [one for one in gc.get_referrers(value) if id(one) not in own and not isinstance(one, FrameType)]


def _list_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_container(value: Any) -> bool:
    kind = type(value)
    return kind is dict or kind is list or kind is tuple


def _is_good(name: Any) -> bool:
    return type(name) is str and name.isidentifier() and len(name) <= _LONGEST_NAME
