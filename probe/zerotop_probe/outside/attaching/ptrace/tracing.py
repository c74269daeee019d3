"""ptrace on Linux: one thread held still, its registers, its memory. See ptrace(2).

What differs between processors is told by a ``Machine``.

While a thread is held, ours keeps the interpreter's lock: given away, it would come back after 5 ms each time where another
thread of ours computes, as one that draws a screen does.
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

# What a fault in our own call would raise. Blocked, the kernel would put the process's handler aside.
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
_BLOCKED = ~sum(1 << (number - 1) for number in FAULTS) & (2**64 - 1)

# A thread stops, and comes back from a call of ours, within some 20 us if a core is free for it, be it ours; then the kernel
# sends us SIGCHLD, which we wait for. To look again and again would take a shared core away from it, and set a timer each
# time: on a virtual machine that takes 20 to 40 us, at times a millisecond. We look all the same, now and then: the signal
# may go to another thread of ours, or be ignored. If it takes long our other threads are no longer kept waiting.
_LOOK_S, _LOOK_SHARE, _KEEP_LOCK_S = 0.0003, 0.5, 0.02
_STOP_SIGNAL = signal.SIGCHLD

_libc = ctypes.PyDLL(None, use_errno=True)  # unlike CDLL it keeps the interpreter's lock
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
    """A register set of a thread, its content as it was."""

    kind: int
    content: bytes


class DidNotStop(TimeoutError):
    """The thread did not come to a stop in time."""


def _check_result(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _call_ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    _check_result(_libc.ptrace(request, pid, address, data))


def write_memory(memory: int, content: bytes, address: int) -> None:
    """Writes to a process's memory through a descriptor of its ``/proc/PID/mem``. Raises OSError."""
    _check_result(_libc.pwrite(memory, content, len(content), address))


def is_still_there(memory: int, address: int) -> bool:
    """Whether the process has not ended since then, nor begun to run another program."""
    return int(_libc.pread(memory, ctypes.create_string_buffer(1), 1, address)) == 1


def is_one(memory: int, address: int) -> bool:
    """Whether an int of the process is 1."""
    content = ctypes.create_string_buffer(4)
    return int(_libc.pread(memory, content, 4, address)) == 4 and content.raw == b"\1\0\0\0"


def _await_stop(seconds: float, *, keep_lock: bool) -> None:
    """Returns when some thread that we trace may have stopped, or after so long (less than a second with ``keep_lock``)."""
    if keep_lock:
        signals, span = (ctypes.c_uint64 * 16)(1 << (_STOP_SIGNAL - 1)), _TimeSpec(0, int(1e9 * seconds))
        _libc.sigtimedwait(ctypes.addressof(signals), None, ctypes.addressof(span))
    else:
        signal.sigtimedwait({_STOP_SIGNAL}, seconds)


@contextlib.contextmanager
def raise_priority() -> Iterator[None]:
    """Where we may, we come before other programs.

    On a machine that has more to do than cores this makes a stop several times shorter.
    """
    policy, place = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, place)


