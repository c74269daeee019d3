"""The parts of other nodes in a recording: where the processes of each node record, as their environment tells them.

``zerotop run`` gives the job one recording and a plan. Another node than the recording's own has a folder for its part, from
which it is sent; without a server the node writes to the recording itself if it sees it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from zerotop_probe.recording import clock
from zerotop_probe.recording.directory import SESSION_VARIABLE, read_recording_info

# Named as SESSION_VARIABLE is. It has no secret: DeepSpeed's launchers put such variables on command lines.
NODES_VARIABLE = "PYTHONZEROTOP_NODES"
# In the ``session.json`` of a part: the recording that it is a part of.
PART_OF = "part_of"


class NodesPlan(NamedTuple):
    """What a job's nodes need to know to take part in its recording."""

    host: str  # where the recording is
    boot: str
    url: str  # of the server; "" without one
    job: str
    command: list[str]  # of the process that records and sends a part; the part and a rank's pid follow
    settings: dict[str, Any]  # for the part's ``session.json``

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> NodesPlan | None:
        """Return the plan in an environment; None without a valid one, or on the recording's own node."""
        try:
            plan = cls(*json.loads(base64.urlsafe_b64decode(environment[NODES_VARIABLE])))
        except (KeyError, ValueError, TypeError):
            return None
        return None if (plan.host, plan.boot) == (clock.read_hostname(), clock.read_boot_id()) else plan

    def encode(self) -> str:
        """Return the value of the variable, of letters that no launcher's shell changes."""
        return base64.urlsafe_b64encode(json.dumps(self).encode()).decode()


def find_folder(environment: Mapping[str, str]) -> str:
    """Return the folder where a process with this environment records; "" without one."""
    recording = environment.get(SESSION_VARIABLE, "")
    plan = NodesPlan.read(environment) if recording else None
    if plan is None or (not plan.url and _is_recording_of(plan, recording)):
        return recording
    return make_folder(recording, environment.get("TMPDIR", ""))


def make_folder(recording: str, temporary: str = "") -> str:
    """Return the folder of this node's part of a recording: where that is on its node, or with temporary files."""
    name = f"{os.path.basename(recording)}@{clock.read_hostname()}"
    root = existing = os.path.dirname(recording)
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    if os.access(existing, os.W_OK | os.X_OK):
        return os.path.join(root, name)
    return os.path.join(temporary or "/tmp", f"zerotop-{os.geteuid()}-{name}")


def _is_recording_of(plan: NodesPlan, recording: str) -> bool:
    info = read_recording_info(recording)
    return (info.get("host"), info.get("boot")) == (plan.host, plan.boot)


def make_lock_name(folder: str) -> str:
    """Return the name of the socket that the process has that sends a node's part.

    Names in this space exist on one node, and as long as somebody has the socket.
    """
    return f"\0zerotop-{os.geteuid()}-{hashlib.sha256(folder.encode()).hexdigest()}"


def read_session_value(recording: str) -> str:
    """Return the value of SESSION_VARIABLE in the processes that write to a recording's folder."""
    return str(read_recording_info(recording).get(PART_OF) or recording)
