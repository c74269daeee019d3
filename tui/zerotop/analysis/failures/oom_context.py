"""Where and when memory ran out, as far as a recording tells, and whether the rank lived on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zerotop.analysis.failures.last_spans import LastSpan, find_last_batch, find_outermost, has_worked_after, read_last_spans
from zerotop.analysis.processes.alive_ranks import RankProcess, identify_process
from zerotop.analysis.processes.process_exits import ProcessExits
from zerotop.session.reader import Event, Session


class FailureScene(NamedTuple):
    """Where and when it happened, as far as is known."""

    process: RankProcess | None
    at_ns: int
    phase: str
    outer_phase: str
    facts: Mapping[str, int]  # step, micro_step, rows, sequence, tokens, device
    spans: tuple[LastSpan, ...]


def has_survived(session: Session, event: Event, cursor_ns: int) -> bool | None:
    """Whether the rank that recorded an error trained on; None while that is not known."""
    process = RankProcess(event.host, event.pid, event.rank)
    if has_worked_after(session, process, event.unix_ns, cursor_ns):
        return True
    ends = ProcessExits(one for one in session.events if one.unix_ns <= cursor_ns)
    return None if ends.find_exit_after(event.host, event.pid, event.unix_ns) is None else False


def find_last_scene(session: Session, cursor_ns: int, rank: int | None, device: int | None) -> FailureScene:
    """The last that is known of a rank; of the only one where it is not said which."""
    sources = [s for s in session.sources["spans"] if s.created_ns <= cursor_ns and rank in (None, s.rank)]
    if not sources or (rank is None and len({source.rank for source in sources}) > 1):
        return FailureScene(None, cursor_ns, "", "", {}, ())
    source = max(sources, key=lambda one: one.created_ns)
    process, known = identify_process(source), source.count_until(cursor_ns)
    begins = [s.last_ns or 0 for s in session.sources["begins"] if identify_process(s) == process]
    at_ns = min(cursor_ns, max([int(source.array["end_ns"][known - 1]) + source.offset_ns if known else 0, *begins]))
    spans = read_last_spans(session, process, at_ns, cursor_ns)
    failed = [span for span in spans if span.failed]
    facts = find_last_batch(session, process, cursor_ns) | ({} if device is None else {"device": device})
    if failed:
        inner, outer = max(failed, key=lambda s: s.depth), min(failed, key=lambda s: s.depth)
        facts |= {"step": inner.step, "micro_step": inner.micro_step}
        return FailureScene(process, at_ns, inner.phase, outer.phase, facts, spans)
    phase = find_outermost(session, process, at_ns, cursor_ns)
    if spans:
        facts |= {"step": spans[-1].step, "micro_step": spans[-1].micro_step}
    return FailureScene(process, at_ns, phase, phase, facts, spans)
