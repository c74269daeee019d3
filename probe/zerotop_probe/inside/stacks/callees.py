"""Find the name of the function that an instruction calls: functions written in C have no frame of their own."""

from __future__ import annotations

import builtins
import dis
import sys
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
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
# Instructions at which, or after which, other threads are let in; those before them that may take long; functions that do
# not, and modules with functions that let other threads in themselves.
_INTERRUPTED = ("CALL", "PRECALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "JUMP_ABSOLUTE", "YIELD")
_SLOW = ("BINARY", "INPLACE", "CONTAINS", "COMPARE", "BUILD_STRING", "FORMAT", "LIST_EXTEND", "SET_UPDATE", "DICT", "DELETE")
_QUICK = {"len", "isinstance", "append", "get", "keys", "values", "items", "id", "type", "getattr", "hasattr", "iter"}
_LETTING_IN = ("torch.", "numpy.", "time.", "zlib.", "os.", "posix.")
# Functions among these that first read Python's objects one by one, with the lock.
_READING = {"numpy.array", "numpy.asarray", "numpy.fromiter", "torch.tensor", "torch.as_tensor"}
# Instructions at which a loop begins again, and those after which the next one is not run.
_LETTING = ("RESUME", "YIELD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "FOR_ITER")
_LEAVING = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
# Bytes at the begin of a function.
_BEGIN = 8
# Longer code is not read: that would take too long.
_LONGEST_CODE = 8_000
# A name that is sorted after those of all instructions.
_LAST = "~"


class _Instruction(NamedTuple):
    opcode: int
    name: str
    argument: int


class _Step(NamedTuple):
    offset: int
    opname: str
    target: int  # of a jump, else -1


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


def find_slow_line(code: CodeType, offset: int, names: Mapping[str, Any]) -> int | None:
    """Return the line that took long where another thread was let in late, at the instruction at ``offset``.

    Python lets others in after calls, at the begin of functions and where loops begin again; what came before may have taken
    the time. None if that is in several lines, and at other instructions: they let others in while they run.
    """
    steps = _read_steps(code) if len(code.co_code) <= _LONGEST_CODE else []
    index = bisect_right(steps, (offset, _LAST)) - 1
    if index < 0 or not steps[index].opname.startswith(_INTERRUPTED):
        return None
    own, *slow = _find_lines(code, [offset, *(step.offset for step in _list_slow_before(steps, index, code, names))])
    others = {line for line in slow if line != own}
    if steps[index].opname.startswith(("CALL", "PRECALL")):
        callee = find_callee(code, offset, names)
        if callee.startswith(_LETTING_IN):
            return own if callee in _READING and not others else None
        if not _is_quick(callee):
            return own if "." in callee or callee in vars(builtins) or not others else None
    elif not slow and offset < _BEGIN:
        return None
    lines = set(slow) or {own}
    return lines.pop() if len(lines) == 1 else None


@lru_cache(maxsize=16)
def _read_steps(code: CodeType) -> list[_Step]:
    """Return the instructions of some code; that takes 0.7 ms for each 1,000 bytes."""
    known = dis.get_instructions(code)
    return [_Step(one.offset, one.opname, one.argval if one.opcode in _JUMPS else -1) for one in known]


def _list_slow_before(steps: list[_Step], last: int, code: CodeType, names: Mapping[str, Any]) -> list[_Step]:
    """Return the instructions that may take long since others were let in last, on all ways to one."""
    sources: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        sources.setdefault(step.target, []).append(index)
    slow: list[_Step] = []
    seen, waiting = {last}, [last]
    while waiting:
        index = waiting.pop()
        before = sources.get(steps[index].offset, [])
        if index and steps[index - 1].opname not in _LEAVING:
            before = [*before, index - 1]
        for other in before:
            step = steps[other]
            is_call = step.opname.startswith("CALL") and not _is_quick(find_callee(code, step.offset, names))
            if other in seen or is_call or step.opname.startswith(_LETTING):
                continue
            seen.add(other)
            waiting.append(other)
            if step.opname.startswith(_SLOW):
                slow.append(step)
    return slow


def _find_lines(code: CodeType, offsets: list[int]) -> list[int]:
    starts = [(begin, line) for begin, line in dis.findlinestarts(code) if line is not None]
    begins = [begin for begin, _ in starts]
    return [starts[bisect_right(begins, offset) - 1][1] for offset in offsets]


def _is_quick(callee: str) -> bool:
    return callee.rpartition(".")[2] in _QUICK


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
