"""The files that running ranks write their output to, as far as that is not the job's recorded output."""

from __future__ import annotations

from zerotop.analysis.formatting import format_count
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events


def describe_rank_files(recording: Recording, cursor_ns: int) -> str:
    """Return ``rank 0 writes to /logs/0/stdout.log, 3 other ranks to theirs``; "" if all print where the job does."""
    paths = {event.rank: event.stdout or event.stderr for event in recording.events_of(events.OutputFiles, cursor_ns)}
    named = sorted((rank, path) for rank, path in paths.items() if path)
    if not named:
        return ""
    rank, path = named[0]
    others = f", {format_count(len(named) - 1, 'other rank')} to theirs" if len(named) > 1 else ""
    return f"rank {rank} writes to {path}{others}"
