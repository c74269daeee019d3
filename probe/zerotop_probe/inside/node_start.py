"""On a node where nobody has started zerotop, the first rank starts the process that records and sends the node's part."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping

from zerotop_probe.recording import directory, launchers
from zerotop_probe.recording.node_part import NODES_VARIABLE, PART_OF, NodesPlan, find_folder, make_lock_name

# The shell ends at once, so that the job has no child that it does not know.
_SCRIPT = '"$@" &'
# By these a process is known as one of the job.
_OF_RANKS = {directory.SESSION_VARIABLE, NODES_VARIABLE, *launchers.RANK, *launchers.LOCAL_RANK}
_PROGRAM = "zerotop"  # from the PATH, where the Python that the plan names is missing


def start_part(environment: Mapping[str, str]) -> None:
    """Start it if this is a rank on such a node and no other rank has. Takes some milliseconds, on one rank of a node."""
    plan = NodesPlan.read(environment)
    if plan is None or launchers.read_number(environment, launchers.RANK) is None:
        return
    if signal.getsignal(signal.SIGCHLD) not in (signal.SIG_DFL, signal.SIG_IGN):  # the job would notice our child
        return
    part = find_folder(environment)
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as lock:
        lock.bind(make_lock_name(part))
        lock.set_inheritable(True)
        _create_part(part, environment[directory.SESSION_VARIABLE], plan)
        _spawn(plan, part, lock.fileno(), environment)


def _create_part(part: str, recording: str, plan: NodesPlan) -> None:
    if part != recording and not directory.read_recording_info(part):
        facts = {**plan.settings, PART_OF: recording}
        command = getattr(sys, "orig_argv", sys.argv)
        directory.create_recording(command, path=part, launcher=launchers.find_launcher(os.environ), **facts)


def _spawn(plan: NodesPlan, part: str, lock: int, environment: Mapping[str, str]) -> None:
    command = plan.command if os.access(plan.command[0], os.X_OK) else [_PROGRAM]
    null = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    arguments = ["forward", part, "--for-rank", str(os.getpid()), "--lock", str(lock)]
    names = {"PYTHONEXECUTABLE": "PYTHONZEROTOP_EXECUTABLE"}  # see own_python
    variables = {names.get(name, name): value for name, value in environment.items() if name and name not in _OF_RANKS}
    variables.update(ZEROTOP_COLLECTOR=plan.url, ZEROTOP_JOB=plan.job)
    shell = ["sh", "-c", _SCRIPT, "sh", *command, *arguments]
    pid = os.posix_spawn("/bin/sh", shell, variables, file_actions=null, setsid=True)
    os.waitpid(pid, 0)
