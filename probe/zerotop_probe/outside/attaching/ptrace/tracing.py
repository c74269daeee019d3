"""Stopping a thread with ptrace on Linux and accessing its registers and memory. See ptrace(2).

A ``Machine`` describes what differs between processors.

While a thread is stopped we keep the GIL: once released, it would come back only after 5 ms whenever another of our threads
is busy, for example drawing a screen.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from zerotop_probe.outside.attaching.ptrace.arch import Machine, Registers

_PEEK, _CONT, _SINGLESTEP, _DETACH, _SYSEMU = 1, 7, 9, 17, 31
_GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4204, 0x4205, 0x4206, 0x4207, 0x420A, 0x420B
_GENERAL_REGISTERS = 1  # NT_PRSTATUS
_MAX_SET_BYTES = 1 << 14
_EVENT_STOP = 128
_WAIT_ALL = 0x40000000
_MASK_BYTES = 8

# Signals of a fault in our own call. If they were blocked, the kernel would discard the process's handler.
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
_BLOCKED = ~sum(1 << (number - 1) for number in FAULTS) & (2**64 - 1)

# A thread stops, or returns from our call, within about 20 us if a core is free, and the kernel then sends us the SIGCHLD
# that we wait for. Polling would take a shared core away from it and set a timer each time, which on a virtual machine takes
# 20 to 40 us, at times 1 ms. We still poll at growing intervals, as the signal may go to another thread or be ignored. After
# _KEEP_LOCK_S the GIL is released for our other threads.
_POLL_S, _POLL_SHARE, _KEEP_LOCK_S = 0.0003, 0.5, 0.02
_STOP_SIGNAL = signal.SIGCHLD

_libc = ctypes.PyDLL(None, use_errno=True)  # unlike CDLL it keeps the GIL
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_libc.waitpid.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_libc.sigtimedwait.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
for _call in (_libc.pread, _libc.pwrite):
    _call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_longlong]
    _call.restype = ctypes.c_ssize_t


class _IoVec(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class _TimeSpec(ctypes.Structure):
    """``struct timespec``."""

    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _RegisterSet(NamedTuple):
    """The saved content of a register set of a thread."""

    kind: int
    content: bytes


class DidNotStop(TimeoutError):
    """The thread did not stop in time."""


def _check_result(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _call_ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    _check_result(_libc.ptrace(request, pid, address, data))


def write_memory(memory: int, content: bytes, address: int) -> None:
    """Write to a process's memory through a descriptor of its ``/proc/PID/mem``. Raises OSError."""
    _check_result(_libc.pwrite(memory, content, len(content), address))


def is_still_there(memory: int, address: int) -> bool:
    """Whether the process since opening ``memory`` has neither ended nor executed another program."""
    return int(_libc.pread(memory, ctypes.create_string_buffer(1), 1, address)) == 1


def is_one(memory: int, address: int) -> bool:
    """Whether an int of the process is 1."""
    content = ctypes.create_string_buffer(4)
    return int(_libc.pread(memory, content, 4, address)) == 4 and content.raw == b"\1\0\0\0"


def _await_stop(seconds: float, *, keep_lock: bool) -> None:
    """Wait until a traced thread may have stopped, or the time is over (below one second with ``keep_lock``)."""
    if keep_lock:
        signals, span = (ctypes.c_uint64 * 16)(1 << (_STOP_SIGNAL - 1)), _TimeSpec(0, int(1e9 * seconds))
        _libc.sigtimedwait(ctypes.addressof(signals), None, ctypes.addressof(span))
    else:
        signal.sigtimedwait({_STOP_SIGNAL}, seconds)


