"""What whoever reads a recording has to know of it: what it lacks, and why."""

from __future__ import annotations

from zerotop.analysis.views.job_exit import Losses
from zerotop.session.reader import Session


def describe_notices(session: Session, cursor_ns: int, losses: Losses) -> tuple[str, ...]:
    """One sentence each, as of a moment in unix time; ``lost`` is what could not be written by then."""
    found = [str(e.facts["gpu_notice"]) for e in session.events_named("node", cursor_ns) if e.facts.get("gpu_notice")]
    found += [f"Rank {e.facts.get('rank')}: {e.facts.get('why')}" for e in session.events_named("rank_silent", cursor_ns)]
    found += [str(event.facts.get("text")) for event in session.events_named("attached", cursor_ns)]
    found += _describe_not_reached(session, cursor_ns)
    found += _describe_not_entered(session, cursor_ns)
    found += filter(None, [losses.loss_sentence])
    for event in (*session.events_named("probe_error", cursor_ns), *session.events_named("sampler_error", cursor_ns)):
        found.append(f"Recording is partial: {event.facts.get('where')}: {event.facts.get('error')}")
    return tuple(dict.fromkeys([*found, *describe_damage(session)]))


def describe_damage(session: Session) -> list[str]:
    """What of a recording could not be read, a sentence each."""
    counts = (
        (session.damaged_files, "file", "of this recording", ""),
        (session.damaged_lines, "line", "in its events", " or read in part"),
    )
    return [_describe_skipped(*told) for told in counts if told[0]]


def _describe_skipped(count: int, noun: str, where: str, otherwise: str) -> str:
    is_one = count == 1
    return f"{count} damaged {noun if is_one else noun + 's'} {where} {'was' if is_one else 'were'} passed over{otherwise}."


def _describe_not_reached(session: Session, cursor_ns: int) -> list[str]:
    """The nodes that were to take part and do not, by the last that was said of each."""
    told = [*session.events_named("not_reached", cursor_ns), *session.events_named("reached", cursor_ns)]
    last = {str(event.facts.get("name")): event for event in sorted(told, key=lambda event: event.unix_ns)}
    missing = [(name, event.facts.get("why")) for name, event in last.items() if event.name == "not_reached"]
    return [f"{name} takes no part: {why}." for name, why in missing]


def _describe_not_entered(session: Session, cursor_ns: int) -> list[str]:
    """The processes that the probe could not be put into, and was not later."""
    last = {(event.host, event.facts.get("pid")): event for event in session.events_named("not_entered", cursor_ns)}
    for event in session.events_named("entered", cursor_ns):
        last.pop((event.host, event.pid), None)
    found = []
    for (_, pid), event in last.items():
        rank = event.facts.get("rank")
        who = f"Process {pid}" if rank is None else f"Rank {rank}"
        found.append(f"{who} is not entered: {event.facts.get('why')}")
    return found
