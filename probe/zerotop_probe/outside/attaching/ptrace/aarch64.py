"""Registers, instructions and calling convention of 64-bit ARM.

A system call, such as our mmap, discards the wide part of the vector registers (SVE), as the kernel documents. Code that
makes system calls does not rely on it, but the code that we interrupt may be using it. So if these registers have changed
they are restored, as a block of bytes. A frame holds them as a signal handler's does (arch/arm64/kernel/signal.c).

The kernel sets up the restart of an interrupted system call before it shows us the registers. Only to resume a sleep does it
later put another number into x8, so that just the remaining time is slept.
"""

from __future__ import annotations

import ctypes
import struct

from zerotop_probe.outside.attaching.ptrace.arch import MAP_KIND, MAP_RIGHTS, Machine, Registers, RegisterSet, Rescue

_VECTORS, _WIDE_VECTORS, _SYSTEM_CALL = 2, 0x405, 0x404  # NT_PRFPREG, NT_ARM_SVE, NT_ARM_SYSTEM_CALL
# In pstate: the last instruction was an indirect branch, so that the next one must be a landing pad (BTI).
_BRANCHED = 3 << 10
_NAMES = (*(f"x{number}" for number in range(31)), "sp", "pc", "pstate")
_LITERAL_OFFSET = 48  # of the address of ``run`` in the program

_SVC, _RET = 0xD4000001, 0xD65F03C0
# struct rt_sigframe: siginfo, then ucontext with its signal mask, registers and records of the others.
_MASK_AT, _GENERAL_AT, _RECORDS_AT, _FRAME_BYTES = 128 + 40, 128 + 176 + 8, 128 + 176 + 288, 128 + 176 + 288 + 4096
_STACK_AT, _NO_STACK = 128 + 16, struct.pack("<QiiQ", 0, -1, 0, 0)  # invalid: the kernel keeps the thread's own
_VECTORS_MAGIC, _WIDE_MAGIC, _EXTRA_MAGIC = 0x46508001, 0x53564501, 0x45585401
_WIDE_HEAD = struct.Struct("<IIHHHH")  # struct user_sve_header
_IS_WIDE = 1  # a flag there
_TERMINATOR = bytes(16)


class _Registers(Registers):
    """``struct user_pt_regs``."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in _NAMES)


class Aarch64(Machine):
    """64-bit ARM, little-endian."""

    name = "aarch64"
    register_type = _Registers
    alignment = 4
    syscall_code = struct.pack("<I", _SVC)  # svc #0
    gate_codes = (struct.pack("<II", _SVC, _RET),)
    restorer_codes = (struct.pack("<II", 0xD2801168, _SVC),)  # mov x8, 139; svc #0
    mmap, rt_sigreturn = 222, 139
    idle_sets = ((_SYSTEM_CALL, struct.pack("<i", -1)),)
    preserved_kinds = (_WIDE_VECTORS, _VECTORS)
    restarts_late = True

    def build_rescue(self, before: Registers, vectors: RegisterSet | None, *, mask: int, restorer: int) -> Rescue:
        size = _FRAME_BYTES + (len(vectors.content) if vectors is not None else 0)
        address = (before.sp - size) & -16
        records = _build_records(vectors, address + _RECORDS_AT) if vectors is not None else _TERMINATOR
        frame = bytearray(_RECORDS_AT)
        frame[_STACK_AT : _STACK_AT + len(_NO_STACK)] = _NO_STACK
        struct.pack_into("<Q", frame, _MASK_AT, mask)
        frame[_GENERAL_AT : _GENERAL_AT + ctypes.sizeof(before)] = bytes(before)
        registers = before.with_values(pc=restorer, sp=address, x30=restorer, pstate=before.pstate & ~_BRANCHED)
        return Rescue(address, bytes(frame) + records, registers)

    def prepare_mapping(self, rescue: Rescue, *, at: int, size: int) -> Registers:
        return rescue.registers.with_values(pc=at, x8=self.mmap, x0=0, x1=size, x2=MAP_RIGHTS, x3=MAP_KIND, x4=-1, x5=0)

    def prepare_call(self, rescue: Rescue, function: int, argument: int, *, stack: int, back: int) -> Registers:
        return rescue.registers.with_values(pc=function, x0=argument, x1=0, x29=0, x30=back, sp=stack)

    def build_frame(self, back: int) -> bytes:
        return b""  # the address is in x30

    def build_ending(self, rescue: Rescue) -> bytes:
        code = (
            0x580000C9,  # ldr x9, STACK
            0x9100013F,  # mov sp, x9
            0xD2800008 | self.rt_sigreturn << 5,  # mov x8, 139
            _SVC,
        )
        return struct.pack("<4I8xQ", *code, rescue.registers.sp)

    def read_position(self, registers: Registers) -> int:
        return int(registers.pc)

    def read_stack(self, registers: Registers) -> int:
        return int(registers.sp)

    def read_call(self, registers: Registers) -> int:
        return int(registers.x8)

    def read_argument(self, registers: Registers) -> int:
        return int(registers.x0)

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
            _RET,
        )
        return struct.pack("<12IQ", *code, run)


def _encode_adr(register: int, distance: int) -> int:
    """Encode ``adr``: the address at this distance, less than 1 MiB, from the instruction."""
    return 0x10000000 | (distance & 3) << 29 | (distance >> 2 & 0x7FFFF) << 5 | register


def _build_records(vectors: RegisterSet, address: int) -> bytes:
    """Return the records of a frame for ``address``: the vectors, and after a reference to them their wide part."""
    content, wide = vectors.content, b""
    if vectors.kind == _WIDE_VECTORS:
        size, _, length, _, flags, _ = _WIDE_HEAD.unpack_from(content)
        body = content[_WIDE_HEAD.size : size]
        if flags & _IS_WIDE:
            used = 32 * length + 17 * (length // 8)  # Z, P and FFR
            status = (_WIDE_HEAD.size + used + 15) // 16 * 16 - _WIDE_HEAD.size
            registers = b"".join(body[number * length : number * length + 16] for number in range(32))
            wide = struct.pack("<IIHH4x", _WIDE_MAGIC, (16 + used + 15) // 16 * 16, length, 0) + body[:used]
            wide += bytes(-len(wide) % 16)
            body = registers + body[status : status + 8]
        content = body
    record = struct.pack("<II", _VECTORS_MAGIC, 528) + content[512:520] + content[:512]
    if not wide:
        return record + _TERMINATOR
    place = address + len(record) + 32 + len(_TERMINATOR)
    extra = struct.pack("<IIQI12x", _EXTRA_MAGIC, 32, place, len(wide) + len(_TERMINATOR))
    return record + extra + _TERMINATOR + wide + _TERMINATOR
