"""The command that runs on another node through ssh and records that node's part of a job.

The request is one JSON object and so is the answer, on its own line. The sampler that it starts outlives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any, NoReturn

from zerotop_probe.outside import own_python
from zerotop_probe.outside.attaching import attaching
from zerotop_probe.outside.attaching.jobs import FoundJob, find_jobs
from zerotop_probe.outside.attaching.probe_entry import Entry
from zerotop_probe.outside.attaching.rendezvous import Rendezvous, find_local_part
from zerotop_probe.outside.job import agent, job_control
from zerotop_probe.outside.job.job import CommandError
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording import clock, directory, node_part
from zerotop_probe.recording.plain_files import open_plain_file
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR

ANSWER_KEY = "zerotop_there"
SEND = "send"
"""The action to become the forwarder of this node's part."""
# The longest delay until a new file is visible through a network filesystem.
_SHARED_PATIENCE_S = 3.0
_POLL_S = 0.1
# Connecting takes up to ten seconds; a larger difference is between the clocks.
_MIN_CLOCK_OFFSET_NS = 30_000_000_000


class Refused(Exception):
    """The request is refused; the text says why and follows the node's name and a colon."""


def main() -> int:
    """Handle the request in the first argument. Return 0; errors are in the answer."""
    return print_answer(sys.argv[1])


def print_answer(text: str) -> int:
    """Handle a request and print the answer. Return 0."""
    print(f"\n{json.dumps({ANSWER_KEY: answer_request(text)})}", flush=True)
    return 0


def answer_request(text: str) -> dict[str, Any]:
    """Handle a request and return the answer."""
    facts: dict[str, Any] = {"host": clock.read_hostname(), "format": [FORMAT_MAJOR, FORMAT_MINOR]}
    try:
        return facts | _handle_request(json.loads(text))
    except Refused as error:
        return facts | {"why_not": str(error)}
    except (OSError, agent.AgentError, ValueError, KeyError, TypeError) as error:
        return facts | {"why_not": f"zerotop failed there ({type(error).__name__}: {error})"}


def _handle_request(request: dict[str, Any]) -> dict[str, Any]:
    if request.get("action") == SEND:
        _become_forwarder(request["recording"], request["part"], request["from"])
    if request["from"] == [clock.read_hostname(), clock.read_boot_id()]:
        return {"here": True}
    major, minor = request["format"]
    if major != FORMAT_MAJOR:
        raise Refused(
            f"zerotop there records in format {FORMAT_MAJOR}.{FORMAT_MINOR}, but this recording has format {major}.{minor}. "
            "Install the same version on both nodes"
        )
    recording = _find_folder(request)
    is_part = recording != request["recording"]
    action = request["action"]
    if action == "join":
        job = find_local_part(find_jobs(), Rendezvous.from_json(request["meeting"]))
        if job is None:
            raise Refused("no rank of this job runs there")
        if is_part and not directory.read_recording_info(recording):
            facts = {node_part.PART_OF: request["recording"]}
            directory.create_recording(job.command, path=recording, launcher=job.launcher, **facts)
        ahead_ns = 0 if is_part else _measure_ahead_ns(request.get("unix_ns"))  # else its forwarder aligns the clock
        joined = _join_job(recording, job, enter=bool(request["enter"]), ahead_ns=ahead_ns)
        return joined | {"ahead_s": ahead_ns / 1e9} | ({"part": recording} if is_part else {})
    if is_part and not directory.read_recording_info(recording):
        raise Refused("it takes no part")
    if action == "leave":
        return _describe_entries(attaching.end_recording(recording), {})
    if action == "stop":
        job_control.request_stop(recording)
        return {}
    raise Refused(f"zerotop there is too old to {action} a job. Install the same version on both nodes")


def _become_forwarder(recording: str, part: str, node: list[str]) -> NoReturn:
    """Send this node's part, if there is one by now; the exit code is 0 if this node sees the recording itself."""
    info = directory.read_recording_info(recording)
    if [info.get("host"), info.get("boot")] == node:
        sys.exit()
    part = part or node_part.make_folder(recording)
    if not directory.read_recording_info(part):
        sys.exit(1)
    command = own_python.build_command("zerotop.cli", "forward", part, "--by-pipe")
    os.execv(command[0], command)


def _find_folder(request: dict[str, Any]) -> str:
    """Return the recording's folder if it is also here and we may write to it, else that of this node's part."""
    recording, path = request["recording"], os.path.join(request["recording"], os.path.basename(request["token"]))
    part = node_part.make_folder(recording)
    deadline_s = time.monotonic() + _SHARED_PATIENCE_S
    while directory.read_recording_info(part).get(node_part.PART_OF) != recording and time.monotonic() < deadline_s:
        if _read_text(path) == request["secret"]:  # a file that the caller has made in its folder
            return recording if os.access(recording, os.W_OK | os.X_OK) else part
        time.sleep(_POLL_S)
    return part


def _read_text(path: str) -> str:
    with contextlib.suppress(OSError, ValueError), open(open_plain_file(path), encoding="ascii") as file:
        return file.read()
    return ""


def _measure_ahead_ns(requested_ns: Any) -> int:
    """Return how far this node's clock is ahead of the caller's; 0 if the difference may be the connection's delay."""
    ahead_ns = time.time_ns() - requested_ns if isinstance(requested_ns, int) else 0
    return ahead_ns if abs(ahead_ns) > _MIN_CLOCK_OFFSET_NS else 0


def _join_job(recording: str, job: FoundJob, *, enter: bool, ahead_ns: int) -> dict[str, Any]:
    ensure_recorded(recording, job, ahead_ns=ahead_ns)
    numbers = {rank.process: rank.rank for rank in job.ranks}
    entries = attaching.enter_ranks(recording, [(number, process) for process, number in numbers.items()]) if enter else []
    return _describe_entries(entries, numbers) | {"ranks": len(job.ranks)}


def ensure_recorded(recording: str, job: FoundJob, *, ahead_ns: int = 0) -> None:
    """Have a sampler of this node record the job. Raise Refused, OSError, AgentError."""
    facts = job_control.read_facts(recording)
    if facts.job is None or facts.detached or not facts.is_alive():
        attaching.note_joined(recording, job, ahead_ns=ahead_ns)
    try:
        agent.watch_in_background(recording)
    except CommandError as error:
        raise Refused(str(error)) from error
    if not job_control.is_sampler_alive(recording):
        raise Refused(job_control.CANNOT_WRITE.format(folder=recording))


def _describe_entries(entries: list[Entry], numbers: dict[ProcessHandle, int | None]) -> dict[str, Any]:
    """Return the results as JSON values, with ranks where they are known."""
    return {
        "entries": [
            {
                "rank": numbers.get(entry.process),
                "pid": entry.process.pid,
                "said": entry.reply,
                "why_not": entry.why_not,
                "pending": entry.is_pending,
            }
            for entry in entries
        ]
    }
