"""Registers, instructions and calling convention of x86-64.

The vector registers are copied as a block: their layout differs between processors. A frame holds the block as a signal
handler's does, with its size (arch/x86/kernel/fpu/signal.c).
"""

from __future__ import annotations

import ctypes
import struct

from zerotop_probe.outside.attaching.ptrace.arch import (
    MAP_KIND,
    MAP_RIGHTS,
    Machine,
    Registers,
    RegisterSet,
    Rescue,
    read_signed,
)

_VECTORS, _OLD_VECTORS = 0x202, 2  # NT_X86_XSTATE, NT_PRFPREG
_RED_ZONE = 128  # bytes below the stack pointer that a function may use
# struct rt_sigframe: the restorer's address, struct ucontext, struct siginfo.
_FRAME_BYTES, _CONTEXT = 440, struct.Struct("<QQ QiiQ 18Q 4H 4Q Q 64x Q")
_CONTEXT_FLAGS = 7  # UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS
# The kernel ignores an alternate stack with invalid flags, so that the thread's own, which nobody can read, stays.
_NO_STACK = (0, -1, 0, 0)
_CONTEXT_NAMES = """
    r8 r9 r10 r11 r12 r13 r14 r15 rdi rsi rbp rbx rdx rax rcx rsp rip eflags
"""
# In the block of vectors: where software may write, the mask of used features, and where the tiles of AMX begin, which
# belong to a thread's block only once it uses them.
_MARKS_AT, _USED_AT, _TILES_AT, _TILES = 464, 512, 2816, 1 << 18
_MAGIC, _END_MAGIC = 0x46505853, 0x46505845
# ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK.
_RESTARTS = (-512, -513, -514, -516)
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
    alignment = 1
    syscall_code = b"\x0f\x05"
    gate_codes = (b"\x0f\x05\xc3",)
    restorer_codes = (b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05", b"\xb8\x0f\0\0\0\x0f\x05")  # mov rax, 15; syscall
    mmap, rt_sigreturn = 9, 15
    preserved_kinds = (_VECTORS, _OLD_VECTORS)

    def build_rescue(self, before: Registers, vectors: RegisterSet | None, *, mask: int, restorer: int) -> Rescue:
        block = _build_block(vectors.content) if vectors is not None else b""
        place = (before.rsp - _RED_ZONE - len(block)) & -64
        address = ((place - _FRAME_BYTES) & -16) - 8
        after = before
        if read_signed(before.orig_rax) >= 0 and read_signed(before.rax) in _RESTARTS:
            # The kernel would make the call again after this stop, but not after rt_sigreturn.
            after = before.with_values(rax=before.orig_rax, rip=before.rip - len(self.syscall_code))
        words = (getattr(after, name) for name in _CONTEXT_NAMES.split())
        segments = (after.cs & 0xFFFF, 0, 0, after.ss & 0xFFFF)
        context = _CONTEXT.pack(_CONTEXT_FLAGS, 0, *_NO_STACK, *words, *segments, 0, 0, 0, 0, place if block else 0, mask)
        frame = (struct.pack("<Q", restorer) + context).ljust(place - address, b"\0") + block
        return Rescue(address, frame, before.with_values(rip=restorer, rsp=address + 8, orig_rax=_NO_CALL))

    def prepare_mapping(self, rescue: Rescue, *, at: int, size: int) -> Registers:
        return rescue.registers.with_values(
            rip=at, rsp=rescue.address, rax=self.mmap, rdi=0, rsi=size, rdx=MAP_RIGHTS, r10=MAP_KIND, r8=-1, r9=0
        )

    def prepare_call(self, rescue: Rescue, function: int, argument: int, *, stack: int, back: int) -> Registers:
        before = rescue.registers
        top, flags = stack - len(self.build_frame(back)), before.eflags & ~_DIRECTION
        return before.with_values(rip=function, rax=0, rdi=argument, rsi=0, rbp=0, rsp=top, eflags=flags)

    def build_frame(self, back: int) -> bytes:
        return struct.pack("<Q", back)

    def build_ending(self, rescue: Rescue) -> bytes:
        return b"".join(
            (
                b"\x48\x89\xc7",  # mov rdi, rax
                b"\x48\xbc" + struct.pack("<Q", rescue.registers.rsp),  # mov rsp, STACK
                b"\xb8" + struct.pack("<I", self.rt_sigreturn) + self.syscall_code,  # mov eax, 15; syscall
            )
        )

    def read_position(self, registers: Registers) -> int:
        return int(registers.rip)

    def read_stack(self, registers: Registers) -> int:
        return int(registers.rsp)

    def read_call(self, registers: Registers) -> int:
        return int(registers.orig_rax)

    def read_argument(self, registers: Registers) -> int:
        return int(registers.rdi)

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


def _build_block(content: bytes) -> bytes:
    """Return the block of vectors as the kernel marks it in a frame."""
    if len(content) <= _USED_AT:
        return content[:_MARKS_AT].ljust(_USED_AT, b"\0")
    features, used = (struct.unpack_from("<Q", content, at)[0] for at in (_MARKS_AT, _USED_AT))
    size = len(content) if used & _TILES else min(len(content), _TILES_AT)
    marks = struct.pack("<IIQI", _MAGIC, size + 4, features, size).ljust(_USED_AT - _MARKS_AT, b"\0")
    return content[:_MARKS_AT] + marks + content[_USED_AT:size] + struct.pack("<I", _END_MAGIC)
