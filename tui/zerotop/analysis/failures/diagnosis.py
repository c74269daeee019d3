"""Why a job died, in one block: what happened, where, for what reason, with which numbers, and what would help most.

A job dies for want of memory (``out_of_memory``), because a process of it was killed (``host_deaths``), or because it failed
by itself: an exception, a wrong argument. One that somebody stopped, and one that ended well, did not die.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from zerotop.analysis.failures.crashes import build_error_failure, build_signal_failure, find_signal
from zerotop.analysis.failures.failure import MEMORY, ByteFigure, Failure, describe_place
from zerotop.analysis.failures.last_spans import has_worked_after
from zerotop.analysis.failures.oom_kills import count_kills, find_death
from zerotop.analysis.failures.oom_log_parser import KILLED
from zerotop.analysis.failures.out_of_memory import PostMortem, find_post_mortem
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.ledger_rows import ACTIVATIONS
from zerotop.analysis.processes.alive_ranks import identify_process
from zerotop.session.reader import Event, Session

_END_EVENTS = ("out_of_memory", "job_ended", "rank_gone")
# Ranks that have what they need from a dead one still do it.
_LAST_WORK_NS = 5_000_000_000


class FailureFinder:
    """The failure at any cursor; output is read only when there is an end to explain."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._cached: dict[tuple[int, ...], Failure | None] = {}

    def failure_at(self, cursor_ns: int) -> Failure | None:
        """What had killed the job by then; None while it lives, and where it ended well."""
        session = self._session
        told = bisect_right(session.events, cursor_ns, key=lambda event: event.unix_ns)
        ends = any(session.events_named(name, cursor_ns) for name in _END_EVENTS)
        if not ends and not count_kills(session, cursor_ns):
            return None
        # Spans tell how long an error was survived, output what was printed.
        written = (source.count_until(cursor_ns) for name in ("output", "spans") for source in session.sources[name])
        key = (told, *written)
        if key not in self._cached:
            self._cached = {key: find_failure(session, cursor_ns)}
        return self._cached[key]


def find_failure(session: Session, cursor_ns: int) -> Failure | None:
    """What had killed the job by the cursor."""
    known = [event for event in session.events if event.unix_ns <= cursor_ns]
    if any(event.name == "stop_sent" for event in known):
        return None
    ended = next((event for event in reversed(known) if event.name == "job_ended"), None)
    found = _diagnose_failure(session, cursor_ns, known, ended)
    if found is None or (ended is None and _is_still_working(session, found.unix_ns, cursor_ns)):
        return None
    return found


def _diagnose_failure(session: Session, cursor_ns: int, events: Sequence[Event], ended: Event | None) -> Failure | None:
    found = find_post_mortem(session, cursor_ns)
    if found is not None and not (found.survived is True and ended is not None and ended.facts.get("exit_code")):
        return _build_memory_failure(session, cursor_ns, found) if found.survived is not True else None
    end = find_death(session, cursor_ns)
    if end is None:
        gone = _find_vanished_rank(events) if ended is None else None
        return build_signal_failure(session, cursor_ns, gone, None) if gone is not None else None
    if end.rank is not None or find_signal(end) is not None:
        gone = next((e for e in events if e.name == "rank_gone" and e.facts.get("rank") == end.rank), ended)
        return build_signal_failure(session, cursor_ns, gone, end) if gone is not None else None
    return build_error_failure(session, cursor_ns, end, str(ended.facts.get("text") or "") if ended is not None else "")


def _is_still_working(session: Session, at_ns: int, cursor_ns: int) -> bool:
    """Whether a rank works: the job was started again, or what was killed was none of its ranks.

    Those that wait for a dead one end what they were in, and begin nothing.
    """
    since_ns = at_ns + _LAST_WORK_NS
    return any(
        has_worked_after(session, identify_process(source), since_ns, cursor_ns) for source in session.sources["spans"]
    )


