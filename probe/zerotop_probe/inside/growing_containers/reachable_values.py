"""Follow the job's variables to the values that they lead to, and name each by its variable or attribute.

It begins at the functions that run and at the job's own modules, and visits a limited number of values in a limited time. No
code of the job runs: only built-in containers, attributes of instances and variables of inner functions are looked into.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from gc import get_referents, is_tracked
from inspect import CO_OPTIMIZED
from itertools import islice
from time import thread_time_ns
from types import FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

from zerotop_probe.inside.growing_containers.containers import CACHED
from zerotop_probe.inside.growing_containers.names import (
    ATTRIBUTE,
    GLOBAL,
    LOCAL,
    OwnerPlace,
    get_attributes,
    is_good,
    list_variables,
)
from zerotop_probe.inside.stacks.paths import FileName, PathNames
from zerotop_probe.recording.interruptions import suppress_own

# Values of one search and of one container (the newest), and the processor time for those from functions and from modules
# each (ns).
_MOST_VALUES, _MOST_WITHIN, _MOST_NS = 20_000, 5_000, 20_000_000
_CLOCK_EVERY = 256
_ATOMS = frozenset(map(id, (int, float, complex, bool, str, bytes, type(None), range, slice)))
# Of a long container with no other values at its end, nothing is looked at.
_LOOKED_AT = 8


class Visit(NamedTuple):
    """A value, and the variable or attribute through which it was reached first; ``root`` is that variable's value.

    ``levels``: of containers around it.
    """

    value: Any
    place: OwnerPlace | None
    root: Any
    levels: int = 0


class ReachableValues:
    """One search. The values are kept alive until it is dropped."""

    def __init__(self, frame: FrameType | None, paths: PathNames) -> None:
        """``frame``: the innermost of the thread that trains."""
        self._paths = paths
        self._frame = frame
        self._waiting: deque[Visit] = deque()
        self._seen: dict[int, Any] = {id(self._waiting): self._waiting}
        self._files: dict[int, tuple[Any, FileName | None]] = {}  # of the modules of types, by id() of the type

    def visit(self, leaves: Iterable[type], wanted: Iterable[Any] = ()) -> Iterator[Visit]:
        """Yield the values of these types, once for each way that leads to one, the nearest first; and wanted objects."""
        kinds, ids = {id(kind) for kind in leaves}, {id(one) for one in wanted}
        for roots in (self._iter_frames(), self._iter_modules()):
            self._waiting.clear()
            # Most globals are functions and classes, which rarely lead to anything.
            for name, value, scope, owner, file in sorted(roots, key=_is_code):
                place = OwnerPlace(name, scope, owner, file.text, file.is_own) if file.is_own else None
                self._waiting.append(Visit(value, place, value))
            yield from self._visit_waiting(kinds, ids)

    def _visit_waiting(self, kinds: set[int], wanted: set[int]) -> Iterator[Visit]:
        deadline_ns = thread_time_ns() + _MOST_NS
        for count in range(_MOST_VALUES):
            if not self._waiting or (count % _CLOCK_EVERY == 0 and thread_time_ns() > deadline_ns):
                return
            visit = self._waiting.popleft()
            if id(type(visit.value)) in kinds:
                yield visit
            elif id(visit.value) not in self._seen:
                self._seen[id(visit.value)] = visit.value
                if id(visit.value) in wanted:
                    yield visit
                with suppress_own(RuntimeError):  # another thread changes it
                    self._enter(visit)

    def _enter(self, visit: Visit) -> None:
        value, kind = visit.value, type(visit.value)
        within = _list_within(value, kind)
        if within is not None:
            self._waiting.extend(Visit(one, visit.place, visit.root, visit.levels + 1) for one in within)
        elif kind is FunctionType:
            self._enter_function(value)
        elif kind is MethodType:
            self._waiting += [Visit(one, None, one) for one in (value.__self__, value.__func__)]
        elif kind is partial:
            self._enter_partial(value)
        elif kind is CACHED:
            within = [one for one in get_referents(value) if type(one) is dict]
            self._waiting.extend(Visit(one, visit.place, visit.root, visit.levels + 1) for one in within)
        elif issubclass(kind, type):
            file = self._find_file(value)
            if file is not None and file.is_own:
                self._enter_attributes(value, dict(_read_class(value, "__dict__")), file)
        elif kind is not ModuleType:
            self._enter_instance(value, kind)

    def _enter_partial(self, value: Any) -> None:
        self._waiting.append(Visit(value.func, None, value.func))
        if type(value.func) is FunctionType:
            named = zip(value.func.__code__.co_varnames, value.args)
            self._enter_arguments(value.func, dict(named, **value.keywords))
        else:
            self._waiting += [Visit(one, None, one) for one in (value.args, value.keywords)]

    def _enter_instance(self, value: Any, kind: type) -> None:
        attributes, file = get_attributes(value) or {}, self._find_file(kind)
        is_own = file is not None and file.is_own
        if is_own:
            attributes = {**_read_slots(value, kind), **attributes}
        if attributes:
            self._enter_attributes(kind, attributes, file)
            if is_own:
                self._waiting += [Visit(one, None, one) for one in _read_class(kind, "__mro__")]

    def _enter_attributes(self, owner: type, attributes: dict[str, Any], file: FileName | None) -> None:
        title = _read_class(owner, "__qualname__")
        for name, value in attributes.items():
            if id(type(value)) not in _ATOMS and is_good(name):
                place = OwnerPlace(name, ATTRIBUTE, title, file.text if file else "", bool(file and file.is_own))
                self._waiting.append(Visit(value, place, value))

    def _enter_function(self, function: FunctionType) -> None:
        file = self._paths.name_file(function.__code__.co_filename)
        if file is None:
            return
        owner = function.__qualname__.rpartition(".<locals>")[0] or function.__qualname__
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            with suppress_own(ValueError):  # it is empty
                value = cell.cell_contents
                self._waiting.append(Visit(value, OwnerPlace(name, LOCAL, owner, file.text, file.is_own), value))
        if file.is_own and (function.__defaults__ or function.__kwdefaults__):
            defaults = function.__defaults__ or ()
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            named = zip(names[len(names) - len(defaults) :], defaults)
            self._enter_arguments(function, dict(named, **(function.__kwdefaults__ or {})))

    def _enter_arguments(self, function: FunctionType, arguments: dict[str, Any]) -> None:
        """Look into values that a function keeps for its arguments."""
        file = self._paths.name_file(function.__code__.co_filename)
        for name, value in arguments.items():
            if id(type(value)) not in _ATOMS and file is not None:
                place = OwnerPlace(name, LOCAL, function.__qualname__, file.text, file.is_own)
                self._waiting.append(Visit(value, place, value))

    def _find_file(self, kind: type) -> FileName | None:
        """Return the file of a class's module; None for one of the probe, and if it is unknown."""
        known = self._files.get(id(kind))
        if known is None:
            name = _read_class(kind, "__dict__").get("__module__")
            module = sys.modules.get(name) if type(name) is str else None
            path = getattr(module, "__file__", None)
            path = path if path is not None or name != "__main__" else self._paths.unnamed
            known = self._files[id(kind)] = (kind, self._paths.name_file(path) if isinstance(path, str) else None)
        return known[1]

    def _iter_frames(self) -> Iterator[tuple[str, Any, str, str, FileName]]:
        own_first: list[tuple[bool, int, FrameType, FileName]] = []
        frame = self._frame
        while frame is not None:
            file = self._paths.name_frame(frame)
            if file is not None and frame.f_code.co_flags & CO_OPTIMIZED:
                own_first.append((not file.is_own, len(own_first), frame, file))
            frame = frame.f_back
        for is_foreign, _, frame, file in sorted(own_first):
            owner = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            for name, value in list_variables(frame):
                if is_good(name) and (not is_foreign or name == "self"):
                    yield name, value, LOCAL, owner, file

    def _iter_modules(self) -> Iterator[tuple[str, Any, str, str, FileName]]:
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            path = path if path is not None or getattr(module, "__name__", "") != "__main__" else self._paths.unnamed
            file = self._paths.name_file(path) if isinstance(path, str) and path else None
            if type(module) is ModuleType and file is not None and file.is_own:
                for name, value in list(vars(module).items()):
                    if is_good(name) and not name.startswith("__"):
                        yield name, value, GLOBAL, module.__name__, file


