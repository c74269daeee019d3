"""The sender of a signal that ended processes, from messages of Slurm, torchrun and DeepSpeed's launcher.

The kernel does not report who sent SIGKILL. For other signals, a process sees the sender only in a handler of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from zerotop.recording.output.tail import PrintedLine
from zerotop_probe.recording.launchers import LAUNCHERS


class Reason(Enum):
    """Why something ended processes."""

    MEMORY = "memory"  # they used more than they may
    TIME = "time"  # the job had used its time
    PREEMPTED = "preempted"  # another job needs the nodes
    NODE = "node"  # a node has failed
    CANCELLED = "cancelled"  # somebody asked for it, or the scheduler gives no reason
    PEER = "peer"  # a launcher ends the ranks that are left


class Sender(NamedTuple):
    """Something that ended processes, as it printed it."""

    time_ns: int  # unix time of the line
    name: str  # in words
    reason: Reason
    pid: int | None = None  # the process that it ended; None for all of them, or if unknown
    job: str | None = None  # the scheduler's number


_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) (?P<job>[\w.]+) ON \S+ CANCELLED(?: AT \S+)?(?: DUE TO (?P<why>[A-Z ]+)[^*]*)? \*\*\*"
)
_WHY = {
    "TIME LIMIT": Reason.TIME,
    "PREEMPTION": Reason.PREEMPTED,
    "NODE FAILURE": Reason.NODE,
    "JOB REQUEUE": Reason.PREEMPTED,
}
# Since 21.08 "oom_kill", and the step as "StepId=".
_SLURM_MEMORY = re.compile(
    r"slurmstepd: error: (?:Detected [1-9]\d* oom[-_]kill event(?:\(?s?\)?) in (?:StepId=|step )(?P<step>\d+)"
    r"|(?:Job|Step|StepId=)\s?(?P<job>\d+)\S* exceeded (?:job |step |virtual )*memory limit)"
)
_SRUN_MEMORY = re.compile(r"srun: error: \S+: tasks? \S+: Out Of Memory")
_KILLS = tuple((launcher.title, re.compile(pattern)) for launcher in LAUNCHERS for pattern in launcher.kills)


def find_senders(lines: Sequence[PrintedLine]) -> Iterator[Sender]:
    """Yield the messages in one stream of output about who ended processes, in order."""
    for time_ns, text in lines:
        if (match := _CANCELLED.search(text)) is not None:
            yield Sender(time_ns, "Slurm", _WHY.get(match["why"] or "", Reason.CANCELLED), job=match["job"])
        elif (match := _SLURM_MEMORY.search(text)) is not None:
            yield Sender(time_ns, "Slurm", Reason.MEMORY, job=match["step"] or match["job"])
        elif _SRUN_MEMORY.search(text) is not None:
            yield Sender(time_ns, "Slurm", Reason.MEMORY)
        for title, kill in _KILLS:
            if (match := kill.search(text)) is not None:
                yield Sender(time_ns, title, Reason.PEER, pid=int(match["pid"]))
