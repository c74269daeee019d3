"""Find the name of the function that an instruction calls: functions written in C have no frame of their own."""

from __future__ import annotations

import builtins
import dis
from collections.abc import Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
# Instructions of longer functions are not decoded, which would take milliseconds.
_MOST_BYTES = 40_000


def find_callee(code: CodeType, offset: int, names: Mapping[str, Any]) -> str:
    """Return the name of the function called at an instruction, such as ``time.sleep``; of a method only its last part.

    ``names`` are the global names of the code. Empty if the instruction calls nothing, or in an unusual way.
    """
    if offset < 0 or len(code.co_code) > _MOST_BYTES:
        return ""
    before = [one for one in dis.get_instructions(code) if one.offset <= offset]
    if not before or not (before[-1].opname.startswith("CALL") or before[-1].opname == "PRECALL"):
        return ""
    call = before.pop()
    if before and before[-1].opname == "PRECALL":
        before.pop()
    arguments = call.arg or 0
    if call.opname == "CALL_FUNCTION_EX":
        arguments = 1 + (arguments & 1)
    elif call.opname in ("CALL_KW", "CALL_FUNCTION_KW"):
        arguments += 1
    if not _skip_values(before, arguments):
        return ""
    return _name_value(before, names)


def _skip_values(before: list[dis.Instruction], count: int) -> bool:
    """Remove the instructions that have pushed the last ``count`` values; return whether that was possible."""
    while count > 0:
        if not before or before[-1].opcode in dis.hasjrel or before[-1].opcode in dis.hasjabs:
            return False
        last = before.pop()
        count -= dis.stack_effect(last.opcode, last.arg if last.opcode >= dis.HAVE_ARGUMENT else None)
    return count == 0


def _name_value(before: list[dis.Instruction], names: Mapping[str, Any]) -> str:
    """Return the name of the function that the last instruction has pushed."""
    parts: list[str] = []
    for one in reversed(before):
        if one.opname in _ATTRIBUTES:
            parts.insert(0, str(one.argval))
        elif one.opname in _GLOBALS:
            return _resolve(str(one.argval), parts, names)
        elif one.opname != "PUSH_NULL" and not (one.opname == "KW_NAMES" and not parts):
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
