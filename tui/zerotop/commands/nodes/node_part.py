"""A node's part of a recording that began on another node: its sampler, and its process that sends it there."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from pathlib import Path

from zerotop.commands.common.errors import Problem
from zerotop.commands.nodes import keys
from zerotop_probe.outside.attaching.jobs import find_job
from zerotop_probe.outside.attaching.remote_agent import Refused, ensure_recorded
from zerotop_probe.outside.job.daemon import AgentError
from zerotop_probe.recording.directory import read_recording_info
from zerotop_probe.recording.node_part import PART_OF, make_lock_name

_LOG = "forward.log"
_MAX_DESCRIPTORS = 4096
# The token comes by ssh before the job starts.
_KEY_S = 20.0
_POLL_S = 0.2


def begin_part(part: str, pid: int, lock: int) -> None:
    """Leave the rank that has started us alone, and start this node's sampler. Raises Problem."""
    os.closerange(3, lock)
    os.closerange(max(3, lock + 1), _MAX_DESCRIPTORS)  # those of the job that it would pass on to anybody
    os.chdir("/")
    with contextlib.suppress(OSError):
        log = os.open(os.path.join(part, _LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        sys.stderr.flush()
        os.dup2(log, 2)
        os.close(log)
    job = find_job(pid)
    if job is None:
        raise Problem(f"Process {pid} has ended")
    try:
        ensure_recorded(part, job)
    except (Refused, AgentError, OSError) as error:
        raise Problem(f"This node has no sampler: {error}") from error


def is_apart(part: str) -> bool:
    """Whether the part has a folder of its own, from which it is sent."""
    return PART_OF in read_recording_info(part)


def await_token(job: str) -> str:
    """Return the job's token from the file on this node; "" if none comes."""
    deadline_s = time.monotonic() + _KEY_S
    while not (token := keys.read_key(job)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return token


def end_part(part: str, job: str) -> None:
    """Remove what has been sent completely, and the token that came for it."""
    keys.remove_key(job, sent=True)
    if is_apart(part) and Path(part).is_dir():
        shutil.rmtree(part, ignore_errors=True)


_kept: list[socket.socket] = []


def lock_part(part: str) -> bool:
    """Whether no other process of this node sends the part; none can as long as we run."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(make_lock_name(part))
    except OSError:
        lock.close()
        return False
    _kept.append(lock)
    return True
