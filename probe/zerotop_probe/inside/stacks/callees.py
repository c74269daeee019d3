"""Find the name of the function that an instruction calls: functions written in C have no frame of their own."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
# Instructions whose argument is twice the number of a name, and a flag.
_SHIFTED = {"LOAD_GLOBAL"} if sys.version_info >= (3, 11) else set()
_SHIFTED |= {"LOAD_ATTR"} if sys.version_info >= (3, 12) else set()
# They call __enter__, which has a frame unless it is C code, as that of a lock is.
_WITH = ("BEFORE_WITH", "SETUP_WITH")
# Bytes of code before the call that are read: arguments that take more are rare.
_WINDOW = 400


class _Instruction(NamedTuple):
    opcode: int
    name: str
    argument: int


def find_callee(code: CodeType, offset: int, names: Mapping[str, Any]) -> str:
    """Return the name of the function called at an instruction, such as ``time.sleep``; of a method only its last part.

    ``names`` are the global names of the code. Empty if the instruction calls nothing, or in an unusual way.
    """
    before = _decode(code.co_code[max(0, offset - _WINDOW) : offset + 2]) if offset >= 0 else []
    if before and before[-1].name in _WITH:
        return "__enter__"
    if not before or not (before[-1].name.startswith("CALL") or before[-1].name == "PRECALL"):
        return ""
    call = before.pop()
    if before and before[-1].name == "PRECALL":
        before.pop()
    count = call.argument
    if call.name == "CALL_FUNCTION_EX":
        count = 1 + (count & 1)
    elif call.name in ("CALL_KW", "CALL_FUNCTION_KW"):
        count += 1
    return _name_value(before, code, names) if _skip_values(before, count) else ""


def _decode(code: bytes) -> list[_Instruction]:
    found: list[_Instruction] = []
    high = 0
    for at in range(0, len(code), 2):
        name = dis.opname[code[at]]
        argument = code[at + 1] | high
        high = argument << 8 if name == "EXTENDED_ARG" else 0
        if name not in ("CACHE", "EXTENDED_ARG"):
            found.append(_Instruction(code[at], name, argument))
    return found


def _skip_values(before: list[_Instruction], count: int) -> bool:
    """Remove the instructions that have pushed the last ``count`` values; return whether that was possible."""
    while count > 0:
        if not before or before[-1].opcode in _JUMPS:
            return False
        last = before.pop()
        count -= dis.stack_effect(last.opcode, last.argument if last.opcode >= dis.HAVE_ARGUMENT else None)
    return count == 0


def _name_value(before: list[_Instruction], code: CodeType, names: Mapping[str, Any]) -> str:
    """Return the name of the function that the last instruction pushed onto the stack."""
    parts: list[str] = []
    for one in reversed(before):
        if one.name in _GLOBALS or one.name in _ATTRIBUTES:
            name = code.co_names[one.argument >> (one.name in _SHIFTED)]
            if one.name in _GLOBALS:
                return _resolve(name, parts, names)
            parts.insert(0, name)
        elif one.name not in ("PUSH_NULL", "KW_NAMES") or parts:
            break
    return parts[-1] if parts else ""


def _resolve(root: str, parts: list[str], names: Mapping[str, Any]) -> str:
    """Return the full name of a function that is reached through modules and classes; runs no code of theirs."""
    found: Any = names.get(root, vars(builtins).get(root))
    if isinstance(found, ModuleType) and parts:
        return ".".join([found.__name__, *parts])
    for part in parts:
        if not isinstance(found, (ModuleType, type)):
            return parts[-1]
        found = vars(found).get(part)
    known = (getattr(found, "__module__", None), getattr(found, "__qualname__", None))
    module, name = known if isinstance(found, (type, BuiltinFunctionType, FunctionType)) else (None, None)
    if not isinstance(name, str):
        return ".".join([root, *parts])
    return name if not isinstance(module, str) or module == "builtins" else f"{module}.{name}"
