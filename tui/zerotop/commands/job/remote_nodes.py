"""A job's other nodes: each is asked through ssh to record its part of the job in the session, or to end that."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zerotop.commands.common.errors import USAGE, Problem
from zerotop_probe.outside.attaching import hostfile, ssh
from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import FoundJob, find_job
from zerotop_probe.outside.attaching.rendezvous import Rendezvous
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording import clock
from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR

_SSH_VARIABLE = "ZEROTOP_SSH"
_NO_RENDEZVOUS = (
    "No rank that a launcher numbered runs here, so which job is meant on other nodes is not known: attach on one that has."
)
_JOB_HOSTS = "job"
_ALL_LOCAL = "All ranks of the job run on this node: no other one was asked."
_NOT_RUNNING = "The job does not run on this node: attach on one that has ranks"
_NOT_JOINED = "{name} takes no part: {why}."
_MAYBE_JOINED = "{name} may take part or not: {why}. Attach again with --hosts to ask it again; detach ends its part too."
_CLOCK_APART = "The clock of {name} is {apart} {way} this one: its times are put right to about a second; set both by NTP."
_NOT_STOPPED = "{name} is not asked to stop: {why}. Its ranks may wait for the others: ask again, or end them there."
# How long the other nodes may take to be asked to stop before this one is.
_HEAD_START_S = 3.0
_FORMATS_DIFFER = (
    "{name}: zerotop there records in format {theirs}, this one in {ours}: what only the newer one knows is missing"
)


def _do_nothing() -> None:
    pass


def check_options(options: argparse.Namespace) -> None:
    """Takes ``--ssh`` for all that is asked from now on, by the screen too.

    Raises Problem or OSError if that is no command, or ``--hosts`` names no nodes.
    """
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
        raise Problem(f"{os.environ[_SSH_VARIABLE]!r} is no command: {error}", USAGE) from error


def find_hosts(text: str, path: Path) -> list[str]:
    """The other nodes that ``--hosts`` means for the job of a session. Raises Problem, OSError."""
    try:
        names = hostfile.find_job_hosts(_find_job(path)) if text == _JOB_HOSTS else _read_hosts(text)
    except hostfile.NoHosts as error:
        raise Problem(str(error)) from error
    return [name for name in names if not _is_this_host(name)]


def _read_hosts(text: str) -> list[str]:
    try:
        return hostfile.read_file(text[1:]) if text.startswith("@") else hostfile.parse_names(text)
    except hostfile.NoHosts as error:
        raise Problem(str(error), USAGE) from error


def _is_this_host(name: str) -> bool:
    """What is not known by name says so itself when it is asked."""
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
    """Has these nodes take part; ``meanwhile`` is what is done here while they are at it.

    Returns how many of their ranks the probe is in now, and a sentence for each node that takes no part and each rank that
    is not entered. Raises Problem.
    """
    meeting = Rendezvous.from_job(_find_job(path))
    if meeting is None or meeting.is_complete:
        meanwhile()
        return 0, [_NO_RENDEZVOUS if meeting is None else _ALL_LOCAL]
    entered, told = 0, []
    request = {"action": "join", "enter": enter, "meeting": meeting.to_json()}
    for answer in _ask_hosts(path, names, request, meanwhile):
        if answer.is_here:
            continue
        if answer.why_not:
            if answer.is_lost:  # so that it is asked when others are
                attaching.note_reached(str(path), answer.name, host="", joined=True)
            attaching.note_not_reached(str(path), answer.name, answer.why_not)
            told.append((_MAYBE_JOINED if answer.is_lost else _NOT_JOINED).format(name=answer.name, why=answer.why_not))
            continue
        ranks = int(answer.facts.get("ranks") or 0)
        attaching.note_reached(str(path), answer.name, host=answer.host, ranks=ranks, joined=True)
        missing = [text for entry in answer.rank_entries if (text := _describe_entry(entry, answer.name))]
        entered += len(answer.rank_entries) - len(missing)
        told += _describe_format(answer) + _describe_clock(answer) + missing
    return entered, told


def enter_ranks(path: Path, meanwhile: Callable[[], None]) -> tuple[int, list[str]]:
    """Puts the probe into the ranks of the other nodes that take part; the rest is as in :func:`join`."""
    names = job_control.read_facts(str(path)).reached_hosts
    if not names:
        meanwhile()
        return 0, []
    try:
        return join_hosts(path, names, enter=True, meanwhile=meanwhile)
    except Problem as error:
        return 0, [f"{error}."]


def leave_hosts(path: Path, names: list[str], meanwhile: Callable[[], None]) -> tuple[list[str], bool]:
    """Ends the parts of these nodes; ``meanwhile`` is what is done here while they are at it.

    Returns sentences, and whether all of it was done. Raises Problem.
    """
    told, done = [], True
    for answer in _ask_hosts(path, names, {"action": "leave"}, meanwhile):
        if answer.why_not:
            done = False
            told.append(f"{answer.name} is not detached: {answer.why_not}.")
            continue
        if not answer.is_here:
            attaching.note_reached(str(path), answer.name, host=answer.host, joined=False)
        for entry in answer.rank_entries:
            done = done and (not entry["why_not"] or bool(entry["pending"]))
            told += describe_leaving(
                f"Process {entry['pid']} on {answer.name}", entry["said"], entry["why_not"], entry["pending"]
            )
    return told, done


def stop_job(path: Path, stop_here: Callable[[], None]) -> list[str]:
    """Has the other nodes that take part asked to stop their parts of the job, and then does it ``here``.

    They are asked first, so that no rank sees others die before it is asked; what does not answer is not waited for long.
    Returns sentences about those that were not asked. Raises OSError if it cannot be done here.
    """
    names = job_control.read_facts(str(path)).reached_hosts
    try:
        answers = _ask_hosts(path, names, {"action": "stop"}, stop_here, head_start_s=_HEAD_START_S)
    except Problem as error:
        return [f"{error}."]
    return [_NOT_STOPPED.format(name=answer.name, why=answer.why_not) for answer in answers if answer.why_not]


def describe_leaving(who: str, said: str, why_not: str, pending: bool) -> list[str]:
    """What there is to say of a process that the probe was taken out of: one sentence or none."""
    if why_not:
        return [f"{who} is {'still to be' if pending else 'not'} left: {why_not.rstrip('.')}."]
    sentences = {"leaving": "lets the probe go at the end of its step", "left": "has let the probe go"}
    return [f"{who} {sentences[said]}."] if said in sentences else []


def _describe_entry(entry: dict[str, Any], name: str) -> str:
    who = f"Process {entry['pid']}" if entry["rank"] is None else f"Rank {entry['rank']}"
    how = "still to be" if entry["pending"] else "not"
    return f"{who} on {name} is {how} entered: {entry['why_not'].rstrip('.')}." if entry["why_not"] else ""


def _describe_format(answer: ssh.Answer) -> list[str]:
    theirs, ours = list(answer.facts.get("format") or ()), [FORMAT_MAJOR, FORMAT_MINOR]
    if theirs == ours:
        return []
    return [_FORMATS_DIFFER.format(name=answer.name, theirs=".".join(map(str, theirs)), ours=".".join(map(str, ours)))]


def _describe_clock(answer: ssh.Answer) -> list[str]:
    ahead_s = float(answer.facts.get("ahead_s") or 0.0)
    way = "ahead of" if ahead_s > 0 else "behind"
    return [_CLOCK_APART.format(name=answer.name, apart=attaching.format_age(abs(ahead_s)), way=way)] if ahead_s else []


def _ask_hosts(
    path: Path, names: list[str], request: dict[str, Any], meanwhile: Callable[[], None], *, head_start_s: float = 0.0
) -> list[ssh.Answer]:
    """What these nodes say; ``meanwhile`` is done when all have, or after ``first_s``. Raises Problem, OSError."""
    if not names:
        meanwhile()
        return []
    with _make_token(path) as (token, secret):
        whole = request | {
            "session": str(path.absolute()),
            "unix_ns": time.time_ns(),
            "format": [FORMAT_MAJOR, FORMAT_MINOR],
            "from": [clock.read_hostname(), clock.read_boot_id()],
            "token": token,
            "secret": secret,
        }
        try:
            asked = ssh.RemoteCalls(names, _read_ssh_command(), whole)
        except ssh.NoSsh as error:
            meanwhile()
            raise Problem(str(error)) from error
        try:
            asked.wait_all(head_start_s)
            meanwhile()
            return asked.collect_answers()
        finally:
            asked.kill_remaining()


@contextlib.contextmanager
def _make_token(path: Path) -> Iterator[tuple[str, str]]:
    """The name and content of a file in the session's folder: who can read it sees the same folder.

    A new one, or where none can be written, as on a full disk, what tells the session from all others.
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
