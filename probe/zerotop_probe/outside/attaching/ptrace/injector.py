"""Has a running Python execute a text of ours on its main thread: CPython before 3.14, on Linux.

The thread is held for some 0.2 ms. Meanwhile it makes one system call, mmap, for pages of our own, and
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from zerotop_probe.outside.attaching.ptrace.tracing import HeldThread, is_one, is_still_there, raise_priority, write_memory
from zerotop_probe.outside.attaching.python_process import (
    CannotEnter,
    EntryPoints,
    Target,
    describe_forbidden,
    describe_not_up,
    read_memory,
)
from zerotop_probe.outside.procfs import Process

_PAGE = 4096
_STACK = 1 << 16
_STATE, _BREAKPOINT, _CODE, _TEXT = 0, 16, 64, 128
_ERRORS_FROM = 2**64 - 4095
# How long a thread may take to stop, and our call to return. A call that waits longer waits for a lock that the
# interrupted thread itself holds: it is given up, and the thread goes on.
_STOP_S, _CALL_S = 1.0, 2.0


class State(enum.IntEnum):
    """How far the text has come."""

    PENDING = 0
    RUNNING = 1
    DONE = 2


class PlantedCode(NamedTuple):
    """A text that was given to a process."""

    process: Process
    address: int
    stopped_s: float  # how long its main thread was held
    stopped_cpu_s: float  # what of that we computed; the rest was waiting for a core

    def read_state(self) -> State:
        """Asks. Raises ProcessLookupError if the process has ended."""
        value = read_memory(self.process.pid, self.address + _STATE, 8)
        if len(value) < 8 or not self.process.is_alive():
            raise ProcessLookupError(f"Process {self.process.pid} has ended")
        return State(struct.unpack("<Q", value)[0])


def plant_code(target: Target, text: str) -> PlantedCode:
    """Gives ``text`` to the main thread of ``target``. Raises CannotEnter; it will not be executed then."""
    code = text.encode() + b"\0"
    size = -(-(_TEXT + len(code) + _STACK) // _PAGE) * _PAGE
    # In a thread of its own: when that ends the kernel lets go of a process that could not be stopped, as one that is in a
    # long call of the kernel. It would otherwise stop at the call's end, and stay so for as long as we live.
    with _block_interruptions(), ThreadPoolExecutor(1) as thread:
        try:
            address, held = thread.submit(_plant_held, target, code, size).result()
        except PermissionError as error:
            raise CannotEnter(describe_forbidden(target.process.pid)) from error
        except (ProcessLookupError, FileNotFoundError) as error:
            raise CannotEnter(f"Process {target.process.pid} has ended.") from error
        except OSError as error:
            raise CannotEnter(f"{error}: it goes on untouched, try again later.") from error
        except RuntimeError as error:  # we are ending, or this user has as many threads as he may
            raise CannotEnter(f"No thread can be started to enter process {target.process.pid} from: try again.") from error
    return PlantedCode(target.process, address, held.stopped_s, held.cpu_s)


@contextlib.contextmanager
def _block_interruptions() -> Iterator[None]:
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


@raise_priority()
def _plant_held(target: Target, code: bytes, size: int) -> tuple[int, HeldThread]:
    pid, entrance = target.process.pid, target.entry_points
    if entrance is None:
        raise CannotEnter(f"Process {pid} runs Python {target.version[0]}.{target.version[1]}, which is asked and not held.")
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        if not target.process.is_alive():  # the number was given to another one meanwhile
            raise ProcessLookupError(pid)
        held = HeldThread(
            pid, entrance.machine, patience_s=_STOP_S, is_same=lambda: is_still_there(memory, entrance.syscall)
        )
        try:
            if not is_one(memory, entrance.initialized_flag):
                raise CannotEnter(describe_not_up(pid))
            held.resolve_restart(patience_s=_CALL_S)
            address = _map_pages(held, entrance, size)
            write_memory(memory, _build_pages(entrance, address, code), address)
            back = address + _BREAKPOINT
            frame = entrance.machine.build_frame(back)
            write_memory(memory, frame, address + size - len(frame))
            _add_pending_call(held, entrance, address, address + size)
            return address, held
        finally:
            held.release_thread()
    finally:
        os.close(memory)


def _map_pages(held: HeldThread, entrance: EntryPoints, size: int) -> int:
    machine = entrance.machine
    after = held.step_once(
        machine.prepare_mapping(held.stopped_registers, at=entrance.syscall, size=size), patience_s=_CALL_S
    )
    if machine.read_position(after) != entrance.syscall + len(machine.syscall_code):
        raise ChildProcessError(f"Process {held.pid} does not make a system call of ours")
    address = machine.read_result(after)
    if address >= _ERRORS_FROM:
        raise ChildProcessError(f"Process {held.pid} gets no memory to be entered with ({os.strerror(2**64 - address)})")
    return address


def _build_pages(entrance: EntryPoints, address: int, text: bytes) -> bytes:
    """The pages' beginning."""
    machine = entrance.machine
    code = machine.build_program(
        address + _CODE,
        state=address + _STATE,
        states=(State.RUNNING, State.DONE),
        text=address + _TEXT,
        run=entrance.run_string,
    )
    start = b"\0" * _BREAKPOINT + machine.breakpoint_code * ((_CODE - _BREAKPOINT) // len(machine.breakpoint_code))
    return (start + code).ljust(_TEXT, b"\0") + text


def _add_pending_call(held: HeldThread, entrance: EntryPoints, address: int, stack: int) -> None:
    machine, back = entrance.machine, address + _BREAKPOINT
    after = held.run_call(
        machine.prepare_call(held.stopped_registers, entrance.add_pending_call, address + _CODE, stack=stack, back=back),
        patience_s=_CALL_S,
    )
    if machine.read_breakpoint(after) != back:
        raise ChildProcessError(f"Process {held.pid} came to a breakpoint that is not ours")
    if machine.read_result(after) & 0xFFFFFFFF:
        raise ChildProcessError(f"Process {held.pid} has too many calls pending")
