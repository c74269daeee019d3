"""Has a running Python execute a text of ours on its main thread: CPython before 3.14, on x86-64 Linux.

The thread is held for about half a millisecond. Meanwhile it makes one system call, mmap, for pages of our own, and
calls ``Py_AddPendingCall``, which only writes a function's address into a table. No memory is allocated, nothing is
loaded, no Python runs: where the thread was interrupted, in malloc say, does not matter. The text is executed by the
interpreter itself when the main thread next comes to where it also handles signals.

In the pages lie: the state, a piece of machine code that runs the text and always reports success (an error would
otherwise surface in the middle of the job's own code), the text, and the stack of our call. They stay mapped, since
nobody knows when the interpreter has left them; that is 80 KiB an entry.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import os
import signal
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from zerotop_probe.outside.attaching.target import CannotEnter, Target, read_memory, why_forbidden
from zerotop_probe.outside.attaching.tracing import DidNotStop, Held, punctual, still_there, write
from zerotop_probe.outside.proc import Process

_PAGE = 4096
_STACK = 1 << 16
_STATE, _BREAKPOINT, _CODE, _TEXT = 0, 16, 64, 128
_READ_WRITE_EXECUTE, _PRIVATE_ANONYMOUS = 7, 0x22
_MMAP = 9
_ERRORS_FROM = 2**64 - 4095
# How long a thread may take to stop, and our call to return. A call that waits longer waits for a lock that the
# interrupted thread itself holds: it is given up, and the thread goes on.
_STOP_S, _CALL_S = 1.0, 2.0


class State(enum.IntEnum):
    """How far the text has come."""

    PENDING = 0
    RUNNING = 1
    DONE = 2


class Planted(NamedTuple):
    """A text that was given to a process."""

    process: Process
    address: int
    stopped_s: float  # how long its main thread was held
    stopped_cpu_s: float  # what of that we computed; the rest was waiting for a core
    whole_s: float

    def state(self) -> State:
        """Asks. Raises ProcessLookupError if the process has ended."""
        value = read_memory(self.process.pid, self.address + _STATE, 8)
        if len(value) < 8 or not self.process.alive():
            raise ProcessLookupError(f"Process {self.process.pid} has ended")
        return State(struct.unpack("<Q", value)[0])


def plant(target: Target, text: str) -> Planted:
    """Gives ``text`` to the main thread of ``target``. Raises CannotEnter; it will not be executed then."""
    began_s = time.monotonic()
    code = text.encode() + b"\0"
    size = -(-(_TEXT + len(code) + _STACK) // _PAGE) * _PAGE
    with _undisturbed(), punctual():
        try:
            address, held = _plant_held(target, code, size)
        except PermissionError as error:
            raise CannotEnter(why_forbidden(target.process.pid)) from error
        except ProcessLookupError as error:
            raise CannotEnter(f"Process {target.process.pid} has ended.") from error
        except (DidNotStop, ChildProcessError) as error:
            raise CannotEnter(f"{error}: it goes on untouched, try again later.") from error
    return Planted(target.process, address, held.stopped_s, held.cpu_s, time.monotonic() - began_s)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No signal and no garbage collection of ours prolongs the stop; a Ctrl-C waits."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _plant_held(target: Target, code: bytes, size: int) -> tuple[int, Held]:
    pid = target.process.pid
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        if not target.process.alive():  # the number was given to another one meanwhile
            raise ProcessLookupError(pid)
        held = Held(pid, patience_s=_STOP_S, same=lambda: still_there(memory, target.syscall))
        try:
            address = _map(held, target, size)
            write(memory, _content(target, address, code), address)
            stack = address + size - 8
            write(memory, struct.pack("<Q", address + _BREAKPOINT), stack)
            _add(held, target, address, stack)
            return address, held
        finally:
            held.release()
    finally:
        os.close(memory)


def _map(held: Held, target: Target, size: int) -> int:
    after = held.step(
        held.registers.changed(
            rip=target.syscall,
            rax=_MMAP,
            rdi=0,
            rsi=size,
            rdx=_READ_WRITE_EXECUTE,
            r10=_PRIVATE_ANONYMOUS,
            r8=-1,
            r9=0,
        ),
        patience_s=_CALL_S,
    )
    if after.rax >= _ERRORS_FROM:
        raise ChildProcessError(f"Process {held.pid} gets no memory to be entered with ({os.strerror(2**64 - after.rax)})")
    return int(after.rax)


def _content(target: Target, address: int, text: bytes) -> bytes:
    """The pages' beginning. The machine code, called by the interpreter as a function of one argument, is:

    push rbx / mov rbx, STATE / mov qword [rbx], RUNNING / mov rdi, TEXT / mov rax, PyRun_SimpleString / call rax /
    mov qword [rbx], DONE / xor eax, eax / pop rbx / ret
    """
    code = b"".join(
        (
            b"\x53\x48\xbb" + struct.pack("<Q", address + _STATE),
            b"\x48\xc7\x03" + struct.pack("<I", State.RUNNING),
            b"\x48\xbf" + struct.pack("<Q", address + _TEXT),
            b"\x48\xb8" + struct.pack("<Q", target.run_string),
            b"\xff\xd0",
            b"\x48\xc7\x03" + struct.pack("<I", State.DONE),
            b"\x31\xc0\x5b\xc3",
        )
    )
    start = b"\0" * _BREAKPOINT + b"\xcc" * (_CODE - _BREAKPOINT)
    return (start + code).ljust(_TEXT, b"\xcc") + text


def _add(held: Held, target: Target, address: int, stack: int) -> None:
    after = held.call(
        held.registers.changed(
            rip=target.add_pending_call, rdi=address + _CODE, rsi=0, rsp=stack, rbp=0, rax=0,
            eflags=held.registers.eflags & ~0x400,  # the calling convention wants the direction flag clear
        ),
        patience_s=_CALL_S,
    )  # fmt: skip
    if after.rip != address + _BREAKPOINT + 1:
        raise ChildProcessError(f"Process {held.pid} came to a breakpoint that is not ours")
    if after.rax & 0xFFFFFFFF:
        raise ChildProcessError(f"Process {held.pid} has too many calls pending")
