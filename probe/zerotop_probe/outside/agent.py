"""The process beside a job on its node: launches it, records its output, samples, waits, records how it ended.

The job never depends on it: killed at any moment, it leaves a job that goes on and a recording that ends there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence

from zerotop_probe.outside import job as jobs
from zerotop_probe.outside.echo import Echo, same_file
from zerotop_probe.outside.job import ChildJob, CommandError, Job, WatchedJob, check_command
from zerotop_probe.outside.node import TICK_S, Node
from zerotop_probe.outside.output import OutputRecorder
from zerotop_probe.outside.proc import Process
from zerotop_probe.outside.stop import GRACE_S, STOP_REQUEST, Stopper
from zerotop_probe.outside.stream import Stream
from zerotop_probe.recording import events, redact
from zerotop_probe.recording.writer import EventWriter, Identity

__all__ = ["CommandError", "check_command", "launch_in_background", "run_in_foreground", "watch", "watch_in_background"]

# Output is looked at at every half tick.
_PERIOD_S = TICK_S / 2
# How long the foreground stays for ranks that outlive their launcher, as DeepSpeed's do after Ctrl-C, to pass on their words.
_LINGER_S = 5.0

_TO_JOB = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
# A signal that the terminal or the kernel sent has reached the whole process group, the job with it.
_SI_KERNEL = 0x80
