"""Name a container by the variable or attribute that holds it. Names are recorded, values are not."""

from __future__ import annotations

import gc
import inspect
import sys
from itertools import islice
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from zerotop_probe.inside.stacks.code_positions import Variable, find_additions
from zerotop_probe.inside.stacks.own_lines import OwnPlace
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording.interruptions import is_interruption

LOCAL, GLOBAL, ATTRIBUTE = "local", "global", "attribute"
"""The scopes of a name: a function, a module or a class."""

# Nested containers are named by the outermost one, over at most this many levels.
_LEVELS = 3
_LONGEST_NAME = 60
# Objects of a level that are followed further, and dicts whose owner is searched: each search visits all objects.
_MOST_HOLDERS = 4
_MOST_DICTS = 3


class OwnerPlace(NamedTuple):
    """The variable or attribute that holds a container, perhaps within another one."""

    name: str
    scope: str
    owner: str  # function, module or class
    file: str
    own: bool  # the job's own code, neither a library nor Python itself
    levels: int = 0  # 0: it is the value itself; 1: within that value, and so on

    def find_additions(self, frame: FrameType | None, paths: PathNames) -> list[OwnPlace]:
        """Return where the job's own code adds to it."""
        return find_additions(Variable(self.name, self.scope, self.owner, self.file), frame, paths)


def find_place(container: Any, innermost: FrameType | None, paths: PathNames) -> OwnerPlace | None:
    """Return the owner of a container; None if it is unknown. ``innermost``: the frame of the thread that trains."""
    values: list[Any] = [container]
    for level in range(_LEVELS):
        for value in values:
            place = _find_variable(value, innermost, paths) or _find_attribute(value, paths)
            if place is not None:
                return place._replace(levels=level)
        around = (one for value in values for one in _list_referrers(value) if _is_container(one) and one is not values)
        values = list(islice(around, _MOST_HOLDERS))
    return None


def _find_variable(value: Any, innermost: FrameType | None, paths: PathNames) -> OwnerPlace | None:
    """Look for a local variable of the job's own functions."""
    frame = innermost
    while frame is not None:
        code = frame.f_code
        file = paths.name_frame(frame)
        if file is not None and file.is_own and code.co_flags & inspect.CO_OPTIMIZED:
            for name in [name for name, one in list_variables(frame) if one is value and is_good(name)]:
                return OwnerPlace(name, LOCAL, getattr(code, "co_qualname", code.co_name), file.text, own=True)
        frame = frame.f_back
    return None


def list_variables(frame: FrameType) -> list[tuple[str, Any]]:
    """Return the variables of a function, or of a module, by name; none while a debugger runs."""
    if sys.gettrace() is not None:  # debuggers write local variables back
        return []
    variables = frame.f_locals
    found = list(variables.items())
    # Before Python 3.13 a function's are a copy that the frame keeps, and with it the values, until the function ends.
    is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13)
    if is_copy and sys.getrefcount(variables) <= 3:
        variables.clear()
    return found


def _find_attribute(value: Any, paths: PathNames) -> OwnerPlace | None:
    """Look for a module, class or instance that has the value as an attribute."""
    dicts = 0
    for holder in _list_referrers(value):
        owners = [holder]
        if type(holder) is dict and (dicts := dicts + 1) <= _MOST_DICTS:
            owners = [one for one in _list_referrers(holder) if get_attributes(one) is holder]
        for owner in owners:
            place = _name_attribute(owner, value, paths)
            if place is not None:
                return place
    return None


def _name_attribute(owner: Any, value: Any, paths: PathNames) -> OwnerPlace | None:
    attributes = get_attributes(owner) or {}
    name = next((name for name, one in attributes.items() if one is value), "")
    is_module = type(owner) is ModuleType
    module = owner if is_module else sys.modules.get(str(type(owner).__module__))
    path = getattr(module, "__file__", None)
    if path is None and getattr(module, "__name__", "") == "__main__":
        path = paths.unnamed or None
    file = paths.name_file(path) if isinstance(path, str) else None
    if not is_good(name) or (isinstance(path, str) and file is None):  # the probe's own
        return None
    scope, title = (GLOBAL, owner.__name__) if is_module else (ATTRIBUTE, type(owner).__qualname__)
    return OwnerPlace(name, scope, str(title), file.text if file is not None else "", own=file is not None and file.is_own)


def get_attributes(owner: Any) -> dict[str, Any] | None:
    """Return the attributes of an instance or module; None if it has no dict of its own."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except Exception as error:
        if is_interruption(error):
            raise
        return None
    return attributes if type(attributes) is dict else None


def _list_referrers(value: Any) -> list[Any]:
    return [one for one in gc.get_referrers(value) if not isinstance(one, FrameType)]


def _is_container(value: Any) -> bool:
    kind = type(value)
    return kind is dict or kind is list or kind is tuple


def is_good(name: Any) -> bool:
    """Whether a name can be one of a script."""
    return type(name) is str and name.isidentifier() and len(name) <= _LONGEST_NAME
