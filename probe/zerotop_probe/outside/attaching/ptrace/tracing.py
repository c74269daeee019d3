"""Stopping a thread with ptrace on Linux and accessing its registers and memory. See ptrace(2).

A ``Machine`` describes what differs between processors.

We may be killed at any moment, and the kernel then lets the thread continue as it is. So before it runs anything for us, a
frame lies below its stack as for a signal handler, and all that it runs ends with ``rt_sigreturn``, by which it restores
itself: registers, vector registers and signal mask. It is stopped at system calls, never by a breakpoint or a single step,
which would end it with SIGTRAP once we are gone. An interrupted system call that has its own timeout then starts anew.

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

from zerotop_probe.outside.attaching.ptrace.arch import Machine, Registers, RegisterSet, Rescue

_PEEK, _CONT, _DETACH, _SYSCALL = 1, 7, 17, 24
_GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4204, 0x4205, 0x4206, 0x4207, 0x420A, 0x420B
_GENERAL_REGISTERS = 1  # NT_PRSTATUS
_MAX_SET_BYTES = 1 << 14
_EVENT_STOP = 128
# A stop at a system call is then no SIGTRAP, which the thread would get if we were killed before we noticed it.
_MARK_CALLS, _CALL_STOP = 1, signal.SIGTRAP | 0x80
_WAIT_ALL = 0x40000000
_BY_PID = 1  # P_PID
_CODE_AT, _PID_AT, _STATUS_AT = 2, 4, 6  # in siginfo, as ints
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
_libc.waitid.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_int]
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
        self._rescue: Rescue | None = None
        self._vectors: RegisterSet | None = None
        time.sleep(0)  # let other threads of ours run now rather than during the stop
        _call_ptrace(_SEIZE, pid, data=_MARK_CALLS)
        try:
            if not is_same():
                raise ProcessLookupError(errno.ESRCH, f"Process {pid} has ended")
            self._began_s, self._began_cpu_s = time.monotonic(), time.thread_time()
            self._interrupt_thread(time.monotonic() + patience_s)
            self._registers = self._first_registers = self._read_registers()
            if machine.restarts_late and self._is_at_syscall():
                self._resolve_restart(time.monotonic() + patience_s)
        except BaseException:  # also KeyboardInterrupt: the thread must not stay stopped
            self._detach_thread()
            raise

    def _interrupt_thread(self, deadline_s: float) -> None:
        """Stop the thread, and deliver the signals that come first. Should we end meanwhile, the kernel delivers them."""
        _call_ptrace(_INTERRUPT, self.pid)
        while (status := self._wait_for_stop(deadline_s, os.WNOWAIT)) >> 8 != _EVENT_STOP:
            _call_ptrace(_CONT, self.pid, 0, 0 if status == _CALL_STOP else status)

    def _wait_for_stop(self, deadline_s: float, option: int = 0) -> int:
        """Return the stop's signal, with its event in the second byte."""
        begin_s = time.monotonic()
        siginfo = (ctypes.c_int * 32)()
        address, options = ctypes.addressof(siginfo), os.WNOHANG | os.WSTOPPED | os.WEXITED | _WAIT_ALL | option
        while _check_result(_libc.waitid(_BY_PID, self.pid, address, options)) or not siginfo[_PID_AT]:
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise DidNotStop(f"Process {self.pid} did not stop in time")
            waited_s = now_s - begin_s
            poll_s = min(_POLL_S + _POLL_SHARE * waited_s, deadline_s - now_s)
            _await_stop(poll_s, keep_lock=waited_s < _KEEP_LOCK_S)
        if siginfo[_CODE_AT] not in (os.CLD_TRAPPED, os.CLD_STOPPED):
            raise ProcessLookupError(errno.ESRCH, f"Process {self.pid} has ended")
        return int(siginfo[_STATUS_AT])

    def _read_registers(self) -> Registers:
        registers = self._machine.register_type()
        self._transfer_set(_GETREGSET, _GENERAL_REGISTERS, ctypes.addressof(registers), ctypes.sizeof(registers))
        return registers

    def _set_registers(self, registers: Registers) -> None:
        self._transfer_set(_SETREGSET, _GENERAL_REGISTERS, ctypes.addressof(registers), ctypes.sizeof(registers))
        for kind, content in self._machine.idle_sets:
            self._write_set(RegisterSet(kind, content))

    def _read_vectors(self) -> RegisterSet | None:
        for kind in self._machine.preserved_kinds:
            buffer = ctypes.create_string_buffer(_MAX_SET_BYTES)
            try:
                size = self._transfer_set(_GETREGSET, kind, ctypes.addressof(buffer), _MAX_SET_BYTES)
            except OSError:  # this processor lacks it
                continue
            return RegisterSet(kind, buffer.raw[:size])
        return None

    def _write_set(self, registers: RegisterSet) -> None:
        buffer = ctypes.create_string_buffer(registers.content, len(registers.content))
        self._transfer_set(_SETREGSET, registers.kind, ctypes.addressof(buffer), len(registers.content))

    def _transfer_set(self, request: int, kind: int, address: int, size: int) -> int:
        span = _IoVec(address, size)
        _call_ptrace(request, self.pid, kind, ctypes.addressof(span))
        return int(span.size)

    def _set_mask(self, mask: int) -> None:
        value = ctypes.c_uint64(mask)
        _call_ptrace(_SETSIGMASK, self.pid, _MASK_BYTES, ctypes.addressof(value))

    def _is_at_syscall(self) -> bool:
        # -1 if nothing can be read there, which is not an instruction either.
        word = int(_libc.ptrace(_PEEK, self.pid, self._machine.read_position(self._registers), 0))
        code = self._machine.syscall_code
        return (word & (2**64 - 1)).to_bytes(8, sys.byteorder).startswith(code)

    def _resolve_restart(self, deadline_s: float) -> None:
        """Let the thread begin an interrupted system call again, and interrupt it there: then its registers show how."""
        _call_ptrace(_SYSCALL, self.pid)
        self._wait_for_stop(deadline_s, os.WNOWAIT)
        self._interrupt_thread(deadline_s)
        self._registers = self._read_registers()
        if self._machine.read_position(self._registers) != self._machine.read_position(self._first_registers):
            self._first_registers = self._registers  # it has returned

    def plant_rescue(self, memory: int, restorer: int, stack: range) -> Rescue:
        """Write the frame below the thread's stack, and block its signals: they stay queued until it is released.

        ``memory``: see :func:`write_memory`; ``restorer``: the address of a call of ``rt_sigreturn``; ``stack``: the
        addresses of the main thread's stack. Raises OSError.
        """
        mask = ctypes.c_uint64()
        self._vectors = self._read_vectors()
        _call_ptrace(_GETSIGMASK, self.pid, _MASK_BYTES, ctypes.addressof(mask))
        self._mask = mask.value
        rescue = self._machine.build_rescue(self._first_registers, self._vectors, mask=self._mask, restorer=restorer)
        if self._machine.read_stack(self._registers) not in stack:  # another may have no room for the frame
            raise ChildProcessError(f"Process {self.pid} runs a signal handler or a coroutine on a stack of its own")
        write_memory(memory, rescue.frame, rescue.address)
        self._set_registers(rescue.registers)
        self._rescue = rescue
        self._set_mask(_BLOCKED)
        return rescue

    def run_to_call(self, registers: Registers, number: int, *, patience_s: float) -> Registers:
        """Let the thread run with these registers until it begins this system call; return the registers there.

        Raises DidNotStop, or ChildProcessError after a fault. The thread is stopped in both cases.
        """
        deadline_s = time.monotonic() + patience_s
        self._set_registers(registers)
        while True:
            self._run_to_call_stop(deadline_s)
            entered = self._read_registers()
            if self._machine.read_call(entered) == number:
                return entered
            self._run_to_call_stop(deadline_s)  # the end of another call

    def finish_call(self, *, patience_s: float) -> Registers:
        """Let the thread execute the system call that it begins; return the registers after it. Raises as above."""
        self._run_to_call_stop(time.monotonic() + patience_s)
        return self._read_registers()

    def _run_to_call_stop(self, deadline_s: float) -> None:
        """Continue to the begin or the end of a system call. On a busy machine the thread may not run for a while."""
        while True:
            _call_ptrace(_SYSCALL, self.pid)
            try:
                status = self._wait_for_stop(deadline_s)
            except DidNotStop:
                # Wait forever now: the thread can be restored only while it is stopped.
                _call_ptrace(_INTERRUPT, self.pid)
                self._wait_for_stop(math.inf)
                raise DidNotStop(f"Process {self.pid} did not return from our call") from None
            if status == _CALL_STOP:
                return
            if status >> 8 != _EVENT_STOP:
                raise ChildProcessError(f"Process {self.pid} received signal {status} during our call")
            # The whole job was stopped meanwhile: that takes effect after we detach.

    def release_thread(self) -> None:
        """Restore registers and the signal mask, and let the thread continue."""
        try:
            if self._rescue is not None:
                self._restore_thread(self._rescue)
        finally:
            self._detach_thread()
            self.stopped_s, self.cpu_s = time.monotonic() - self._began_s, time.thread_time() - self._began_cpu_s

    def _restore_thread(self, rescue: Rescue) -> None:
        # Without the system call that it may be about to make. The kernel resumes an interrupted one only from here.
        self._set_registers(rescue.registers)
        _call_ptrace(_INTERRUPT, self.pid)
        status = 0
        while status >> 8 != _EVENT_STOP:
            _call_ptrace(_CONT, self.pid)
            status = self._wait_for_stop(math.inf)
        if self._vectors is not None and self._read_vectors() != self._vectors:
            self._write_set(self._vectors)
        self._set_mask(self._mask)
        self._set_registers(self._registers)  # the last: until here, the thread would restore itself

    def _detach_thread(self) -> None:
        try:
            _call_ptrace(_DETACH, self.pid)
        except ProcessLookupError:
            # It has ended, or it does not stop and the kernel releases it when our thread ends.
            return
