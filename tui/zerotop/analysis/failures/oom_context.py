"""Where and when memory ran out, as far as a recording tells, and whether the rank lived on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zerotop.analysis.failures.last_spans import LastSpan, last_batch, last_spans, outermost, works_after
from zerotop.analysis.processes.alive_ranks import Process, process_of
from zerotop.analysis.processes.process_exits import Ends
from zerotop.session.reader import Event, Session


class Scene(NamedTuple):
    """Where and when it happened, as far as is known."""

    process: Process | None
    at_ns: int
    phase: str
    outer: str
    facts: Mapping[str, int]  # step, micro_step, rows, sequence, tokens, device
    spans: tuple[LastSpan, ...]


def survived_it(session: Session, event: Event, cursor_ns: int) -> bool | None:
    """Whether the rank that recorded an error trained on; None while that is not known."""
    process = Process(event.host, event.pid, event.rank)
    if works_after(session, process, event.unix_ns, cursor_ns):
        return True
    ends = Ends(one for one in session.events if one.unix_ns <= cursor_ns)
    return None if ends.after(event.host, event.pid, event.unix_ns) is None else False


def last_scene(session: Session, cursor_ns: int, rank: int | None, device: int | None) -> Scene:
    """The last that is known of a rank; of the only one where it is not said which."""
    sources = [s for s in session.sources["spans"] if s.born_ns <= cursor_ns and rank in (None, s.rank)]
    if not sources or (rank is None and len({source.rank for source in sources}) > 1):
        return Scene(None, cursor_ns, "", "", {}, ())
    source = max(sources, key=lambda one: one.born_ns)
    process, known = process_of(source), source.count_known(cursor_ns)
    begins = [s.last_ns or 0 for s in session.sources["begins"] if process_of(s) == process]
    at_ns = min(cursor_ns, max([int(source.array["end_ns"][known - 1]) + source.offset_ns if known else 0, *begins]))
    spans = last_spans(session, process, at_ns, cursor_ns)
    failed = [span for span in spans if span.failed]
    facts = last_batch(session, process, cursor_ns) | ({} if device is None else {"device": device})
    if failed:
        inner, outer = max(failed, key=lambda s: s.depth), min(failed, key=lambda s: s.depth)
        facts |= {"step": inner.step, "micro_step": inner.micro_step}
        return Scene(process, at_ns, inner.phase, outer.phase, facts, spans)
    phase = outermost(session, process, at_ns, cursor_ns)
    if spans:
        facts |= {"step": spans[-1].step, "micro_step": spans[-1].micro_step}
    return Scene(process, at_ns, phase, phase, facts, spans)
