"""A job failed before any of its ranks trained, and its output names what was short: no rank has a finding of its own."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation
from zerotop.analysis.annotations.support.evidence import Evidence
from zerotop.analysis.annotations.support.shortage_kinds import choose_shortage_kind
from zerotop.analysis.failures.rank_ends import find_last_exception
from zerotop_probe.recording import events


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report the shortage when the job has ended."""
    ended = recording.events_of(events.JobEnded)
    is_first = bool(recording.read_new_items(ended[:1], "lost before training"))
    if not is_first or recording.groups or ended[-1].exit_code == 0:
        return
    end_ns = ended[-1].unix_ns
    traceback = find_last_exception(recording.at.at(end_ns))
    chosen = choose_shortage_kind(
        recording, ended[-1].writer.host, traceback.rank if traceback is not None else None, traceback
    )
    if traceback is None or chosen is None:
        return
    kind, values = chosen
    ranks = () if traceback.rank is None else (traceback.rank,)
    evidence = {"exit_code": ended[-1].exit_code}
    text = traceback.text if traceback.text.endswith(".") else f"{traceback.text}."
    yield kind.at(None, traceback.time_ns, end_ns, evidence, step=None, ranks=ranks, text=text, **values)