class HeldThread:
    """One thread, stopped from the end of ``__init__`` to :meth:`release`.

    All calls come from one thread of ours, which ends soon after: only then does the kernel let go of one that did not stop.
    It has SIGCHLD blocked, and takes those of other children of ours too.
    """

    def __init__(self, pid: int, machine: Machine, *, patience_s: float, is_same: Callable[[], bool] = lambda: True) -> None:
        """Stops it. Raises PermissionError, ProcessLookupError; DidNotStop, and then it goes on as before, see above.

        ``same``: whether the number still means the process that is meant. When we ask it can no longer be reused.
        """
        self.pid = pid
        self._machine = machine
        self.stopped_s = self.cpu_s = 0.0  # known after release: how long, and what of that we computed ourselves
        time.sleep(0)  # if another thread of ours computes, it has its turn now, and not in the middle of this
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
            # Signals wait in the kernel, whole and in order, until the thread is released.
            self._set_mask(_BLOCKED)
        except BaseException:  # a Ctrl-C of ours too: nothing may leave it held
            self._detach_thread()
            raise

    def _await_interrupt(self, deadline_s: float) -> None:
        while True:
            status = self._wait_for_stop(deadline_s)
            if status >> 16 == _EVENT_STOP:
                return
            # A signal came first: it is delivered as if we were not there.
            _call_ptrace(_CONT, self.pid, 0, os.WSTOPSIG(status))

    def _wait_for_stop(self, deadline_s: float) -> int:
        began_s = time.monotonic()
        found = ctypes.c_int()
        place = ctypes.addressof(found)
        while not _check_result(_libc.waitpid(self.pid, place, os.WNOHANG | _WAIT_ALL)):
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise DidNotStop(f"Process {self.pid} does not come to a stop")
            waited_s = now_s - began_s
            look_s = min(_LOOK_S + _LOOK_SHARE * waited_s, deadline_s - now_s)
            _await_stop(look_s, keep_lock=waited_s < _KEEP_LOCK_S)
        status = found.value
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(errno.ESRCH, f"Process {self.pid} has ended")
        return status

    @property
    def stopped_registers(self) -> Registers:
        """As they were when the thread was stopped."""
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
            except OSError:  # this processor has none
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
        """Learns with which registers an interrupted system call will go on, where the kernel shows that late."""
        name = self._machine.restart_register
        if not name or not self._is_at_syscall():
            return
        before = self._registers
        try:
            # The kernel takes the call up, as far as its entrance: there it leaves it out.
            entered = self._run_request(_SYSEMU, before, patience_s)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return  # before Linux 5.3: a sleep of C begins anew
        self.step_once(before, patience_s=patience_s)  # out of the entrance
        self._registers = before.with_values(**{name: getattr(entered, name)})

    def _is_at_syscall(self) -> bool:
        # -1 if nothing can be read there, which is no instruction either.
        word = int(_libc.ptrace(_PEEK, self.pid, self._machine.read_position(self._registers), 0))
        code = self._machine.syscall_code
        return (word & (2**64 - 1)).to_bytes(8, sys.byteorder).startswith(code)

    def step_once(self, registers: Registers, *, patience_s: float) -> Registers:
        """Executes one instruction with these registers and returns what became of them. Raises DidNotStop."""
        return self._run_request(_SINGLESTEP, registers, patience_s)

    def run_call(self, registers: Registers, *, patience_s: float) -> Registers:
        """Lets the thread run until it meets a breakpoint; returns its registers there.

        Raises DidNotStop, and ChildProcessError if it came to a fault instead. It is stopped in both cases.
        """
        return self._run_request(_CONT, registers, patience_s)

    def _run_request(self, request: int, registers: Registers, patience_s: float) -> Registers:
        self._set_registers(registers)
        _call_ptrace(request, self.pid)
        status = self._await_trap(request, time.monotonic() + patience_s)
        number = os.WSTOPSIG(status)
        if number != signal.SIGTRAP:
            raise ChildProcessError(f"Process {self.pid} came to signal {number} in a call of ours")
        return self._read_registers()

    def _await_trap(self, request: int, deadline_s: float) -> int:
        """The stop that ends a call of ours. It may be late: a busy machine does not let the thread run for a while."""
        interrupted = False
        while True:
            try:
                status = self._wait_for_stop(deadline_s)
            except DidNotStop:
                _call_ptrace(_INTERRUPT, self.pid)
                # From now on without end: going away would leave the thread in the middle of our call.
                interrupted, deadline_s = True, math.inf
                continue
            if status >> 16 != _EVENT_STOP:
                return status
            if interrupted:
                raise DidNotStop(f"Process {self.pid} does not come back from a call of ours")
            # The whole job was stopped meanwhile: that waits until we have left.
            _call_ptrace(request, self.pid)

    def release_thread(self) -> None:
        """Puts registers and signals back as they were, and lets the thread go on."""
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
            # It has ended; or it does not stop at all, and the kernel lets it go when our thread ends.
            return