def _is_code(root: tuple[str, Any, str, str, FileName]) -> bool:
    return issubclass(type(root[1]), (type, FunctionType, ModuleType))


def find_places(values: Collection[Any], frame: FrameType | None, paths: PathNames) -> dict[int, OwnerPlace]:
    """Return the variables and attributes that lead to values, as far as they are found, by id() of the value."""
    visits = ReachableValues(frame, paths).visit((), values)
    return {id(one.value): one.place._replace(levels=one.levels) for one in visits if one.place is not None}


def find_untracked_dicts(frame: FrameType | None, paths: PathNames) -> list[Any]:
    """Return the dicts of the job that the collector does not list: those of arrays, strings or numbers alone."""
    visits = ReachableValues(frame, paths).visit((dict,))
    return list({id(one.value): one.value for one in visits if not is_tracked(one.value)}.values())


def _list_within(value: Any, kind: type) -> list[Any] | None:
    """Return the newest values of a built-in container; None if it is none."""
    if issubclass(kind, dict):
        newest = islice(reversed(list(dict.values(value))), _MOST_WITHIN)
    elif issubclass(kind, (list, tuple)):
        base: Any = list if issubclass(kind, list) else tuple
        newest = islice(reversed(list(base.__iter__(value))), _MOST_WITHIN)
    elif kind is deque:
        newest = islice(reversed(value), _MOST_WITHIN)
    elif kind is set or kind is frozenset:
        newest = islice(value, _MOST_WITHIN)
    else:
        return None
    first = list(islice(newest, _LOOKED_AT))
    if len(first) == _LOOKED_AT and all(id(type(one)) in _ATOMS for one in first):
        return []
    return [one for one in (*first, *newest) if id(type(one)) not in _ATOMS]


def _read_slots(value: Any, kind: type) -> dict[str, Any]:
    """Return what an instance keeps in slots."""
    slots = {}
    for base in _read_class(kind, "__mro__"):
        for name, member in _read_class(base, "__dict__").items():
            if type(member) is MemberDescriptorType:
                with suppress_own(AttributeError):  # it is empty
                    slots[name] = member.__get__(value, kind)
    return slots


def _read_class(kind: type, name: str) -> Any:
    """Return an attribute of a class without running its metaclass."""
    return type.__dict__[name].__get__(kind)
