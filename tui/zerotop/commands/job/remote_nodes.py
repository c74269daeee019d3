"""A job's other nodes: asks each over ssh to record its part of the job, to stop recording, or to stop the job."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zerotop.commands.common.errors import USAGE, Problem
from zerotop_probe.outside import own_python
from zerotop_probe.outside.attaching import attaching, hostfile, ssh
from zerotop_probe.outside.attaching.jobs import FoundJob, find_job
from zerotop_probe.outside.attaching.rendezvous import Rendezvous
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording import clock
from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR

_SSH_VARIABLE = "ZEROTOP_SSH"
_NO_RENDEZVOUS = (
    "No rank with a number from a launcher runs on this node, so the job cannot be found on other nodes."
    " Attach on a node that has one."
)
_JOB_HOSTS = "job"
_ALL_LOCAL = "All ranks of the job run on this node: no other node was asked."
_NOT_RUNNING = "The job does not run on this node. Attach on a node that has ranks"
_NOT_JOINED = "{name} takes no part: {why}."
_MAYBE_JOINED = (
    "{name} may or may not take part: {why}. Attach again with --hosts to ask it again; detach ends its part too."
)
_CLOCK_APART = "The clock of {name} is {apart} {way} this one: its times are corrected to about a second. Set both by NTP."
_NOT_STOPPED = "{name} was not asked to stop: {why}. Its ranks may wait for the others: stop again, or end them there."
# How long the request to stop has to reach the other nodes before this node stops.
_HEAD_START_S = 3.0
_FORMATS_DIFFER = (
    "{name}: zerotop there records in format {theirs}, here in {ours}: fields that only the newer one has are missing"
)


def _do_nothing() -> None:
    pass


def check_options(options: argparse.Namespace) -> None:
    """Apply ``--ssh`` for the rest of the process and validate ``--hosts``. Raises Problem or OSError."""
    if options.ssh is not None:
        os.environ[_SSH_VARIABLE] = options.ssh
    if options.hosts is not None:
        _read_ssh_command()
        if options.hosts != _JOB_HOSTS:
            _read_hosts(options.hosts)


def _read_ssh_command() -> list[str]:
    try:
        return shlex.split(os.environ.get(_SSH_VARIABLE, ""))
    except ValueError as error:
        raise Problem(f"{os.environ[_SSH_VARIABLE]!r} is not a valid command: {error}", USAGE) from error


def find_hosts(text: str, path: Path) -> list[str]:
    """Return the other nodes that ``--hosts`` names for the job of a recording. Raises Problem, OSError."""
    try:
        names = hostfile.find_job_hosts(_find_job(path)) if text == _JOB_HOSTS else _read_hosts(text)
    except hostfile.NoHosts as error:
        raise Problem(str(error)) from error
    return [name for name in names if not is_this_host(name)]


def _read_hosts(text: str) -> list[str]:
    try:
        return hostfile.read_file(text[1:]) if text.startswith("@") else hostfile.parse_names(text)
    except hostfile.NoHosts as error:
        raise Problem(str(error), USAGE) from error


def is_this_host(name: str) -> bool:
    """Whether a name is certainly this node; a node with another alias detects that itself when asked."""
    full = os.uname().nodename
    return name.rpartition("@")[2] in (full, full.split(".")[0], "localhost", "127.0.0.1", "::1")


def _find_job(path: Path) -> FoundJob:
    root = job_control.read_facts(str(path)).job
    job = find_job(root.pid) if root is not None and root.is_alive() else None
    if job is None:
        raise Problem(_NOT_RUNNING)
    return job


def join_hosts(
    path: Path, names: list[str], *, enter: bool, meanwhile: Callable[[], None] = _do_nothing
) -> tuple[int, list[str]]:
    """Have these nodes record the job; run ``meanwhile`` on this node in the meantime. Raises Problem.

    Return the number of their ranks with the probe, and a sentence per node that takes no part and per rank without.
    """
    meeting = Rendezvous.from_job(_find_job(path))
    if meeting is None or meeting.is_complete:
        meanwhile()
        return 0, [_NO_RENDEZVOUS if meeting is None else _ALL_LOCAL]
    entered = 0
    messages: list[str] = []
    parts: dict[str, str] = {}  # of nodes that do not see the recording's folder
    request = {"action": "join", "enter": enter, "meeting": meeting.to_json()}
    for answer in _ask_hosts(path, names, request, meanwhile):
        if answer.said.here:
            continue
        if answer.why_not:
            if answer.is_lost:  # it may take part: include it in later requests
                attaching.note_reached(str(path), answer.name, host="", joined=True)
            attaching.note_not_reached(str(path), answer.name, answer.why_not)
            messages.append((_MAYBE_JOINED if answer.is_lost else _NOT_JOINED).format(name=answer.name, why=answer.why_not))
            continue
        said = answer.said
        if said.part is not None:
            parts[answer.name] = said.part
        attaching.note_reached(str(path), answer.name, host=said.host or "", ranks=said.ranks or 0, joined=True)
        missing = [text for entry in said.entries or () if (text := _describe_entry(entry, answer.name))]
        entered += len(said.entries or ()) - len(missing)
        messages += _describe_format(answer) + _describe_clock(answer) + missing
    if parts:
        _start_collector(path, parts)
    return entered, messages


def _start_collector(path: Path, parts: dict[str, str]) -> None:
    """Have these nodes send their parts to the recording; the process outlives us. Raises OSError."""
    arguments = ("collect", "--beside", str(path.absolute()), "--parts", json.dumps(parts))
    subprocess.Popen(
        own_python.build_command("zerotop.cli", *arguments),
        env=own_python.build_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def enter_ranks(path: Path, meanwhile: Callable[[], None]) -> tuple[int, list[str]]:
    """Inject the probe into the ranks of all reached nodes; results as in :func:`join_hosts`."""
    names = job_control.read_facts(str(path)).reached_hosts
    if not names:
        meanwhile()
        return 0, []
    try:
        return join_hosts(path, names, enter=True, meanwhile=meanwhile)
    except Problem as error:
        return 0, [f"{error}."]


def leave_hosts(path: Path, names: list[str], meanwhile: Callable[[], None]) -> tuple[list[str], bool]:
    """End recording on these nodes; run ``meanwhile`` on this node in the meantime. Raises Problem.

    Return sentences, and whether all nodes succeeded.
    """
    messages, done = [], True
    for answer in _ask_hosts(path, names, {"action": "leave"}, meanwhile):
        if answer.why_not:
            done = False
            messages.append(f"{answer.name} is not detached: {answer.why_not}.")
            continue
        if not answer.said.here:
            attaching.note_reached(str(path), answer.name, host=answer.said.host or "", joined=False)
        for entry in answer.said.entries or ():
            done = done and (not entry.why_not or entry.pending)
            who = f"Process {entry.pid} on {answer.name}"
            messages += describe_leaving(who, entry.said, entry.why_not, entry.pending)
    return messages, done


def stop_job(path: Path, stop_here: Callable[[], None]) -> list[str]:
    """Ask the reached nodes to stop their parts of the job, then call ``stop_here``.

    The other nodes come first, so that no rank sees others die before it is asked itself; a silent node delays the rest only
    briefly. Return sentences about nodes that were not asked. Raises OSError if ``stop_here`` does.
    """
    names = job_control.read_facts(str(path)).reached_hosts
    try:
        answers = _ask_hosts(path, names, {"action": "stop"}, stop_here, head_start_s=_HEAD_START_S)
    except Problem as error:
        return [f"{error}."]
    return [_NOT_STOPPED.format(name=answer.name, why=answer.why_not) for answer in answers if answer.why_not]


def detach_here(recording: str) -> tuple[list[str], bool]:
    """Remove the probe from the ranks of this node, and end a recording that began by attaching.

    Return sentences, and whether no rank keeps the probe.
    """
    entries = attaching.end_recording(recording)
    messages = [
        text
        for entry in entries
        for text in describe_leaving(f"Process {entry.process.pid}", entry.reply, entry.why_not, entry.is_pending)
    ]
    return messages, all(not entry.why_not or entry.is_pending for entry in entries)


def describe_leaving(who: str, reply: str, why_not: str, pending: bool) -> list[str]:
    """Return a sentence about removing the probe from a process, or none if there was no probe."""
    if why_not:
        return [f"{who} {'has not yet removed' if pending else 'cannot remove'} the probe: {why_not.rstrip('.')}."]
    results = {"leaving": "removes the probe at the end of its step", "left": "has removed the probe"}
    return [f"{who} {results[reply]}."] if reply in results else []


def _describe_entry(entry: ssh.RankAnswer, name: str) -> str:
    who = f"Process {entry.pid}" if entry.rank is None else f"Rank {entry.rank}"
    state = "not yet" if entry.pending else "not"
    return f"{who} on {name} is {state} entered: {entry.why_not.rstrip('.')}." if entry.why_not else ""


def _describe_format(answer: ssh.Answer) -> list[str]:
    theirs, ours = answer.said.format or [], [FORMAT_MAJOR, FORMAT_MINOR]
    if theirs == ours:
        return []
    return [_FORMATS_DIFFER.format(name=answer.name, theirs=".".join(map(str, theirs)), ours=".".join(map(str, ours)))]


def _describe_clock(answer: ssh.Answer) -> list[str]:
    ahead_s = answer.said.ahead_s or 0.0
    way = "ahead of" if ahead_s > 0 else "behind"
    return [_CLOCK_APART.format(name=answer.name, apart=attaching.format_age(abs(ahead_s)), way=way)] if ahead_s else []


def _ask_hosts(
    path: Path, names: list[str], request: dict[str, Any], meanwhile: Callable[[], None], *, head_start_s: float = 0.0
) -> list[ssh.Answer]:
    """Return the nodes' answers; run ``meanwhile`` once all have answered, or after ``head_start_s``.

    Raises Problem, OSError.
    """
    if not names:
        meanwhile()
        return []
    with _make_token(path) as (token, secret):
        full_request = request | {
            "recording": str(path.absolute()),
            "unix_ns": time.time_ns(),
            "format": [FORMAT_MAJOR, FORMAT_MINOR],
            "from": [clock.read_hostname(), clock.read_boot_id()],
            "token": token,
            "secret": secret,
        }
        try:
            calls = ssh.RemoteCalls(names, _read_ssh_command(), full_request)
        except ssh.NoSsh as error:
            meanwhile()
            raise Problem(str(error)) from error
        try:
            calls.wait_all(head_start_s)
            meanwhile()
            return calls.collect_answers()
        finally:
            calls.kill_remaining()


@contextlib.contextmanager
def _make_token(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and content of a file in the recording's folder: a node that can read it shares the folder.

    It is a temporary file, or on a full disk the recording file, which is unique to the recording.
    """
    file, secret = path / f"shared-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        try:
            file.touch(mode=0o600, exist_ok=False)
            file.write_text(secret, encoding="ascii")
        except OSError:
            file.unlink(missing_ok=True)
            yield SESSION_FILE, (path / SESSION_FILE).read_text(encoding="ascii")
        else:
            yield file.name, secret
    finally:
        file.unlink(missing_ok=True)
