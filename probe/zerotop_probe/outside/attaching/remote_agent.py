"""The side of another node: asked through ssh, it has that node's part of a job recorded in the common session.

It is asked by one JSON object, answers with another on a line of its own, and ends. What it has started stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import FoundJob, find_jobs
from zerotop_probe.outside.attaching.probe_entry import Entry
from zerotop_probe.outside.attaching.rendezvous import Rendezvous, find_local_part
from zerotop_probe.outside.job import agent, job_control
from zerotop_probe.outside.job.job import CommandError
from zerotop_probe.outside.procfs import Process
from zerotop_probe.recording import clock
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR

ANSWER_KEY = "zerotop_there"
# How long a file that was just written may take to be seen through a network filesystem.
_SHARED_PATIENCE_S = 3.0
_POLL_S = 0.1
# Connecting takes up to ten seconds: what differs by more is the clocks.
_MIN_CLOCK_OFFSET_NS = 30_000_000_000

_NOT_SHARED = (
    "it does not see the recording's folder {folder}, which has to be on a filesystem that all nodes share: choose such a "
    "one with --session"
)
_NOT_WRITABLE = "it may not write to the recording's folder {folder} as this user"


class Refused(Exception):
    """It is not done; the text says why, to stand after the node's name and a colon."""


def main() -> int:
    """Does what the first argument asks for. Returns 0: what went wrong is in the answer."""
    return print_answer(sys.argv[1])


def print_answer(text: str) -> int:
    """Prints the answer to a request. Returns 0."""
    print(f"\n{json.dumps({ANSWER_KEY: answer_request(text)})}", flush=True)
    return 0


def answer_request(text: str) -> dict[str, Any]:
    """What came of a request."""
    facts: dict[str, Any] = {"host": clock.read_hostname(), "format": [FORMAT_MAJOR, FORMAT_MINOR]}
    try:
        return facts | _handle_request(json.loads(text))
    except Refused as error:
        return facts | {"why_not": str(error)}
    except (OSError, agent.AgentError, ValueError, KeyError, TypeError) as error:
        return facts | {"why_not": f"zerotop failed there ({type(error).__name__}: {error})"}


def _handle_request(request: dict[str, Any]) -> dict[str, Any]:
    if request["from"] == [clock.read_hostname(), clock.read_boot_id()]:
        return {"here": True}
    major, minor = request["format"]
    if major != FORMAT_MAJOR:
        raise Refused(
            f"zerotop there records in format {FORMAT_MAJOR}.{FORMAT_MINOR}, and this session is of {major}.{minor}: "
            "install the same version on both"
        )
    session = request["session"]
    _check_shared(session, request["token"], request["secret"])
    action = request["action"]
    if action == "join":
        ahead_ns = _measure_ahead_ns(request.get("unix_ns"))
        meeting = Rendezvous.from_json(request["meeting"])
        return _join_job(session, meeting, enter=bool(request["enter"]), ahead_ns=ahead_ns) | {"ahead_s": ahead_ns / 1e9}
    if action == "leave":
        return _describe_entries(attaching.end_session(session), {})
    if action == "stop":
        job_control.request_stop(session)
        return {}
    raise Refused(f"zerotop there is older than this one and cannot {action} a job: install the same version")


def _check_shared(session: str, token: str, secret: str) -> None:
    """Whether the folder is the asker's own: a file in it says what he says. Raises Refused."""
    path = os.path.join(session, os.path.basename(token))
    deadline_s = time.monotonic() + _SHARED_PATIENCE_S
    while _read_text(path) != secret:
        if time.monotonic() > deadline_s:
            raise Refused(_NOT_SHARED.format(folder=session))
        time.sleep(_POLL_S)
    if not os.access(session, os.W_OK | os.X_OK):
        raise Refused(_NOT_WRITABLE.format(folder=session))


def _read_text(path: str) -> str:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return file.read()
    return ""


def _measure_ahead_ns(requested_ns: Any) -> int:
    """How far this node's clock is ahead of the asker's, by when it was asked; 0 if asking may have taken so long."""
    ahead_ns = time.time_ns() - requested_ns if isinstance(requested_ns, int) else 0
    return ahead_ns if abs(ahead_ns) > _MIN_CLOCK_OFFSET_NS else 0


def _join_job(session: str, rendezvous: Rendezvous, *, enter: bool, ahead_ns: int) -> dict[str, Any]:
    job = find_local_part(find_jobs(), rendezvous)
    if job is None:
        raise Refused("no rank of this job runs there")
    _ensure_recorded(session, job, ahead_ns)
    numbers = {rank.process: rank.rank for rank in job.ranks}
    entries = attaching.enter_ranks(session, [(number, process) for process, number in numbers.items()]) if enter else []
    return _describe_entries(entries, numbers) | {"ranks": len(job.ranks)}


def _ensure_recorded(session: str, job: FoundJob, ahead_ns: int) -> None:
    facts = job_control.read_facts(session)
    if facts.job is None or facts.detached or not facts.is_alive():
        attaching.note_joined(session, job, ahead_ns=ahead_ns)
    try:
        agent.watch_in_background(session)
    except CommandError as error:
        raise Refused(str(error)) from error
    if not job_control.is_sampler_alive(session):
        raise Refused(job_control.CANNOT_WRITE.format(folder=session))


def _describe_entries(entries: list[Entry], numbers: dict[Process, int | None]) -> dict[str, Any]:
    """Each process that was asked, its rank where that is known."""
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
