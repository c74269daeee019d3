"""A scheduler ended the job: it reached its time limit, used too much memory, or lost its nodes.

Read from Slurm's messages. A job that somebody cancels by hand needs no finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

from zerotop.analysis.failures.senders import Reason, Sender, find_senders
from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, SearchWindow, Severity, in_job
from zerotop.recording.output.tail import read_last_lines
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="job_cancelled",
    severity=Severity.ERROR,
    confidence=0.95,
    headline="",
    details="The training since the last checkpoint is lost.",
)
_KINDS = {
    Reason.TIME: _KIND.with_changes(
        headline="{name} ended job {job}: its time limit was reached",
        advice="Ask for more time, and let Slurm send a signal before the end, so that the script can save a checkpoint.",
        fix="#SBATCH --time=HH:MM:SS --signal=B:USR1@300",
    ),
    Reason.PREEMPTED: _KIND.with_changes(
        headline="{name} ended job {job}: another job needs its nodes",
        advice="Save more often, and let Slurm start the job again.",
        fix="#SBATCH --requeue",
    ),
    Reason.NODE: _KIND.with_changes(
        headline="{name} ended job {job}: a node has failed",
        advice="Leave that node out, and let Slurm start the job again.",
        fix="#SBATCH --requeue --exclude=NODE",
    ),
    Reason.MEMORY: _KIND.with_changes(
        headline="{name} ended processes[ of job {job}]: they exceeded their memory limit",
        advice="Ask for more memory, or use less host memory: {less_host_memory}.",
        fix="#SBATCH --mem=0",
    ),
}


@in_job(kinds=None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding]:
    """Report once for each end of the job: the first reason that Slurm printed."""
    recording = window.recording
    ends = [event.unix_ns for event in recording.events_of(events.JobEnded)]
    for begin_ns, end_ns in window.items([*pairwise([0, *ends])]):
        lines = read_last_lines(recording.at.at(end_ns))
        senders = sorted(chain.from_iterable(map(find_senders, lines)), key=lambda sender: sender.time_ns)
        found = [sender for sender in senders if sender.reason in _KINDS and sender.time_ns > begin_ns]
        if found:
            yield _build_finding(recording, found[0], end_ns)


def _build_finding(recording: Evidence, sender: Sender, end_ns: int) -> Finding:
    groups = [group for group in recording.groups if group.lead.source.created_ns <= end_ns]
    group = groups[-1] if groups else None
    return _KINDS[sender.reason].at(group, sender.time_ns, end_ns, {}, cost=1.0, name=sender.name, job=sender.job)
