"""Registers, instructions and calling convention of 64-bit ARM.

A system call, such as our mmap, discards the wide part of the vector registers (SVE), as the kernel documents. Code that
makes system calls does not rely on it, but the code that we interrupt may be using it. So if these registers have changed
they are restored, as a block of bytes without regard to its layout.

The kernel sets up the restart of an interrupted system call before it shows us the registers. Only to resume a sleep does it
later put another number into x8, so that just the remaining time is slept.
"""

from __future__ import annotations

import ctypes
import struct

from zerotop_probe.outside.attaching.ptrace.arch import MAP_KIND, MAP_RIGHTS, Machine, Registers

_MMAP = 222
_VECTORS, _WIDE_VECTORS, _SYSTEM_CALL = 2, 0x405, 0x404  # NT_PRFPREG, NT_ARM_SVE, NT_ARM_SYSTEM_CALL
# In pstate: the last instruction was an indirect branch, so that the next one must be a landing pad (BTI).
_BRANCHED = 3 << 10
_NAMES = (*(f"x{number}" for number in range(31)), "sp", "pc", "pstate")
_LITERAL_OFFSET = 48  # of the address of ``run`` in the program


class _Registers(Registers):
    """``struct user_pt_regs``."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in _NAMES)


class Aarch64(Machine):
    """64-bit ARM, little-endian."""

    name = "aarch64"
    register_type = _Registers
    syscall_code = struct.pack("<I", 0xD4000001)  # svc #0
    alignment = 4
    breakpoint_code = struct.pack("<I", 0xD4200000)  # brk #0
    idle_sets = ((_SYSTEM_CALL, struct.pack("<i", -1)),)
    preserved_kinds = (_WIDE_VECTORS, _VECTORS)
    restart_register = "x8"

    def prepare_mapping(self, before: Registers, *, at: int, size: int) -> Registers:
        return before.with_values(
            pc=at, pstate=before.pstate & ~_BRANCHED, x8=_MMAP, x0=0, x1=size, x2=MAP_RIGHTS, x3=MAP_KIND, x4=-1, x5=0
        )

    def prepare_call(self, before: Registers, function: int, argument: int, *, stack: int, back: int) -> Registers:
        return before.with_values(
            pc=function, pstate=before.pstate & ~_BRANCHED, x0=argument, x1=0, x29=0, x30=back, sp=stack
        )

    def build_frame(self, back: int) -> bytes:
        return b""  # the address is in x30

    def read_position(self, registers: Registers) -> int:
        return int(registers.pc)

    def read_breakpoint(self, registers: Registers) -> int:
        return int(registers.pc)

    def read_result(self, registers: Registers) -> int:
        return int(registers.x0)

    def build_program(self, address: int, *, state: int, states: tuple[int, int], text: int, run: int) -> bytes:
        first, second = (0xD2800009 | value << 5 for value in states)  # mov x9, VALUE
        store = 0xF9000269  # str x9, [x19]
        code = (
            0xA9BF7BF3,  # stp x19, x30, [sp, #-16]!
            _encode_adr(19, state - address - 4),
            first,
            store,
            _encode_adr(0, text - address - 16),
            0x58000009 | (_LITERAL_OFFSET - 20) << 3,  # ldr x9, RUN
            0xD63F0120,  # blr x9
            second,
            store,
            0x52800000,  # mov w0, 0
            0xA8C17BF3,  # ldp x19, x30, [sp], #16
            0xD65F03C0,  # ret
        )
        return struct.pack("<12IQ", *code, run)


def _encode_adr(register: int, distance: int) -> int:
    """Encode ``adr``: the address at this distance, less than 1 MiB, from the instruction."""
    return 0x10000000 | (distance & 3) << 29 | (distance >> 2 & 0x7FFFF) << 5 | register
