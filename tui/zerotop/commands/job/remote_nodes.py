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
from zerotop_probe.outside.attaching.jobs import FoundJob, job_of
from zerotop_probe.outside.attaching.rendezvous import Meeting
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording import clock
from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR

_SSH = "ZEROTOP_SSH"
_NO_MEETING = (
    "No rank that a launcher numbered runs here, so which job is meant on other nodes is not known: attach on one that has."
)
_JOB = "job"
_WHOLE = "All ranks of the job run on this node: no other one was asked."
_NOT_RUNNING = "The job does not run on this node: attach on one that has ranks"
_NO_PART = "{name} takes no part: {why}."
_MAYBE = "{name} may take part or not: {why}. Attach again with --hosts to ask it again; detach ends its part too."
_CLOCK = "The clock of {name} is {apart} {way} this one: its times are put right to about a second; set both by NTP."
_NOT_STOPPED = "{name} is not asked to stop: {why}. Its ranks may wait for the others: ask again, or end them there."
# How long the other nodes may take to be asked to stop before this one is.
_FIRST_S = 3.0
_OLDER = "{name}: zerotop there records in format {theirs}, this one in {ours}: what only the newer one knows is missing"


def _nothing() -> None:
    pass


def check(options: argparse.Namespace) -> None:
    """Takes ``--ssh`` for all that is asked from now on, by the screen too.

    Raises Problem or OSError if that is no command, or ``--hosts`` names no nodes.
    """
    if options.ssh is not None:
        os.environ[_SSH] = options.ssh
    if options.hosts is not None:
        _command()
        if options.hosts != _JOB:
            _read(options.hosts)


def _command() -> list[str]:
    try:
        return shlex.split(os.environ.get(_SSH, ""))
    except ValueError as error:
        raise Problem(f"{os.environ[_SSH]!r} is no command: {error}", USAGE) from error


def named(text: str, path: Path) -> list[str]:
    """The other nodes that ``--hosts`` means for the job of a session. Raises Problem, OSError."""
    try:
        names = hostfile.of_job(_job(path)) if text == _JOB else _read(text)
    except hostfile.NoHosts as error:
        raise Problem(str(error)) from error
    return [name for name in names if not _is_this(name)]


def _read(text: str) -> list[str]:
    try:
        return hostfile.read_file(text[1:]) if text.startswith("@") else hostfile.read_names(text)
    except hostfile.NoHosts as error:
        raise Problem(str(error), USAGE) from error


def _is_this(name: str) -> bool:
    """What is not known by name says so itself when it is asked."""
    full = os.uname().nodename
    return name.rpartition("@")[2] in (full, full.split(".")[0], "localhost", "127.0.0.1", "::1")


def _job(path: Path) -> FoundJob:
    root = job_control.read_facts(str(path)).job
    job = job_of(root.pid) if root is not None and root.alive() else None
    if job is None:
        raise Problem(_NOT_RUNNING)
    return job


def join(path: Path, names: list[str], *, enter: bool, meanwhile: Callable[[], None] = _nothing) -> tuple[int, list[str]]:
    """Has these nodes take part; ``meanwhile`` is what is done here while they are at it.

    Returns how many of their ranks the probe is in now, and a sentence for each node that takes no part and each rank that
    is not entered. Raises Problem.
    """
    meeting = Meeting.of(_job(path))
    if meeting is None or meeting.whole:
        meanwhile()
        return 0, [_NO_MEETING if meeting is None else _WHOLE]
    entered, told = 0, []
    request = {"action": "join", "enter": enter, "meeting": meeting.written()}
    for answer in _ask(path, names, request, meanwhile):
        if answer.here:
            continue
        if answer.why_not:
            if answer.lost:  # so that it is asked when others are
                attaching.note_reached(str(path), answer.name, host="", joined=True)
            attaching.note_not_reached(str(path), answer.name, answer.why_not)
            told.append((_MAYBE if answer.lost else _NO_PART).format(name=answer.name, why=answer.why_not))
            continue
        ranks = int(answer.facts.get("ranks") or 0)
        attaching.note_reached(str(path), answer.name, host=answer.host, ranks=ranks, joined=True)
        missing = [text for entry in answer.entries if (text := _not_entered(entry, answer.name))]
        entered += len(answer.entries) - len(missing)
        told += _of_format(answer) + _of_clock(answer) + missing
    return entered, told


