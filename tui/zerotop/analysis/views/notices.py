"""Notices about a recording: what is missing from it, and why."""

from __future__ import annotations

from zerotop.analysis.views.job_exit import Losses
from zerotop.session.reader import Session


def describe_notices(session: Session, cursor_ns: int, losses: Losses) -> tuple[str, ...]:
    """Return the notices at a moment in unix time, one sentence each."""
    notices = [str(e.facts["gpu_notice"]) for e in session.events_named("node", cursor_ns) if e.facts.get("gpu_notice")]
    notices += [f"Rank {e.facts.get('rank')}: {e.facts.get('why')}" for e in session.events_named("rank_silent", cursor_ns)]
    notices += [str(event.facts.get("text")) for event in session.events_named("attached", cursor_ns)]
    notices += _describe_not_reached(session, cursor_ns)
    notices += _describe_not_entered(session, cursor_ns)
    notices += filter(None, [losses.loss_sentence])
    for event in (*session.events_named("probe_error", cursor_ns), *session.events_named("sampler_error", cursor_ns)):
        notices.append(f"Recording is partial: {event.facts.get('where')}: {event.facts.get('error')}")
    return tuple(dict.fromkeys([*notices, *describe_damage(session)]))


def describe_damage(session: Session) -> list[str]:
    """Return a sentence for each kind of damage in a recording."""
    counts = (
        (session.damaged_files, "damaged file", "skipped"),
        (session.damaged_lines, "damaged event line", "skipped or read in part"),
        (session.damaged_records, "damaged record", "skipped"),
        (session.replaced_files, "file", "replaced by a shorter one meanwhile: open the recording again"),
    )
    return [
        f"{count} {noun} was {effect}." if count == 1 else f"{count} {noun}s were {effect}."
        for count, noun, effect in counts
        if count
    ]


def _describe_not_reached(session: Session, cursor_ns: int) -> list[str]:
    """Describe the nodes whose latest event says that they could not be reached."""
    reports = [*session.events_named("not_reached", cursor_ns), *session.events_named("reached", cursor_ns)]
    last = {str(event.facts.get("name")): event for event in sorted(reports, key=lambda event: event.unix_ns)}
    missing = [(name, event.facts.get("why")) for name, event in last.items() if event.name == "not_reached"]
    return [f"{name} takes no part: {why}." for name, why in missing]


def _describe_not_entered(session: Session, cursor_ns: int) -> list[str]:
    """Describe the processes that the probe could not enter, then or later."""
    last = {(event.host, event.facts.get("pid")): event for event in session.events_named("not_entered", cursor_ns)}
    for event in session.events_named("entered", cursor_ns):
        last.pop((event.host, event.pid), None)
    sentences = []
    for (_, pid), event in last.items():
        rank = event.facts.get("rank")
        who = f"Process {pid}" if rank is None else f"Rank {rank}"
        sentences.append(f"{who} is not entered: {event.facts.get('why')}")
    return sentences
