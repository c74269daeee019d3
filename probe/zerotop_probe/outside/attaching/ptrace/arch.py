"""What has to be known of a processor to enter a thread: facts only. How it is stopped and set going is in ``tracing``."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import ClassVar

MAP_RIGHTS, MAP_KIND = 7, 0x22  # read, write and execute; private and anonymous


class Registers(ctypes.Structure):
    """The general registers of a stopped thread, of 64 bits each, in the kernel's order (NT_PRSTATUS)."""

    def with_values(self, **values: int) -> Registers:
        """A copy with some of them set."""
        copy = type(self).from_buffer_copy(self)
        for name, value in values.items():
            setattr(copy, name, value & (2**64 - 1))
        return copy


class Machine(ABC):
    """A processor architecture under Linux."""

    name: ClassVar[str]  # as platform.machine() says
    register_type: ClassVar[type[Registers]]
    syscall_code: ClassVar[bytes]  # the instruction that makes a system call
    alignment: ClassVar[int]  # every instruction lies at a multiple of this
    breakpoint_code: ClassVar[bytes]  # the instruction that raises SIGTRAP

    # Register sets (kind, content) that are written beside the general one, to say that no system call is going on.
    idle_sets: ClassVar[tuple[tuple[int, bytes], ...]] = ()
    # Kinds of register sets: the first one that there is has to be put back as it was, without looking into it.
    preserved_kinds: ClassVar[tuple[int, ...]] = ()
    # The register in which the kernel writes how an interrupted system call goes on, if only when it does.
    restart_register: ClassVar[str] = ""

    @abstractmethod
    def prepare_mapping(self, before: Registers, *, at: int, size: int) -> Registers:
        """The registers with which the system call instruction ``at`` an address asks for ``size`` bytes of new pages."""

    @abstractmethod
    def prepare_call(self, before: Registers, function: int, argument: int, *, stack: int, back: int) -> Registers:
        """Those with which ``function(argument, 0)`` begins, to return to ``back``; :meth:`frame` ends at ``stack``."""

    @abstractmethod
    def build_frame(self, back: int) -> bytes:
        """What lies on the stack when a function begins that returns to ``back``."""

    @abstractmethod
    def read_position(self, registers: Registers) -> int:
        """The address of the next instruction."""

    @abstractmethod
    def read_breakpoint(self, registers: Registers) -> int:
        """The address of the breakpoint that has just stopped it."""

    @abstractmethod
    def read_result(self, registers: Registers) -> int:
        """What a function or a system call has returned."""

    @abstractmethod
    def build_program(self, address: int, *, state: int, states: tuple[int, int], text: int, run: int) -> bytes:
        """Machine code for ``address``, at most 64 bytes, that the interpreter calls as ``int program(void *)``.

        It writes the first of ``states`` to the word at ``state``, calls ``run(text)``, writes the second, returns 0.
        """
