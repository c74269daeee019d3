"""A job failed before any of its ranks trained, and its output names what was short: no rank has a finding of its own."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.failures.crashes import explain_job
from zerotop.analysis.findings.ranks.dead_rank import build_finding
from zerotop.analysis.findings.support import Evidence, Finding, SearchWindow, in_job
from zerotop.recording.moments.process_exits import find_first_exit
from zerotop_probe.recording import events


@in_job()
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding]:
    """Report the shortage when the job has ended."""
    for ended in window.items(window.recording.events_of(events.JobEnded)[:1]):
        at = window.recording.at.at(ended.unix_ns)
        job = find_first_exit(at) if not window.recording.groups else None
        if job is not None and (end := explain_job(at, job)).is_shortage:
            yield build_finding(None, end, ended.unix_ns)