def _find_vanished_rank(events: Sequence[Event]) -> Event | None:
    """The first rank that was gone without a goodbye, where none had left in good order before."""
    left = {(event.host, event.pid) for event in events if event.name == "goodbye"}
    first = next((event for event in events if event.name == "rank_gone"), None)
    return first if first is not None and (first.host, first.facts.get("pid")) not in left else None


_MEMORY_SENTENCES = {
    "cuda": "ran out of GPU memory",
    "cuda_driver": "could get no GPU memory from the driver",
    "nccl": "had no GPU memory left for NCCL",
    "cublas": "had no GPU memory left for cuBLAS",
    "host": "ran out of host memory",
    "killed": "was killed for want of host memory",
}


def _build_memory_failure(session: Session, cursor_ns: int, post_mortem: PostMortem) -> Failure:
    who = f"Rank {post_mortem.rank}" if post_mortem.rank is not None else "A rank"
    return Failure(
        kind=MEMORY,
        unix_ns=post_mortem.unix_ns if post_mortem.unix_ns is not None else cursor_ns,
        rank=post_mortem.rank,
        what=f"{who} {_MEMORY_SENTENCES[post_mortem.kind]}{describe_place(post_mortem.phase, post_mortem.outer_phase, post_mortem.step)}.",
        where=_describe_location(post_mortem),
        why=post_mortem.cause,
        numbers=tuple(_collect_figures(session, post_mortem)),
        advice=post_mortem.advice,
        setting=post_mortem.setting,
        spans=post_mortem.spans,
        host_memory=post_mortem.host_memory,
        last_words=post_mortem.text,
        final=post_mortem.survived is False,
        memory=post_mortem,
    )


def _describe_location(post_mortem: PostMortem) -> str:
    parts = (
        [f"GPU {post_mortem.device}" + (f" of {post_mortem.host}" if post_mortem.host else "")]
        if post_mortem.device is not None
        else []
    )
    parts += [post_mortem.host] if post_mortem.device is None and post_mortem.host else []
    parts += (
        [f"micro-step {post_mortem.micro_step}"]
        if post_mortem.micro_step is not None and post_mortem.outer_phase != "eval"
        else []
    )
    if post_mortem.rows is not None:
        parts.append(
            f"micro-batch of {post_mortem.rows}" + (f" x {post_mortem.sequence} tokens" if post_mortem.sequence else " rows")
        )
    return ", ".join(parts)


def _collect_figures(session: Session, post_mortem: PostMortem) -> list[ByteFigure]:
    limit, told = post_mortem.limit_bytes, []
    if post_mortem.kind in ("host", KILLED):
        used = max((sample.used_bytes for sample in post_mortem.host_memory), default=None)
        told = [("asked for", post_mortem.requested_bytes, None), ("host memory in use", used, limit)]
    else:
        unused = None
        if post_mortem.reserved_bytes is not None and post_mortem.allocated_bytes is not None:
            unused = post_mortem.reserved_bytes - post_mortem.allocated_bytes
        told = [
            ("asked for", post_mortem.requested_bytes, None),
            ("free", post_mortem.free_bytes, limit),
            ("allocated", post_mortem.allocated_bytes, None),
            ("of which activations", _measure_activations(session, post_mortem), None),
            ("reserved but unused", unused, None),
            ("its largest free block", post_mortem.largest_free_block_bytes, None),
            ("other processes", post_mortem.others_bytes or None, None),
        ]
    return [ByteFigure(label, size, of) for label, size, of in told if size is not None]


def _measure_activations(session: Session, post_mortem: PostMortem) -> int | None:
    if post_mortem.unix_ns is None or post_mortem.device is None:
        return None
    # The record of the error comes after the allocator's last reading: what was taken since is what the step works with.
    for gpu in read_ledgers(session, post_mortem.unix_ns, [(post_mortem.host, post_mortem.device)]):
        if gpu.sum_bytes(ACTIVATIONS) and post_mortem.allocated_bytes is not None and len(gpu.ranks) == 1:
            return gpu.sum_bytes(ACTIVATIONS) + max(0, post_mortem.allocated_bytes - gpu.allocated_bytes)
    return None
