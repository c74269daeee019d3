"""Making a running CPython before 3.14 execute Python code on its main thread, on Linux.

The thread is stopped for about 0.4 ms. Meanwhile it makes one system call, mmap, for new pages, and calls
``Py_AddPendingCall``, which only writes a function's address into a table. No memory is allocated, nothing is loaded and no
Python runs, so it does not matter where the thread was interrupted, for example in malloc. If we are killed, it restores
itself, see ``tracing``. The interpreter itself executes the code when the main thread next checks for signals.

The pages contain the state, machine code that runs the Python code and always reports success (an error would surface in the
middle of the job's own code), the Python code, and the stack of our call. They stay mapped, since nobody knows when the
interpreter has left them: 80 KiB per entry.
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

from zerotop_probe.outside.attaching.ptrace.arch import Rescue
from zerotop_probe.outside.attaching.ptrace.tracing import HeldThread, is_one, is_still_there, raise_priority, write_memory
from zerotop_probe.outside.attaching.python_process import (
    CannotEnter,
    EntryPoints,
    Target,
    describe_forbidden,
    describe_not_up,
    read_memory,
)
from zerotop_probe.outside.procfs import ProcessHandle

_PAGE = 4096
_STACK = 1 << 16
_STATE, _ENDING, _CODE, _TEXT = 0, 16, 64, 128
_ERRORS_FROM = 2**64 - 4095
# How long a thread may take to stop, and our call to return. A call that takes longer waits for a lock that the interrupted
# thread itself holds; it is abandoned, and the thread continues.
_STOP_S, _CALL_S = 1.0, 2.0


class State(enum.IntEnum):
    """The progress of the planted code."""

    PENDING = 0
    RUNNING = 1
    DONE = 2


class PlantedCode(NamedTuple):
    """Python code that was planted in a process."""

    process: ProcessHandle
    address: int
    stopped_s: float  # how long its main thread was stopped
    stopped_cpu_s: float  # our CPU time in it; for the rest we waited for a core

    def read_state(self) -> State:
        """Read the progress. Raises ProcessLookupError if the process has ended."""
        value = read_memory(self.process.pid, self.address + _STATE, 8)
        if len(value) < 8 or not self.process.is_alive():
            raise ProcessLookupError(f"Process {self.process.pid} has ended")
        return State(struct.unpack("<Q", value)[0])


def plant_code(target: Target, text: str) -> PlantedCode:
    """Make the main thread of ``target`` execute ``text``. Raises CannotEnter; the code is not executed then."""
    code = text.encode() + b"\0"
    size = -(-(_TEXT + len(code) + _STACK) // _PAGE) * _PAGE
    # In its own thread, at whose end the kernel releases a process that could not be stopped, such as one in a long system
    # call. It would otherwise stop at the end of that call and stay stopped until we exit.
    with _block_interruptions(), ThreadPoolExecutor(1) as thread:
        try:
            address, held = thread.submit(_plant_held, target, code, size).result()
        except PermissionError as error:
            raise CannotEnter(describe_forbidden(target.process.pid)) from error
        except (ProcessLookupError, FileNotFoundError) as error:
            raise CannotEnter(f"Process {target.process.pid} has ended.") from error
        except OSError as error:
            raise CannotEnter(f"{error}. It continues undisturbed; try again later.") from error
        except RuntimeError as error:  # we are exiting, or this user has reached the thread limit
            raise CannotEnter(f"No thread could be started to enter process {target.process.pid}. Try again.") from error
    return PlantedCode(target.process, address, held.stopped_s, held.cpu_s)


@contextlib.contextmanager
def _block_interruptions() -> Iterator[None]:
    """Block signals and garbage collection, which would prolong the stop."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    had_gc = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if had_gc:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@raise_priority()
def _plant_held(target: Target, code: bytes, size: int) -> tuple[int, HeldThread]:
    pid, entrance = target.process.pid, target.entry_points
    if entrance is None:
        raise CannotEnter(f"Process {pid} runs Python 3.14 or newer, which is not entered with ptrace.")
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        if not target.process.is_alive():  # its pid was reused
            raise ProcessLookupError(pid)
        held = HeldThread(pid, entrance.machine, patience_s=_STOP_S, is_same=lambda: is_still_there(memory, entrance.gate))
        try:
            if not is_one(memory, entrance.initialized_flag):
                raise CannotEnter(describe_not_up(pid))
            rescue = held.plant_rescue(memory, entrance.restorer, entrance.stack)
            address = _map_pages(held, entrance, rescue, size)
            write_memory(memory, _build_pages(entrance, rescue, address, code), address)
            frame = entrance.machine.build_frame(address + _ENDING)
            write_memory(memory, frame, address + size - len(frame))
            _add_pending_call(held, entrance, rescue, address, address + size)
            return address, held
        finally:
            held.release_thread()
    finally:
        os.close(memory)


def _map_pages(held: HeldThread, entrance: EntryPoints, rescue: Rescue, size: int) -> int:
    machine = entrance.machine
    held.run_to_call(machine.prepare_mapping(rescue, at=entrance.gate, size=size), machine.mmap, patience_s=_CALL_S)
    address = machine.read_result(held.finish_call(patience_s=_CALL_S))
    if address >= _ERRORS_FROM:
        raise ChildProcessError(f"Process {held.pid} cannot map memory ({os.strerror(2**64 - address)})")
    return address


def _build_pages(entrance: EntryPoints, rescue: Rescue, address: int, text: bytes) -> bytes:
    """Return the content of the pages except the stack."""
    machine = entrance.machine
    code = machine.build_program(
        address + _CODE,
        state=address + _STATE,
        states=(State.RUNNING, State.DONE),
        text=address + _TEXT,
        run=entrance.run_string,
    )
    start = bytes(_ENDING) + machine.build_ending(rescue)
    return (start.ljust(_CODE, b"\0") + code).ljust(_TEXT, b"\0") + text


def _add_pending_call(held: HeldThread, entrance: EntryPoints, rescue: Rescue, address: int, stack: int) -> None:
    machine, function, argument = entrance.machine, entrance.add_pending_call, address + _CODE
    called = machine.prepare_call(rescue, function, argument, stack=stack, back=address + _ENDING)
    after = held.run_to_call(called, machine.rt_sigreturn, patience_s=_CALL_S)
    if machine.read_argument(after) & 0xFFFFFFFF:
        raise ChildProcessError(f"Process {held.pid} has too many pending calls")
