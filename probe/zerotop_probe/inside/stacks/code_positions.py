"""Find the lines of the job's own code that can have done something, by the names that its bytecode uses.

Nothing is run: the compiled code of the functions on the stack, and of the job's own modules, is searched.
"""

from __future__ import annotations

import dis
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from zerotop_probe.inside.stacks.own_lines import OwnPlace
from zerotop_probe.inside.stacks.paths import PathNames

# Code objects that are searched, and instructions after a function's name that may hold the value that it gets.
_MOST_CODES = 1000
_NEAR = 3
# Instructions of the arguments of a call, at most.
_MOST_ARGUMENTS = 40
_ATTRIBUTES = ("STORE_ATTR", "LOAD_ATTR", "LOAD_METHOD")
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ADDING = frozenset(("append", "appendleft", "extend", "add", "insert", "update", "setdefault"))


class Variable(NamedTuple):
    """What a container is called. ``scope``: local, global or attribute; ``owner``: the function, module or class."""

    name: str
    scope: str
    owner: str
    file: str


class CodePosition(NamedTuple):
    """A use of a name. ``value``: what it is set to or called with; None if that is no constant."""

    place: OwnPlace
    name: str
    value: bool | str | int | None


def find_uses(
    names: Collection[str], frame: FrameType | None, paths: PathNames, kinds: tuple[type, ...] = (bool,)
) -> list[CodePosition]:
    """Return where the job's own code sets an attribute or key of one of these names; ``name()`` is that of a function.

    ``kinds``: the types of constants that tell what it is set to.
    """
    functions = {name[:-2] for name in names if name.endswith("()")}
    return list(_iter_uses({name for name in names if not name.endswith("()")}, functions, frame, paths, kinds))


def find_additions(variable: Variable, frame: FrameType | None, paths: PathNames) -> list[OwnPlace]:
    """Return where the job's own code adds to the list, dict or set in a variable."""
    places, name = [], variable.name
    for code, file in _iter_codes(frame, paths):
        if name not in (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars):
            continue
        kinds = _list_accesses(variable, code, file)
        steps = list(dis.get_instructions(code)) if kinds else []
        for index, step in enumerate(steps[:-1]):
            if step.opname == "STORE_SUBSCR":
                loaded = _find_value_before(steps, index, 1)
                is_addition = loaded is not None and _accesses(loaded, "LOAD_", name, kinds)
            elif step.argrepr == "+=" or step.opname == "INPLACE_ADD":
                is_addition = any(_accesses(one, "STORE_", name, kinds) for one in steps[index + 1 : index + 3])
            else:
                after = steps[index + 1]
                if "SUBSCR" in steps[min(index + 2, len(steps) - 1)].opname:  # a container within it, by a key
                    after = steps[min(index + 3, len(steps) - 1)]
                is_call = after.opname in _ATTRIBUTES and after.argval in _ADDING
                is_addition = is_call and _accesses(step, "LOAD_", name, kinds)
            if is_addition:
                places.append(_make_place(code, file, step.offset))
    return list(dict.fromkeys(places))


def _list_accesses(variable: Variable, code: CodeType, file: str) -> tuple[str, ...]:
    """Return the ends of the names of instructions that mean this variable in some code; none where another one is meant."""
    name, scope, owner = variable.name, variable.scope, variable.owner
    if scope == "attribute":
        return ("ATTR", "METHOD")
    if scope == "global":
        return ("ATTR", "METHOD", "GLOBAL", "NAME") if file == variable.file else ("ATTR", "METHOD")
    title = getattr(code, "co_qualname", "")  # from Python 3.11 on
    if name in code.co_freevars:
        is_meant = not title or title.startswith(f"{owner}.<locals>.")
    else:
        is_meant = title == owner if title else code.co_name == owner.rpartition(".")[2]
    return ("FAST", "DEREF", "CHECK", "BORROW", "CLOSURE", "FAST_LOAD_FAST") if is_meant and file == variable.file else ()


def _accesses(step: Any, kind: str, name: str, ends: tuple[str, ...]) -> bool:
    """Whether an instruction loads, or stores, a variable of this name, as its last value."""
    is_kind = step.opname.startswith(kind) and step.opname.endswith(ends)
    return is_kind and (step.argval == name or (isinstance(step.argval, tuple) and name in step.argval[-1:]))


def _find_value_before(steps: list[Any], index: int, count: int) -> Any | None:
    """Return the instruction that pushed the value below ``count`` others; None if the code branches in between."""
    while count > 0:
        index -= 1
        if index < 1 or steps[index].opcode in _JUMPS:
            return None
        count -= dis.stack_effect(steps[index].opcode, steps[index].arg)
    return steps[index - 1] if count == 0 else None


