"""Name a container by the variable or attribute that holds it. Names are recorded, values are not."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any, NamedTuple

from zerotop_probe.inside.stacks.code_positions import Variable, find_additions
from zerotop_probe.inside.stacks.own_lines import OwnPlace
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording.interruptions import is_interruption

LOCAL, GLOBAL, ATTRIBUTE = "local", "global", "attribute"
"""The scopes of a name: a function, a module or a class."""

_LONGEST_NAME = 60


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


def get_attributes(owner: Any) -> dict[str, Any] | None:
    """Return the attributes of an instance or module; None if it has no dict of its own."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except Exception as error:
        if is_interruption(error):
            raise
        return None
    return attributes if type(attributes) is dict else None


def is_good(name: Any) -> bool:
    """Whether a name can be one of a script."""
    return type(name) is str and name.isidentifier() and len(name) <= _LONGEST_NAME
