"""Putting the probe into the ranks of a job that is watched from outside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zerotop_probe.outside.attaching import session as attaching
from zerotop_probe.outside.attaching.jobs import find_job
from zerotop_probe.outside.attaching.probe_entry import Entry
from zerotop_probe.outside.job import job_control
from zerotop_probe.outside.procfs import Process
from zerotop_probe.recording import events


def enter_ranks(path: Path) -> tuple[int, list[str]]:
    """:func:`enter_here`, and the same for the ranks of other nodes that take part."""
    if not job_control.read_facts(str(path)).reached_hosts:
        return enter_local_ranks(path)
    from zerotop.commands.job import remote_nodes

    here: list[tuple[int, list[str]]] = []
    elsewhere, told = remote_nodes.enter_ranks(path, lambda: here.append(enter_local_ranks(path)))
    ((entered, told_here),) = here
    return entered + elsewhere, told_here + told


def start_entering(path: Path) -> Callable[[], tuple[int, list[str]]]:
    """:func:`enter` beside what else there is to do; returns what waits for it."""
    threads = ThreadPoolExecutor(1)
    done = threads.submit(enter_ranks, path)
    threads.shutdown(wait=False)
    return done.result


def enter_local_ranks(path: Path) -> tuple[int, list[str]]:
    """Puts the probe into every rank of this node that it is not in yet.

    Returns how many it is in now, and a sentence about each where it is not. Takes seconds where ranks do not answer.
    """
    ranks = _find_ranks(path)
    if not ranks:
        return 0, ["No rank is seen yet: enter it when it trains."]
    numbers = {process: number for number, process in ranks}
    entries = attaching.enter_ranks(str(path), ranks)
    told = [_describe_entry(entry, numbers[entry.process]) for entry in entries if entry.why_not]
    return len(entries) - len(told), told


def _describe_entry(entry: Entry, number: int | None) -> str:
    who = f"Process {entry.process.pid}" if number is None else f"Rank {number}"
    return f"{who} is {'still to be' if entry.is_pending else 'not'} entered: {entry.why_not.rstrip('.')}."


def _find_ranks(path: Path) -> list[tuple[int | None, Process]]:
    """The ranks of a session's job that run on this node."""
    facts = job_control.read_facts(str(path))
    job = find_job(facts.job.pid) if facts.job is not None and facts.job.is_alive() else None
    found = [(rank.rank, rank.process) for rank in job.ranks] if job is not None else []
    known = {process for _, process in found}
    # Ranks whose launcher has died are known from when they were found.
    others = [process for process in dict.fromkeys(facts.ranks) if process not in known and process.is_alive()]
    return found + [(None, process) for process in others]


def can_enter(path: Path) -> bool:
    """Whether the job was attached to from outside, and runs with ranks on this node that have no probe."""
    facts = job_control.read_facts(str(path))
    if not facts.attached or facts.detached:
        return False
    return any(process.is_alive() and not _is_entered(path, process.pid) for process in dict.fromkeys(facts.ranks))


def _is_entered(path: Path, pid: int) -> bool:
    """By the last that the probe in that process said of itself."""
    turns = [turn for name in attaching.find_rank_files(str(path), pid) for turn in _iter_turns(name)]
    return bool(turns) and max(turns)[1] != events.LEFT


def _iter_turns(name: str) -> Iterator[tuple[int, str]]:
    """When it was put in and taken out: (time, event)."""
    try:
        with open(name, "rb") as file:
            for line in file:
                if any(f'"{event}"'.encode() in line for event in (events.HELLO, events.LEFT)):
                    value = json.loads(line)
                    if value.get("event") in (events.HELLO, events.LEFT):
                        yield int(value["time_ns"]), str(value["event"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
