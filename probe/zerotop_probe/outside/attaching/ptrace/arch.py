"""The interface of a processor architecture. Stopping and resuming threads is in ``tracing``."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

MAP_RIGHTS, MAP_KIND = 7, 0x22  # read, write and execute; private and anonymous


class Registers(ctypes.Structure):
    """The general 64-bit registers of a stopped thread in the kernel's order (NT_PRSTATUS)."""

    def with_values(self, **values: int) -> Registers:
        """Return a copy with these registers set."""
        copy = type(self).from_buffer_copy(self)
        for name, value in values.items():
            setattr(copy, name, value & (2**64 - 1))
        return copy


class RegisterSet(NamedTuple):
    """The content of a further register set of a thread."""

    kind: int
    content: bytes


class Rescue(NamedTuple):
    """A frame as the kernel lays one out for a signal handler, from which a thread restores itself by ``rt_sigreturn``."""

    address: int  # below the thread's stack
    frame: bytes
    registers: Registers  # with these it does so


class Machine(ABC):
    """A processor architecture under Linux."""

    name: ClassVar[str]  # as in platform.machine()
    register_type: ClassVar[type[Registers]]
    alignment: ClassVar[int]  # of instructions, in bytes
    syscall_code: ClassVar[bytes]  # the instruction that makes a system call
    gate_codes: ClassVar[tuple[bytes, ...]]  # a system call, then a return
    restorer_codes: ClassVar[tuple[bytes, ...]]  # rt_sigreturn, as it follows a signal handler
    mmap: ClassVar[int]  # numbers of system calls
    rt_sigreturn: ClassVar[int]

    # Register sets (kind, content) written with the general one to mark that no system call is in progress.
    idle_sets: ClassVar[tuple[tuple[int, bytes], ...]] = ()
    # Kinds of register sets: the first one that exists must be restored.
    preserved_kinds: ClassVar[tuple[int, ...]] = ()
    # Whether the kernel changes a register when it resumes an interrupted system call, after it has shown the others.
    restarts_late: ClassVar[bool] = False

    @abstractmethod
    def build_rescue(self, before: Registers, vectors: RegisterSet | None, *, mask: int, restorer: int) -> Rescue:
        """Return the frame that restores these registers and this signal mask; ``vectors``: the preserved set."""

    @abstractmethod
    def prepare_mapping(self, rescue: Rescue, *, at: int, size: int) -> Registers:
        """Return the registers for the gate at ``at`` to map ``size`` bytes of new pages, and to return to the restorer."""

    @abstractmethod
    def prepare_call(self, rescue: Rescue, function: int, argument: int, *, stack: int, back: int) -> Registers:
        """Return the registers to call ``function(argument, 0)``, returning to ``back``; its frame ends at ``stack``."""

    @abstractmethod
    def build_frame(self, back: int) -> bytes:
        """Return the top of the stack at the begin of a function that returns to ``back``."""

    @abstractmethod
    def build_ending(self, rescue: Rescue) -> bytes:
        """Return machine code, at most 48 bytes, for ``back``: ``rt_sigreturn``, with the function's result as argument."""

    @abstractmethod
    def read_position(self, registers: Registers) -> int:
        """Return the address of the next instruction."""

    @abstractmethod
    def read_stack(self, registers: Registers) -> int:
        """Return the stack pointer."""

    @abstractmethod
    def read_call(self, registers: Registers) -> int:
        """Return the number of the system call that begins."""

    @abstractmethod
    def read_argument(self, registers: Registers) -> int:
        """Return the first argument of the system call that begins."""

    @abstractmethod
    def read_result(self, registers: Registers) -> int:
        """Return the result of a system call."""

    @abstractmethod
    def build_program(self, address: int, *, state: int, states: tuple[int, int], text: int, run: int) -> bytes:
        """Return machine code for ``address``, at most 64 bytes, that the interpreter calls as ``int program(void *)``.

        It writes the first of ``states`` to the word at ``state``, calls ``run(text)``, writes the second, returns 0.
        """


def read_signed(value: int) -> int:
    """Return the value of a 64-bit register as a signed number."""
    return value - 2**64 if value >> 63 else value
