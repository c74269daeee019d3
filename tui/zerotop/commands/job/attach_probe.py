"""Injecting the probe into the ranks of a job that runs without it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path

from zerotop_probe.outside.attaching import attaching
from zerotop_probe.outside.attaching.jobs import find_job
from zerotop_probe.outside.attaching.probe_entry import Entry
from zerotop_probe.outside.job import job_control
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording import events


def enter_ranks(path: Path) -> tuple[int, list[str]]:
    """Enter the ranks on this node and on the job's other reached nodes; results as in :func:`enter_local_ranks`."""
    if not job_control.read_facts(str(path)).reached_hosts:
        return enter_local_ranks(path)
    from zerotop.commands.job import remote_nodes

    results: list[tuple[int, list[str]]] = []
    remote_count, remote_messages = remote_nodes.enter_ranks(path, lambda: results.append(enter_local_ranks(path)))
    ((local_count, local_messages),) = results
    return local_count + remote_count, local_messages + remote_messages


def start_entering(path: Path) -> Callable[[], tuple[int, list[str]]]:
    """Start :func:`enter_ranks` in a thread; return a function that waits for its result."""
    executor = ThreadPoolExecutor(1)
    entering = executor.submit(enter_ranks, path)
    executor.shutdown(wait=False)
    return entering.result


def enter_local_ranks(path: Path) -> tuple[int, list[str]]:
    """Inject the probe into every rank of this node that lacks it. Takes seconds if ranks do not answer.

    Return the number of ranks with the probe, and a sentence about each rank without.
    """
    ranks = _find_ranks(path)
    if not ranks:
        return 0, ["No rank found yet. Enter the job once it trains."]
    rank_numbers = {process: number for number, process in ranks}
    entries = attaching.enter_ranks(str(path), ranks)
    messages = [_describe_entry(entry, rank_numbers[entry.process]) for entry in entries if entry.why_not]
    return len(entries) - len(messages), messages


def _describe_entry(entry: Entry, number: int | None) -> str:
    who = f"Process {entry.process.pid}" if number is None else f"Rank {number}"
    return f"{who} is {'not yet' if entry.is_pending else 'not'} entered: {entry.why_not.rstrip('.')}."


def _find_ranks(path: Path) -> list[tuple[int | None, ProcessHandle]]:
    """Return the ranks of a recording's job on this node; the number is None where unknown."""
    facts = job_control.read_facts(str(path))
    if not facts.attached:  # the others load the probe themselves
        return [(number, process) for process, number in facts.without_probe.items() if process.is_alive()]
    job = find_job(facts.job.pid) if facts.job is not None and facts.job.is_alive() else None
    ranks: list[tuple[int | None, ProcessHandle]] = (
        [(rank.rank, rank.process) for rank in job.ranks] if job is not None else []
    )
    listed = {process for _, process in ranks}
    # Ranks whose launcher has died are found only in the recording.
    others = [process for process in dict.fromkeys(facts.ranks) if process not in listed and process.is_alive()]
    return ranks + [(None, process) for process in others]


def can_enter(path: Path) -> bool:
    """Whether running ranks of this node lack the probe: those of a job that was attached to, or that did not load it."""
    facts = job_control.read_facts(str(path))
    if facts.detached:
        return False
    ranks = facts.ranks if facts.attached else facts.without_probe
    return any(process.is_alive() and not _is_entered(path, process.pid) for process in dict.fromkeys(ranks))


def _is_entered(path: Path, pid: int) -> bool:
    files = attaching.find_rank_files(str(path), pid)
    changes = [event for name in files for event in job_control.iter_events(name, (events.Hello, events.Left))]
    timed = [event for event in changes if isinstance(event.get("time_ns"), int)]
    last = max(timed, key=itemgetter("time_ns"), default=None)
    return last is not None and last["event"] != events.Left.event_name
