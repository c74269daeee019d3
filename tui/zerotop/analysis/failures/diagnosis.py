"""Why a job died, in one block: what happened, where, for what reason, with which numbers, and what would help most.

A job dies for want of memory (``out_of_memory``), because a process of it was killed (``host_deaths``), or because it failed
by itself: an exception, a wrong argument. One that somebody stopped, and one that ended well, did not die.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from zerotop.analysis.failures.crashes import of_error, of_signal, signal_of
from zerotop.analysis.failures.failure import MEMORY, Failure, Number, place
from zerotop.analysis.failures.last_spans import works_after
from zerotop.analysis.failures.oom_kills import death, kills
from zerotop.analysis.failures.oom_log_parser import KILLED
from zerotop.analysis.failures.out_of_memory import PostMortem, post_mortem
from zerotop.analysis.memory.gpu_ledger import ledger
from zerotop.analysis.memory.ledger_rows import ACTIVATIONS
from zerotop.analysis.processes.alive_ranks import process_of
from zerotop.session.reader import Event, Session

_ENDS = ("out_of_memory", "job_ended", "rank_gone")
# Ranks that have what they need from a dead one still do it.
_LAST_WORK_NS = 5_000_000_000


class Failures:
    """The failure at any cursor; output is read only when there is an end to explain."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[tuple[int, ...], Failure | None] = {}

    def at(self, cursor_ns: int) -> Failure | None:
        """What had killed the job by then; None while it lives, and where it ended well."""
        session = self._session
        told = bisect_right(session.events, cursor_ns, key=lambda event: event.unix_ns)
        ends = any(session.told(name, cursor_ns) for name in _ENDS)
        if not ends and not kills(session, cursor_ns):
            return None
        # Spans tell how long an error was survived, output what was printed.
        written = (source.count_known(cursor_ns) for name in ("output", "spans") for source in session.sources[name])
        key = (told, *written)
        if key not in self._known:
            self._known = {key: failure(session, cursor_ns)}
        return self._known[key]


def failure(session: Session, cursor_ns: int) -> Failure | None:
    """What had killed the job by the cursor."""
    known = [event for event in session.events if event.unix_ns <= cursor_ns]
    if any(event.name == "stop_sent" for event in known):
        return None
    ended = next((event for event in reversed(known) if event.name == "job_ended"), None)
    found = _failure(session, cursor_ns, known, ended)
    if found is None or (ended is None and _goes_on(session, found.unix_ns, cursor_ns)):
        return None
    return found


def _failure(session: Session, cursor_ns: int, known: Sequence[Event], ended: Event | None) -> Failure | None:
    found = post_mortem(session, cursor_ns)
    if found is not None and not (found.survived is True and ended is not None and ended.facts.get("exit_code")):
        return _of_memory(session, cursor_ns, found) if found.survived is not True else None
    end = death(session, cursor_ns)
    if end is None:
        gone = _gone_alone(known) if ended is None else None
        return of_signal(session, cursor_ns, gone, None) if gone is not None else None
    if end.rank is not None or signal_of(end) is not None:
        gone = next((e for e in known if e.name == "rank_gone" and e.facts.get("rank") == end.rank), ended)
        return of_signal(session, cursor_ns, gone, end) if gone is not None else None
    return of_error(session, cursor_ns, end, str(ended.facts.get("text") or "") if ended is not None else "")


def _goes_on(session: Session, at_ns: int, cursor_ns: int) -> bool:
    """Whether a rank works: the job was started again, or what was killed was none of its ranks.

    Those that wait for a dead one end what they were in, and begin nothing.
    """
    since_ns = at_ns + _LAST_WORK_NS
    return any(works_after(session, process_of(source), since_ns, cursor_ns) for source in session.sources["spans"])


def _gone_alone(known: Sequence[Event]) -> Event | None:
    """The first rank that was gone without a goodbye, where none had left in good order before."""
    left = {(event.host, event.pid) for event in known if event.name == "goodbye"}
    first = next((event for event in known if event.name == "rank_gone"), None)
    return first if first is not None and (first.host, first.facts.get("pid")) not in left else None


_WHAT = {
    "cuda": "ran out of GPU memory",
    "cuda_driver": "could get no GPU memory from the driver",
    "nccl": "had no GPU memory left for NCCL",
    "cublas": "had no GPU memory left for cuBLAS",
    "host": "ran out of host memory",
    "killed": "was killed for want of host memory",
}


def _of_memory(session: Session, cursor_ns: int, found: PostMortem) -> Failure:
    who = f"Rank {found.rank}" if found.rank is not None else "A rank"
    return Failure(
        kind=MEMORY,
        unix_ns=found.unix_ns if found.unix_ns is not None else cursor_ns,
        rank=found.rank,
        what=f"{who} {_WHAT[found.kind]}{place(found.phase, found.outer_phase, found.step)}.",
        where=_where(found),
        why=found.cause,
        numbers=tuple(_numbers(session, found)),
        advice=found.advice,
        setting=found.setting,
        spans=found.spans,
        host_memory=found.host_memory,
        last_words=found.text,
        final=found.survived is False,
        memory=found,
    )


def _where(found: PostMortem) -> str:
    parts = [f"GPU {found.device}" + (f" of {found.host}" if found.host else "")] if found.device is not None else []
    parts += [found.host] if found.device is None and found.host else []
    parts += [f"micro-step {found.micro_step}"] if found.micro_step is not None and found.outer_phase != "eval" else []
    if found.rows is not None:
        parts.append(f"micro-batch of {found.rows}" + (f" x {found.sequence} tokens" if found.sequence else " rows"))
    return ", ".join(parts)


def _numbers(session: Session, found: PostMortem) -> list[Number]:
    limit, told = found.limit_bytes, []
    if found.kind in ("host", KILLED):
        used = max((sample.used_bytes for sample in found.host_memory), default=None)
        told = [("asked for", found.requested_bytes, None), ("host memory in use", used, limit)]
    else:
        unused = None
        if found.reserved_bytes is not None and found.allocated_bytes is not None:
            unused = found.reserved_bytes - found.allocated_bytes
        told = [
            ("asked for", found.requested_bytes, None),
            ("free", found.free_bytes, limit),
            ("allocated", found.allocated_bytes, None),
            ("of which activations", _activations(session, found), None),
            ("reserved but unused", unused, None),
            ("its largest free block", found.largest_free_block_bytes, None),
            ("other processes", found.others_bytes or None, None),
        ]
    return [Number(label, size, of) for label, size, of in told if size is not None]


def _activations(session: Session, found: PostMortem) -> int | None:
    if found.unix_ns is None or found.device is None:
        return None
    # The record of the error comes after the allocator's last reading: what was taken since is what the step works with.
    for gpu in ledger(session, found.unix_ns, [(found.host, found.device)]):
        if gpu.bytes_of(ACTIVATIONS) and found.allocated_bytes is not None and len(gpu.ranks) == 1:
            return gpu.bytes_of(ACTIVATIONS) + max(0, found.allocated_bytes - gpu.allocated_bytes)
    return None
