"""The interface of a processor architecture. Stopping and resuming threads is in ``tracing``."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import ClassVar

MAP_RIGHTS, MAP_KIND = 7, 0x22  # read, write and execute; private and anonymous


class Registers(ctypes.Structure):
    """The general 64-bit registers of a stopped thread in the kernel's order (NT_PRSTATUS)."""

    def with_values(self, **values: int) -> Registers:
        """Return a copy with these registers set."""
        copy = type(self).from_buffer_copy(self)
        for name, value in values.items():
            setattr(copy, name, value & (2**64 - 1))
        return copy


class Machine(ABC):
    """A processor architecture under Linux."""

    name: ClassVar[str]  # as in platform.machine()
    register_type: ClassVar[type[Registers]]
    syscall_code: ClassVar[bytes]  # the instruction that makes a system call
    alignment: ClassVar[int]  # of instructions, in bytes
    breakpoint_code: ClassVar[bytes]  # the instruction that raises SIGTRAP

    # Register sets (kind, content) written with the general one to mark that no system call is in progress.
    idle_sets: ClassVar[tuple[tuple[int, bytes], ...]] = ()
    # Kinds of register sets: the first one that exists must be restored, without interpreting it.
    preserved_kinds: ClassVar[tuple[int, ...]] = ()
    # The register that the kernel changes when it resumes an interrupted system call, if it does so late.
    restart_register: ClassVar[str] = ""

    @abstractmethod
    def prepare_mapping(self, before: Registers, *, at: int, size: int) -> Registers:
        """Return the registers for the system call at ``at`` to map ``size`` bytes of new pages."""

    @abstractmethod
    def prepare_call(self, before: Registers, function: int, argument: int, *, stack: int, back: int) -> Registers:
        """Return the registers to call ``function(argument, 0)``, returning to ``back``; its frame ends at ``stack``."""

    @abstractmethod
    def build_frame(self, back: int) -> bytes:
        """Return the top of the stack at the begin of a function that returns to ``back``."""

    @abstractmethod
    def read_position(self, registers: Registers) -> int:
        """Return the address of the next instruction."""

    @abstractmethod
    def read_breakpoint(self, registers: Registers) -> int:
        """Return the address of the breakpoint that has just stopped the thread."""

    @abstractmethod
    def read_result(self, registers: Registers) -> int:
        """Return the result of a function or a system call."""

    @abstractmethod
    def build_program(self, address: int, *, state: int, states: tuple[int, int], text: int, run: int) -> bytes:
        """Return machine code for ``address``, at most 64 bytes, that the interpreter calls as ``int program(void *)``.

        It writes the first of ``states`` to the word at ``state``, calls ``run(text)``, writes the second, returns 0.
        """