def enter(path: Path, meanwhile: Callable[[], None]) -> tuple[int, list[str]]:
    """Puts the probe into the ranks of the other nodes that take part; the rest is as in :func:`join`."""
    names = job_control.read_facts(str(path)).reached
    if not names:
        meanwhile()
        return 0, []
    try:
        return join(path, names, enter=True, meanwhile=meanwhile)
    except Problem as error:
        return 0, [f"{error}."]


def leave(path: Path, names: list[str], meanwhile: Callable[[], None]) -> tuple[list[str], bool]:
    """Ends the parts of these nodes; ``meanwhile`` is what is done here while they are at it.

    Returns sentences, and whether all of it was done. Raises Problem.
    """
    told, done = [], True
    for answer in _ask(path, names, {"action": "leave"}, meanwhile):
        if answer.why_not:
            done = False
            told.append(f"{answer.name} is not detached: {answer.why_not}.")
            continue
        if not answer.here:
            attaching.note_reached(str(path), answer.name, host=answer.host, joined=False)
        for entry in answer.entries:
            done = done and (not entry["why_not"] or bool(entry["pending"]))
            told += left(f"Process {entry['pid']} on {answer.name}", entry["said"], entry["why_not"], entry["pending"])
    return told, done


def stop(path: Path, here: Callable[[], None]) -> list[str]:
    """Has the other nodes that take part asked to stop their parts of the job, and then does it ``here``.

    They are asked first, so that no rank sees others die before it is asked; what does not answer is not waited for long.
    Returns sentences about those that were not asked. Raises OSError if it cannot be done here.
    """
    names = job_control.read_facts(str(path)).reached
    try:
        answers = _ask(path, names, {"action": "stop"}, here, first_s=_FIRST_S)
    except Problem as error:
        return [f"{error}."]
    return [_NOT_STOPPED.format(name=answer.name, why=answer.why_not) for answer in answers if answer.why_not]


def left(who: str, said: str, why_not: str, pending: bool) -> list[str]:
    """What there is to say of a process that the probe was taken out of: one sentence or none."""
    if why_not:
        return [f"{who} is {'still to be' if pending else 'not'} left: {why_not.rstrip('.')}."]
    sentences = {"leaving": "lets the probe go at the end of its step", "left": "has let the probe go"}
    return [f"{who} {sentences[said]}."] if said in sentences else []


def _not_entered(entry: dict[str, Any], name: str) -> str:
    who = f"Process {entry['pid']}" if entry["rank"] is None else f"Rank {entry['rank']}"
    how = "still to be" if entry["pending"] else "not"
    return f"{who} on {name} is {how} entered: {entry['why_not'].rstrip('.')}." if entry["why_not"] else ""


def _of_format(answer: ssh.Answer) -> list[str]:
    theirs, ours = list(answer.facts.get("format") or ()), [FORMAT_MAJOR, FORMAT_MINOR]
    if theirs == ours:
        return []
    return [_OLDER.format(name=answer.name, theirs=".".join(map(str, theirs)), ours=".".join(map(str, ours)))]


def _of_clock(answer: ssh.Answer) -> list[str]:
    ahead_s = float(answer.facts.get("ahead_s") or 0.0)
    way = "ahead of" if ahead_s > 0 else "behind"
    return [_CLOCK.format(name=answer.name, apart=attaching.age(abs(ahead_s)), way=way)] if ahead_s else []


def _ask(
    path: Path, names: list[str], request: dict[str, Any], meanwhile: Callable[[], None], *, first_s: float = 0.0
) -> list[ssh.Answer]:
    """What these nodes say; ``meanwhile`` is done when all have, or after ``first_s``. Raises Problem, OSError."""
    if not names:
        meanwhile()
        return []
    with _token(path) as (token, secret):
        whole = request | {
            "session": str(path.absolute()),
            "unix_ns": time.time_ns(),
            "format": [FORMAT_MAJOR, FORMAT_MINOR],
            "from": [clock.hostname(), clock.boot_id()],
            "token": token,
            "secret": secret,
        }
        try:
            asked = ssh.Asked(names, _command(), whole)
        except ssh.NoSsh as error:
            meanwhile()
            raise Problem(str(error)) from error
        try:
            asked.wait(first_s)
            meanwhile()
            return asked.answers()
        finally:
            asked.end()


@contextlib.contextmanager
def _token(path: Path) -> Iterator[tuple[str, str]]:
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
