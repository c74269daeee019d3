"""The output of ``zerotop run`` after a job has ended: its worst finding, its cost, and the requested report."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.common.exit_messages import has_ranks, write_messages
from zerotop.report import OTHER_FORMATS
from zerotop_probe.outside.job import job_control

# Analysis and report are imported once the job is over: while it runs, the process that waits for it stays small.


def check_place(report: str) -> None:
    """Raise Problem if a report cannot be written there: better before the job than after it."""
    folder = Path(report).absolute().parent
    if Path(report).is_dir():
        raise Problem(f"--report needs a file, and {report} is a folder", USAGE)
    if (suffix := Path(report).suffix.lower()) in OTHER_FORMATS:
        raise Problem(f"Not started: the report is an HTML page, not {suffix[1:].upper()}. Name another file", USAGE)
    if not folder.is_dir():
        raise Problem(f"Not started: the report cannot be written, there is no folder {folder}", USAGE)
    if not os.access(folder, os.W_OK):
        raise Problem(f"Not started: the report cannot be written, {folder} is read-only", USAGE)


def has_ended(recording: str) -> bool:
    """Whether neither the job nor its sampler runs any more."""
    return not job_control.is_job_alive(recording) and not job_control.is_sampler_alive(recording)


def report_job(recording: str, report: str) -> None:
    """Write the report of a recording; a message says so, or why not. The exit code stays the job's."""
    from zerotop.commands.common.new_files import find_free_path
    from zerotop.commands.common.report_files import build_page, write_report
    from zerotop.recording.reader import Recording, RecordingError

    try:
        write_report(find_free_path(Path(report)), build_page(Recording.open(Path(recording))))
    except (OSError, RecordingError) as error:
        write_messages(f"No report was written: {error}")


def describe_worst_finding(recording: str) -> list[str]:
    """Return a line about the error or warning that matters most; none without any, and for a job without ranks."""
    if not has_ranks(recording):
        return []
    from zerotop.analysis.findings import Severity
    from zerotop.analysis.formatting import Text
    from zerotop.analysis.reports.finding_costs import rank_findings
    from zerotop.analysis.reports.recorded_run import RecordedRun
    from zerotop.recording.reader import Recording, RecordingError

    try:
        run = RecordedRun(Recording.open(Path(recording)), memory=False)
        findings = run.findings
    except RecordingError:
        return []
    ranked = rank_findings(findings, run.source.job_steps, run.source.end_ns)
    worst = next((one for one in ranked if one.finding.name != "probe_missing"), None)  # that has a line of its own
    if worst is None or worst.finding.severity is Severity.INFO:
        return []
    count = "it" if len(findings) == 1 else f"all {len(findings)} findings"
    details = worst.finding.details
    file = details.values.get("file") if isinstance(details, Text) else None
    place = f" Its last output is in {file}." if file and worst.finding.name == "dead_rank" else ""
    return [f"{worst.finding.headline}.{place} To see {count}: zerotop findings {shlex.quote(recording)}"]


def describe_expectation(recording: str) -> list[str]:
    """Return a sentence about the errors of the prediction that was kept with ``--expect``, or why there are none."""
    from zerotop.analysis.sweeps.baseline import NoBaselineError, read_baseline
    from zerotop.analysis.sweeps.grading import describe_errors, grade_kept, read_expectation
    from zerotop.recording.reader import Recording, RecordingError

    try:
        opened = Recording.open(Path(recording))
        kept = read_expectation(opened)
        if kept is None:
            return []
        grade = grade_kept(read_baseline(opened), kept)
    except (NoBaselineError, RecordingError) as error:
        return [f"The prediction cannot be compared with the run: {str(error).rstrip('.')}."]
    if grade.refusal:
        return [f"The prediction was of another setting: {grade.refusal}."]
    return [f"Predicted less measured: {describe_errors(grade)} ({kept.question})."]


def describe_cost(recording: str) -> list[str]:
    """Return a sentence about the cost of the job; none if the recording cannot be read."""
    from zerotop.analysis.views.recording_source import RecordingSource
    from zerotop.recording.reader import Recording, RecordingError

    try:
        return [RecordingSource(Recording.open(Path(recording))).view_at(None).cost_sentence]
    except RecordingError:
        return []
