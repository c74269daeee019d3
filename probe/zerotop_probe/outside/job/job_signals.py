"""Pass the signals of the agent on to the job, so that each signal reaches the job exactly once.

In the foreground the job is in the agent's process group, so signals from the terminal and signals to the whole group reach
it by themselves. Signals to the agent alone are meant for the job and are passed on. The holder tells them apart: it is in
the same group and ignores signals, so a signal that also reached the holder was not for the agent alone.
"""

from __future__ import annotations

import os
import signal
import time

from zerotop_probe.outside.job.output_recording import HOLDER_MESSAGE, OutputRecording
from zerotop_probe.outside.job.shutdown import STOP_REQUEST
from zerotop_probe.outside.procfs import Process

# In the background these request a stop, and all others are ignored.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# In the foreground these end zerotop once the job's first process has ended.
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Stop signals of terminals and shells. The agent stops when they have stopped the job, so that the shell notices.
TERMINAL_STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

# Python ignores these, so it is not known whether our parent did.
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
# If the kernel sends these they are about the agent: its children, the holder's messages, its own use of the processor.
_OWN_BY_KERNEL = (signal.SIGCHLD, HOLDER_MESSAGE, signal.SIGXCPU)
# A sender that signals every process of a job takes this long, in seconds, on a node whose cores are all in use.
_GROUP_S = 0.5
_QUERY_S = 0.005


def list_signals() -> set[int]:
    """Return all signals that can be blocked and waited for."""
    return {*map(int, signal.valid_signals())} - {signal.SIGKILL, signal.SIGSTOP}


def list_handled_signals() -> set[int]:
    """Return all of these but those that our parent set to be ignored, as nohup does."""
    signals = list_signals()
    ignored = {number for number in signals if signal.getsignal(number) == signal.SIG_IGN}
    return signals - (ignored - {signal.SIGCHLD, *PYTHON_IGNORES})


def pass_on(info: signal.struct_siginfo, job: Process, output: OutputRecording) -> bool:
    """Send a signal that the agent has received on to the job, unless the job has received it too.

    Return True if it is a request to the agent instead: to stop the job.
    """
    number = info.si_signo
    is_own = info.si_pid == os.getpid() or (number in _OWN_BY_KERNEL and info.si_code > 0)
    if is_own or _was_sent_to_group(number, output):
        return False
    if number != STOP_REQUEST:
        job.send_signal(number)
    return number == STOP_REQUEST


def _was_sent_to_group(number: int, output: OutputRecording) -> bool:
    deadline_s = time.monotonic() + _GROUP_S
    while not output.took_signal(number):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_QUERY_S)
    # ``timeout`` signals its child and then the group: the job has received one signal, so ours are one as well.
    if number < signal.SIGRTMIN:
        signal.sigtimedwait([number], 0)
    return True


def stop_like(number: int) -> None:
    """Stop this process by a terminal's stop signal until it is continued."""
    # Sent while it is blocked, so that together with one from the terminal it is one.
    os.kill(os.getpid(), number)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def die_of(number: int) -> None:
    """End this process by a signal, as its job did. Return if that is impossible, as for a container's first process."""
    import resource

    # The job's core file, which may be the same file, is the interesting one.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