def find_calls_without(function: str, argument: str, frame: FrameType | None, paths: PathNames) -> list[OwnPlace]:
    """Return where the job's own code calls ``torch.FUNCTION`` without a keyword argument of this name."""
    places = []
    for code, file in _iter_codes(frame, paths):
        steps = list(dis.get_instructions(code))
        for index, step in enumerate(steps[1:], 1):
            if step.opname in _ATTRIBUTES[1:] and step.argval == function and steps[index - 1].argval == "torch":
                after = steps[index : index + _MOST_ARGUMENTS]
                if not any(argument in _list_names(code, one) for one in after):
                    places.append(_make_place(code, file, step.offset))
    return list(dict.fromkeys(places))


def _list_names(code: CodeType, step: Any) -> tuple[Any, ...]:
    """Return the names of keyword arguments that an instruction sets; Python 3.11 does not resolve them."""
    names = code.co_consts[step.arg] if step.opname == "KW_NAMES" else step.argval
    return names if isinstance(names, tuple) else ()


def choose_place(positions: Collection[CodePosition], value: bool | str | int | None = None) -> OwnPlace | None:
    """Return the line of the only position that fits ``value``; None if there is none, or if several fit."""
    fitting = {one.place for one in positions if value is None or one.value in (None, value)}
    return next(iter(fitting)) if len(fitting) == 1 else None


def _iter_uses(
    stored: Collection[str],
    called: Collection[str],
    frame: FrameType | None,
    paths: PathNames,
    kinds: tuple[type, ...],
) -> Iterator[CodePosition]:
    for code, file in _iter_codes(frame, paths):
        if not {*stored, *called} & {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}:
            continue
        steps = list(dis.get_instructions(code))
        for index, step in enumerate(steps):
            name, value = str(step.argval), None
            if step.opname == "STORE_ATTR" and name in stored:
                pushed = _find_value_before(steps, index, 1)  # below the object
            elif step.opname == "STORE_SUBSCR" and index and steps[index - 1].argval in stored:
                name, pushed = str(steps[index - 1].argval), _find_value_before(steps, index, 2)
            elif step.opname in _LOADS and name in called:
                pushed, value = None, _find_argument(steps[index + 1 : index + 1 + _NEAR], kinds)
            else:
                continue
            if pushed is not None and _is_constant(pushed, kinds):
                value = pushed.argval
            yield CodePosition(_make_place(code, file, step.offset), name, value)


def _find_argument(near: list[Any], kinds: tuple[type, ...]) -> Any:
    """Return the constant that is passed; a call without arguments passes True."""
    for step in near:
        if _is_constant(step, kinds):
            return step.argval
        if step.opname.startswith(("CALL", "PRECALL")):
            return True if not step.arg else None
    return None


def _is_constant(step: Any, kinds: tuple[type, ...]) -> bool:
    return type(step.argval) in kinds and step.opname in ("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST")


def _make_place(code: CodeType, file: str, offset: int) -> OwnPlace:
    starts = [(begin, line) for begin, line in dis.findlinestarts(code) if line is not None]
    index = bisect_right([begin for begin, _ in starts], offset) - 1
    line = starts[index][1] if index >= 0 else code.co_firstlineno
    return OwnPlace(file, line, getattr(code, "co_qualname", code.co_name))


def _iter_codes(frame: FrameType | None, paths: PathNames) -> Iterator[tuple[CodeType, str]]:
    """Yield the job's own code and the name of its file: that of the stack, and that of its modules' functions."""
    waiting: list[CodeType] = []
    while frame is not None:
        waiting.append(frame.f_code)
        frame = frame.f_back
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        file = paths.name_file(path) if isinstance(path, str) else None
        if file is not None and file.is_own:
            waiting += _list_functions(vars(module), set())
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_CODES:
        code = waiting.pop(0)
        if id(code) in seen:
            continue
        seen.add(id(code))
        file = paths.name_file(code.co_filename)
        if file is not None and file.is_own:
            waiting[:0] = [one for one in code.co_consts if isinstance(one, CodeType)]
            yield code, file.text


def _list_functions(names: Any, seen: set[int]) -> list[CodeType]:
    codes: list[CodeType] = []
    for value in list(names.values()):
        value = getattr(value, "__func__", None) if isinstance(value, (staticmethod, classmethod)) else value
        value = value.fget if isinstance(value, property) else value
        if isinstance(value, FunctionType):
            codes.append(value.__code__)
            inner = vars(value).get("__wrapped__")
            codes += [inner.__code__] if isinstance(inner, FunctionType) else []
        elif isinstance(value, type) and id(value) not in seen and len(seen) < _MOST_CODES:
            seen.add(id(value))
            codes += _list_functions(vars(value), seen)
    return codes
