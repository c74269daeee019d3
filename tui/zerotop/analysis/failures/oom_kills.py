"""Ranks that did not end by themselves: by which signal, how often the kernel killed for memory, how much there was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerotop.analysis.processes.host_memory import HostMemory, read_host_memory
from zerotop.session.reader import Event, Session

# How far back host memory is told of a failure.
_SECONDS = 10
_SHORT_SHARE = 0.95
_SIGKILL_CODE = 137


@dataclass(frozen=True, slots=True)
class JobDeath:
    """What the sampler saw of processes that were killed."""

    kills: int  # processes of the control group that the kernel killed for memory
    signal: str | None  # that ended the job's command
    exit_code: int | None
    rank: int | None  # the first one that was gone without a goodbye
    host: str
    unix_ns: int  # when it was gone; without one, when the job ended
    memory: tuple[HostMemory, ...]  # the last seconds before, oldest first

    @property
    def memory_was_short(self) -> bool:
        """Whether nearly all memory was in use in those seconds."""
        return any(sample.used_bytes >= _SHORT_SHARE * sample.limit_bytes for sample in self.memory)

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, or the kernel says that it killed."""
        return self.kills > 0 or self.signal == "SIGKILL" or self.exit_code == _SIGKILL_CODE


def find_death(session: Session, cursor_ns: int) -> JobDeath | None:
    """The end of a job that failed, or of a rank that the kernel killed; None where nothing of that is known."""
    known = [event for event in session.events if event.unix_ns <= cursor_ns]
    ended = next((event for event in reversed(known) if event.name == "job_ended"), None)
    gone = _find_first_gone(known)
    counted = ended.facts.get("oom_kills") if ended is not None else None
    killed = max(counted if isinstance(counted, int) else 0, count_kills(session, cursor_ns))
    failed = ended is not None and ended.facts.get("exit_code") != 0
    if ended is not None and ended.facts.get("exit_code") is None and ended.facts.get("signal") is None and gone is None:
        # Of a job that was attached to nobody knows the code; that its ranks ended in good order they said themselves.
        failed = all(event.name != "goodbye" for event in known)
    if not killed and not failed:
        return None
    last = gone or ended
    host = last.host if last is not None else _find_any_host(session)
    at_ns = last.unix_ns if last is not None else cursor_ns
    facts: dict[str, Any] = ended.facts if ended is not None else {}
    rank = gone.facts.get("rank") if gone is not None else None
    memory = read_last_seconds(session, host, at_ns)
    return JobDeath(killed, facts.get("signal"), facts.get("exit_code"), rank, host, at_ns, memory)


def read_last_seconds(session: Session, host: str, until_ns: int) -> tuple[HostMemory, ...]:
    """A node's memory in the last seconds up to a moment, oldest first."""
    found = []
    for source in session.sources["hosts"]:
        if source.host == host:
            rows = source.between(until_ns - _SECONDS * 1_000_000_000, until_ns)
            found += [read_host_memory(row, int(row["time_ns"]) + source.offset_ns) for row in rows]
    return tuple(sorted(found, key=lambda sample: sample.unix_ns))


def count_kills(session: Session, cursor_ns: int) -> int:
    """How many processes the kernel has killed for memory since the recording began, as the samplers counted."""
    total = 0
    for source in session.sources["hosts"]:
        counts = source.until(cursor_ns)["cgroup_oom_kills"]
        if len(counts) and counts[0] >= 0:
            total += max(0, int(counts[-1]) - int(counts[0]))
    return total


def _find_first_gone(events: list[Event]) -> Event | None:
    left = {(event.host, event.pid) for event in events if event.name == "goodbye"}
    gone = (e for e in events if e.name == "rank_gone" and (e.host, e.facts.get("pid")) not in left)
    return next(gone, None)


def _find_any_host(session: Session) -> str:
    return next((source.host for source in session.sources["hosts"]), "")
