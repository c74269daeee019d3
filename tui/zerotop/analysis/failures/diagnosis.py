"""Why a job died: the failure that ended it, with its place, cause, numbers and one setting that would help.

A job may die for lack of memory (``out_of_memory``), by a signal, or by an error of its own (``crashes``). A job that
somebody stopped, or that ended well, did not die.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.failures.attempts import read_attempts
from zerotop.analysis.failures.crashes import explain_attempt, explain_job, explain_rank
from zerotop.analysis.failures.end import MEMORY, ByteFigure, End, build_host_figures
from zerotop.analysis.failures.last_moments import describe_place, has_worked_after
from zerotop.analysis.failures.oom_evidence import NOTABLE_SHARE, describe_batch
from zerotop.analysis.failures.out_of_memory import PostMortem, find_post_mortem
from zerotop.analysis.failures.rank_ends import find_ends
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.ledger_rows import ACTIVATIONS, GROWN, HELD
from zerotop.recording.keys import identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.moment import at_event
from zerotop.recording.moments.process_exits import count_oom_kills, find_first_exit, find_latest
from zerotop.recording.reader import Recording
from zerotop_probe.recording.events import Event, JobEnded, OutOfMemory, RankGone, StopSent

_END_EVENTS: tuple[type[Event], ...] = (OutOfMemory, JobEnded, RankGone)
# Ranks that wait for a dead one still finish the work that does not need it.
_LAST_WORK_NS = 5_000_000_000


def find_known_failure(at: At) -> End | None:
    """Return the end; output is read only where an event or a kill has to be explained."""
    has_ended = any(at.events_of(kind) for kind in _END_EVENTS)
    return find_failure(at) if has_ended or count_oom_kills(at) else None


# Spans show how long a rank survived an error, and output shows its messages.
@at_event("output", "spans")
def find_failure(at: At) -> End | None:
    """Return the early end of the job by the cursor; None while it works, and where it ended well or was stopped."""
    if at.events_of(StopSent):
        return None
    ended = at.events_of(JobEnded)
    attempts = read_attempts(at) if ended else []
    if len(attempts) > 1:
        last = attempts[-1]
        if ended[-1].exit_code == 0:
            return None  # an earlier attempt failed
        if last.step is None and last.end is not None and last.cause:
            return explain_attempt(at, last, last.end)
    end = _diagnose_failure(at)
    return None if end is None or (not ended and _is_still_working(at, end.unix_ns)) else end


def _diagnose_failure(at: At) -> End | None:
    post_mortem = find_post_mortem(at)
    job = find_first_exit(at)
    if post_mortem is not None and post_mortem.survived is not True:
        return _build_memory_failure(at, post_mortem)
    if job is None or (post_mortem is not None and not job.exit_code):
        return None
    latest = find_latest(at)
    ends = find_ends(at, latest)
    return explain_rank(at, ends, [identify_process(source) for source in latest], job) if ends else explain_job(at, job)


def _is_still_working(at: At, at_ns: int) -> bool:
    """Return whether a rank works, because the job was started again or the killed process was none of its ranks.

    Ranks that wait for a dead one finish the phase they are in and begin no other.
    """
    processes = map(identify_process, at.sources["spans"])
    return any(has_worked_after(at, process, at_ns + _LAST_WORK_NS) for process in processes)


# --- lack of memory ------------------------------------------------------------------------------------------------------

_MEMORY_SENTENCES = {
    "cuda": "ran out of GPU memory",
    "cuda_driver": "could not allocate GPU memory from the driver",
    "nccl": "had no GPU memory left for NCCL",
    "cublas": "had no GPU memory left for cuBLAS",
    "host": "ran out of host memory",
    "killed": "was killed for lack of host memory",
}


def _build_memory_failure(at: At, post_mortem: PostMortem) -> End:
    who = f"Rank {post_mortem.rank}" if post_mortem.rank is not None else "A rank"
    place = describe_place(post_mortem.phase, post_mortem.outer_phase, post_mortem.step)
    return End(
        kind=MEMORY,
        unix_ns=post_mortem.unix_ns if post_mortem.unix_ns is not None else at.cursor_ns,
        exit_code=post_mortem.exit_code,
        ranks=(post_mortem.rank,) if post_mortem.rank is not None else (),
        what=f"{who} {_MEMORY_SENTENCES[post_mortem.kind]}{place}.",
        where=", ".join(_list_location(post_mortem)),
        why=post_mortem.cause,
        numbers=_collect_figures(at.recording, post_mortem),
        advice=post_mortem.advice,
        setting=post_mortem.setting,
        spans=post_mortem.spans,
        host_memory=post_mortem.host_memory,
        last_words=post_mortem.text,
        final=post_mortem.survived is False,
        memory=post_mortem,
    )


def _list_location(post_mortem: PostMortem) -> Iterator[str]:
    if post_mortem.device is not None:
        yield f"GPU {post_mortem.device}" + (f" of {post_mortem.host}" if post_mortem.host else "")
    elif post_mortem.host:
        yield post_mortem.host
    if post_mortem.micro_step is not None and post_mortem.outer_phase != "eval":
        yield f"micro-step {post_mortem.micro_step}"
    if post_mortem.rows is not None:
        yield f"micro-batch of {describe_batch(post_mortem.rows, post_mortem.sequence)}"


def _collect_figures(recording: Recording, post_mortem: PostMortem) -> tuple[ByteFigure, ...]:
    limit = post_mortem.limit_bytes
    figures: list[tuple[str, int | None, int | None]] = [("requested", post_mortem.requested_bytes, None)]
    if post_mortem.is_on_host:
        figures += build_host_figures(post_mortem.host_memory, limit)
    else:
        # A limit of PyTorch's allocator is less than the device, of which the rest is free.
        figures += [
            ("free", post_mortem.free_bytes, post_mortem.total_bytes or limit),
            ("allocated", post_mortem.allocated_bytes, limit if post_mortem.is_limited else None),
            *_measure_parts(recording, post_mortem),
            ("reserved but unused", post_mortem.unallocated_bytes, None),
            ("largest free block", post_mortem.largest_free_block_bytes, None),
            ("other processes", post_mortem.others_bytes or None, None),
        ]
    return tuple(ByteFigure(label, size, of_bytes) for label, size, of_bytes in figures if size is not None)


def _measure_parts(recording: Recording, post_mortem: PostMortem) -> Iterator[tuple[str, int | None, None]]:
    """Yield the parts of the allocated memory that outlive their step, and that do not."""
    if post_mortem.unix_ns is None or post_mortem.device is None or post_mortem.allocated_bytes is None:
        return
    for ledger in read_ledgers(recording.at(post_mortem.unix_ns), [(post_mortem.host, post_mortem.device)]):
        kept, activations = ledger.sum_bytes(HELD, GROWN), ledger.sum_bytes(ACTIVATIONS)
        if activations and len(ledger.ranks) == 1:
            yield "of which kept", kept if kept >= NOTABLE_SHARE * post_mortem.allocated_bytes else None, None
            # The error is recorded after the allocator's last reading: allocations in between belong to the step.
            since = max(0, post_mortem.allocated_bytes - ledger.allocated_bytes)
            yield "of which activations", activations + since, None