@contextlib.contextmanager
def raise_priority() -> Iterator[None]:
    """Use real-time priority if permitted, which makes a stop several times shorter on an overloaded machine."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, parameters)


class HeldThread:
    """One thread, stopped from the end of ``__init__`` to :meth:`release_thread`.

    All calls must come from one thread of ours, which ends soon after: only then does the kernel release a thread that did
    not stop. It must have SIGCHLD blocked, and consumes the SIGCHLD of our other children too.
    """

    def __init__(self, pid: int, machine: Machine, *, patience_s: float, is_same: Callable[[], bool] = lambda: True) -> None:
        """Stop the thread. Raises PermissionError, ProcessLookupError; DidNotStop, and then the thread continues.

        ``is_same``: whether ``pid`` still is the intended process. It is called when the pid can no longer be reused.
        """
        self.pid = pid
        self._machine = machine
        self.stopped_s = self.cpu_s = 0.0  # set by release_thread: duration of the stop, and our CPU time in it
        time.sleep(0)  # let other threads of ours run now rather than during the stop
        _call_ptrace(_SEIZE, pid)
        try:
            if not is_same():
                raise ProcessLookupError(errno.ESRCH, f"Process {pid} has ended")
            self._began_s, self._began_cpu_s = time.monotonic(), time.thread_time()
            _call_ptrace(_INTERRUPT, pid)
            self._await_interrupt(time.monotonic() + patience_s)
            self._registers = self._read_registers()
            self._preserved = self._read_preserved()
            self._mask = ctypes.c_uint64()
            _call_ptrace(_GETSIGMASK, pid, _MASK_BYTES, ctypes.addressof(self._mask))
            # Signals stay queued in the kernel until the thread is released.
            self._set_mask(_BLOCKED)
        except BaseException:  # also KeyboardInterrupt: the thread must not stay stopped
            self._detach_thread()
            raise

    def _await_interrupt(self, deadline_s: float) -> None:
        while True:
            status = self._wait_for_stop(deadline_s)
            if status >> 16 == _EVENT_STOP:
                return
            # A signal came first: deliver it.
            _call_ptrace(_CONT, self.pid, 0, os.WSTOPSIG(status))

    def _wait_for_stop(self, deadline_s: float) -> int:
        begin_s = time.monotonic()
        result = ctypes.c_int()
        address = ctypes.addressof(result)
        while not _check_result(_libc.waitpid(self.pid, address, os.WNOHANG | _WAIT_ALL)):
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise DidNotStop(f"Process {self.pid} did not stop in time")
            waited_s = now_s - begin_s
            poll_s = min(_POLL_S + _POLL_SHARE * waited_s, deadline_s - now_s)
            _await_stop(poll_s, keep_lock=waited_s < _KEEP_LOCK_S)
        status = result.value
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(errno.ESRCH, f"Process {self.pid} has ended")
        return status

    @property
    def stopped_registers(self) -> Registers:
        """The registers at the time of the stop."""
        return self._registers

    def _read_registers(self) -> Registers:
        registers = self._machine.register_type()
        self._transfer_set(_GETREGSET, _GENERAL_REGISTERS, ctypes.addressof(registers), ctypes.sizeof(registers))
        return registers

    def _set_registers(self, registers: Registers) -> None:
        self._transfer_set(_SETREGSET, _GENERAL_REGISTERS, ctypes.addressof(registers), ctypes.sizeof(registers))
        for kind, content in self._machine.idle_sets:
            self._write_set(_RegisterSet(kind, content))

    def _read_preserved(self) -> _RegisterSet | None:
        for kind in self._machine.preserved_kinds:
            buffer = ctypes.create_string_buffer(_MAX_SET_BYTES)
            try:
                size = self._transfer_set(_GETREGSET, kind, ctypes.addressof(buffer), _MAX_SET_BYTES)
            except OSError:  # this processor lacks it
                continue
            return _RegisterSet(kind, buffer.raw[:size])
        return None

    def _write_set(self, registers: _RegisterSet) -> None:
        buffer = ctypes.create_string_buffer(registers.content, len(registers.content))
        self._transfer_set(_SETREGSET, registers.kind, ctypes.addressof(buffer), len(registers.content))

    def _transfer_set(self, request: int, kind: int, address: int, size: int) -> int:
        span = _IoVec(address, size)
        _call_ptrace(request, self.pid, kind, ctypes.addressof(span))
        return int(span.size)

    def _set_mask(self, mask: int) -> None:
        value = ctypes.c_uint64(mask)
        _call_ptrace(_SETSIGMASK, self.pid, _MASK_BYTES, ctypes.addressof(value))

    def resolve_restart(self, *, patience_s: float) -> None:
        """Find the registers that resume an interrupted system call, on machines where the kernel shows them late."""
        name = self._machine.restart_register
        if not name or not self._is_at_syscall():
            return
        before = self._registers
        try:
            # The kernel resumes the call up to its entry, and skips it there.
            entered = self._run_request(_SYSEMU, before, patience_s)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return  # before Linux 5.3: an interrupted sleep restarts
        self.step_once(before, patience_s=patience_s)  # leave the entry
        self._registers = before.with_values(**{name: getattr(entered, name)})

    def _is_at_syscall(self) -> bool:
        # -1 if nothing can be read there, which is not an instruction either.
        word = int(_libc.ptrace(_PEEK, self.pid, self._machine.read_position(self._registers), 0))
        code = self._machine.syscall_code
        return (word & (2**64 - 1)).to_bytes(8, sys.byteorder).startswith(code)

    def step_once(self, registers: Registers, *, patience_s: float) -> Registers:
        """Execute one instruction with these registers and return the resulting ones. Raises DidNotStop."""
        return self._run_request(_SINGLESTEP, registers, patience_s)

    def run_call(self, registers: Registers, *, patience_s: float) -> Registers:
        """Let the thread run to a breakpoint; return its registers there.

        Raises DidNotStop, or ChildProcessError after a fault. The thread is stopped in both cases.
        """
        return self._run_request(_CONT, registers, patience_s)

    def _run_request(self, request: int, registers: Registers, patience_s: float) -> Registers:
        self._set_registers(registers)
        _call_ptrace(request, self.pid)
        status = self._await_trap(request, time.monotonic() + patience_s)
        number = os.WSTOPSIG(status)
        if number != signal.SIGTRAP:
            raise ChildProcessError(f"Process {self.pid} received signal {number} during our call")
        return self._read_registers()

    def _await_trap(self, request: int, deadline_s: float) -> int:
        """Wait for the end of our call. On a busy machine the thread may not run for a while."""
        interrupted = False
        while True:
            try:
                status = self._wait_for_stop(deadline_s)
            except DidNotStop:
                _call_ptrace(_INTERRUPT, self.pid)
                # Wait forever from now on: detaching would leave the thread in the middle of our call.
                interrupted, deadline_s = True, math.inf
                continue
            if status >> 16 != _EVENT_STOP:
                return status
            if interrupted:
                raise DidNotStop(f"Process {self.pid} did not return from our call")
            # The whole job was stopped meanwhile: that takes effect after we detach.
            _call_ptrace(request, self.pid)

    def release_thread(self) -> None:
        """Restore registers and the signal mask, and let the thread continue."""
        try:
            self._set_registers(self._registers)
            self._set_mask(self._mask.value)
            if self._preserved is not None and self._read_preserved() != self._preserved:
                self._write_set(self._preserved)
        finally:
            self._detach_thread()
            self.stopped_s, self.cpu_s = time.monotonic() - self._began_s, time.thread_time() - self._began_cpu_s

    def _detach_thread(self) -> None:
        try:
            _call_ptrace(_DETACH, self.pid)
        except ProcessLookupError:
            # It has ended, or it does not stop and the kernel releases it when our thread ends.
            return
