"""Registers, instructions and calling convention of x86-64.

The vector registers are neither read nor written: their layout differs between processors, which breaks other tools.
"""

from __future__ import annotations

import ctypes
import struct

from zerotop_probe.outside.attaching.ptrace.arch import MAP_KIND, MAP_RIGHTS, Machine, Registers

_MMAP = 9
_DIRECTION = 0x400  # a flag that functions expect to be clear
_NO_CALL = -1  # in orig_rax: do not restart a system call
_NAMES = """
    r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs
"""


class _Registers(Registers):
    """``struct user_regs_struct``."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in _NAMES.split())


class X8664(Machine):
    name = "x86_64"
    register_type = _Registers
    syscall_code = b"\x0f\x05"
    alignment = 1
    breakpoint_code = b"\xcc"

    def prepare_mapping(self, before: Registers, *, at: int, size: int) -> Registers:
        return before.with_values(
            rip=at, orig_rax=_NO_CALL, rax=_MMAP, rdi=0, rsi=size, rdx=MAP_RIGHTS, r10=MAP_KIND, r8=-1, r9=0
        )

    def prepare_call(self, before: Registers, function: int, argument: int, *, stack: int, back: int) -> Registers:
        top, flags = stack - len(self.build_frame(back)), before.eflags & ~_DIRECTION
        return before.with_values(rip=function, orig_rax=_NO_CALL, rax=0, rdi=argument, rsi=0, rbp=0, rsp=top, eflags=flags)

    def build_frame(self, back: int) -> bytes:
        return struct.pack("<Q", back)

    def read_position(self, registers: Registers) -> int:
        return int(registers.rip)

    def read_breakpoint(self, registers: Registers) -> int:
        return int(registers.rip) - len(self.breakpoint_code)

    def read_result(self, registers: Registers) -> int:
        return int(registers.rax)

    def build_program(self, address: int, *, state: int, states: tuple[int, int], text: int, run: int) -> bytes:
        first, second = (b"\x48\xc7\x03" + struct.pack("<I", value) for value in states)  # mov qword [rbx], VALUE
        return b"".join(
            (
                b"\x53",  # push rbx
                b"\x48\xbb" + struct.pack("<Q", state),  # mov rbx, STATE
                first,
                b"\x48\xbf" + struct.pack("<Q", text),  # mov rdi, TEXT
                b"\x48\xb8" + struct.pack("<Q", run),  # mov rax, RUN
                b"\xff\xd0",  # call rax
                second,
                b"\x31\xc0\x5b\xc3",  # xor eax, eax / pop rbx / ret
            )
        )
