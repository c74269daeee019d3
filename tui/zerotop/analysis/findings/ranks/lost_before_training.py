"""A job ended before any of its ranks trained: a signal killed it, or its output names what was short.

No rank has a finding of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.failures.crashes import explain_job
from zerotop.analysis.findings.ranks.dead_rank import STOP_SIGNALS, build_finding
from zerotop.analysis.findings.support import Evidence, Finding, SearchWindow, in_job
from zerotop.recording.moments.process_exits import find_first_exit
from zerotop_probe.recording import events


@in_job()
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding]:
    """Report the shortage, or the signal, when the job has ended."""
    for ended in window.items(window.recording.events_of(events.JobEnded)[:1]):
        at = window.recording.at.at(ended.unix_ns)
        job = find_first_exit(at) if not window.recording.groups else None
        if job is None:
            continue
        end, is_stopped = explain_job(at, job), job.signal_name in STOP_SIGNALS or bool(at.events_of(events.StopSent))
        if end.is_shortage or (job.rank is None and job.signal_name is not None and not is_stopped):
            yield build_finding(None, end, ended.unix_ns)
