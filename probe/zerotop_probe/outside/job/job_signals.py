"""Pass the signals of the agent on to the job, so that each signal reaches the job exactly once.

In the foreground the job is in the agent's process group, so signals from the terminal and signals to the whole group reach
it by themselves. Signals to the agent alone are meant for the job and are passed on. The holder tells them apart: it is in
the same group and ignores signals, so a signal that also reached the holder was not for the agent alone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import time
from collections.abc import Collection

from zerotop_probe.outside.job.output_recording import OutputRecording
from zerotop_probe.outside.job.shutdown import STOP_REQUEST
from zerotop_probe.outside.procfs import ProcessHandle

# In the background these request a stop, and all others are ignored.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# In the foreground these end zerotop once the job's first process has ended.
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Stop signals of terminals and shells. The agent stops when they have stopped the job, so that the shell notices.
TERMINAL_STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

# Python ignores these, so it is not known whether our parent did.
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
# If the kernel sends these they are about the agent: its children, its own use of the processor.
_OWN_BY_KERNEL = (signal.SIGCHLD, signal.SIGXCPU)
# A sender that signals every process of a job takes this long, in seconds, on a node whose cores are all in use.
_GROUP_S = 0.5
_QUERY_S = 0.005
_SIGNALFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
# Where there is no signalfd, signals are looked for this often.
_LOOK_S = 0.02


class SignalWaiter:
    """Waits for signals that are blocked, or for something to read.

    Python's ``sigtimedwait`` returns memory that nobody has filled when the process was stopped and continued and the time
    is over meanwhile: signal 0, or a signal that came long before. Without a time to wait it cannot be interrupted.
    """

    def __init__(self, signals: Collection[int]) -> None:
        self._signals = signals
        numbers = sum(1 << number - 1 for number in signals)
        try:
            mask = struct.pack("16L", numbers, *[0] * 15)
            self._descriptor = ctypes.CDLL(None).signalfd(-1, mask, _SIGNALFD_FLAGS)
        except (OSError, AttributeError):
            self._descriptor = -1

    def take_signal(self) -> signal.struct_siginfo | None:
        """Return a signal that has come, without waiting."""
        return signal.sigtimedwait(self._signals, 0)

    def wait_for_signal(self, seconds: float, messages: int) -> signal.struct_siginfo | None:
        """Return a signal; None when the time is over or the descriptor ``messages``, unless it is negative, can be read."""
        waiting = select.poll()
        for descriptor in (self._descriptor, messages):
            if descriptor >= 0:
                waiting.register(descriptor, select.POLLIN)
        waiting.poll(1000 * max(0.0, seconds if self._descriptor >= 0 else min(seconds, _LOOK_S)))
        return self.take_signal()

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def list_signals() -> set[int]:
    """Return all signals that can be blocked and waited for."""
    return {*map(int, signal.valid_signals())} - {signal.SIGKILL, signal.SIGSTOP}


def list_handled_signals() -> set[int]:
    """Return all of these but those that our parent set to be ignored, as nohup does."""
    signals = list_signals()
    ignored = {number for number in signals if signal.getsignal(number) == signal.SIG_IGN}
    return signals - (ignored - {signal.SIGCHLD, *PYTHON_IGNORES})


def pass_on(info: signal.struct_siginfo, job: ProcessHandle, output: OutputRecording) -> bool:
    """Send a signal that the agent has received on to the job, unless the job has received it too.

    Return True if it is a request to the agent instead: to stop the job.
    """
    number = info.si_signo
    is_own = info.si_pid in (os.getpid(), output.holder_pid) or (number in _OWN_BY_KERNEL and info.si_code > 0)
    if is_own or _was_sent_to_group(number, output):
        return False
    if number != STOP_REQUEST:
        job.send_signal(number)
    return number == STOP_REQUEST


def _was_sent_to_group(number: int, output: OutputRecording) -> bool:
    deadline_s = time.monotonic() + _GROUP_S
    is_late = False
    while not output.took_signal(number):
        if is_late:
            return False
        time.sleep(_QUERY_S)
        is_late = time.monotonic() > deadline_s  # asked once more, as both may have been stopped meanwhile
    # ``timeout`` signals its child and then the group: the job has received one signal, so ours are one as well.
    if number < signal.SIGRTMIN:
        signal.sigtimedwait([number], 0)
    return True


def stop_like(number: int, output: OutputRecording) -> None:
    """Stop this process by a terminal's stop signal until it is continued, or its job is, which the holder sees."""
    output.note_stop()
    # Sent while it is blocked, so that together with one from the terminal it is one.
    os.kill(os.getpid(), number)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    output.note_continuing()


def die_of(number: int) -> None:
    """End this process by a signal, as its job did. Return if that is impossible, as for a container's first process."""
    import resource

    # The job's core file, which may be the same file, is the interesting one.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
