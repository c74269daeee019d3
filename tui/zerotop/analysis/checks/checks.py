"""The checks of a recording against a budget, each with its outcome and a sentence that has the numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from zerotop.analysis.checks.budget import SEVERITIES, Budget, SizeLimit
from zerotop.analysis.checks.pace import MIN_STEPS, compare_paces, measure_pace
from zerotop.analysis.findings import Finding, Severity
from zerotop.analysis.formatting import format_bytes, format_count, format_percent, format_seconds
from zerotop.analysis.live_view import JobState
from zerotop.analysis.reports.comparison import compare_setup
from zerotop.analysis.reports.measures import Value
from zerotop.analysis.reports.recorded_run import RecordedRun, read_lowest_rank
from zerotop.analysis.steps.job_pace import find_usual, measure_iteration, measure_token_rate
from zerotop.recording.moments.process_exits import describe_exit_code
from zerotop_probe.recording import events

# Rows of a setup that differ only between jobs of which one is no measure for the other.
_SAME_JOB = ("model", "parameters")

# Rows of a setup that affect the iteration time.
_SAME_WORK = (
    "ZeRO stage",
    "parallelism",
    "optimizer offload",
    "parameter offload",
    "data type",
    "autocast",
    "ranks",
    "checkpointing",
    "micro-batch",
    "accumulation",
    "optimizer",
)


# Less waiting for cores than this is not mentioned.
_WAITING_SHARE = 0.01


class CheckOutcome(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # it could not be decided: the sentence says why


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    outcome: CheckOutcome
    sentence: str


def check_run(run: RecordedRun, budget: Budget, baseline: RecordedRun | None = None) -> tuple[Check, ...]:
    """Check a recording. Whether its job ended well and finished a step is checked in any case."""
    checks = [
        _check_end(run),
        _check_steps(run, budget),
        *_check_memory(run, budget),
        *_check_speed(run, budget),
        *_check_findings(run.findings, budget),
    ]
    if baseline is not None:
        checks += _check_baseline(run, baseline, budget)
    return tuple(checks)


def _make_check(name: str, is_good: bool, sentence: str) -> Check:
    return Check(name, CheckOutcome.PASSED if is_good else CheckOutcome.FAILED, sentence)


def _check_end(run: RecordedRun) -> Check:
    job = run.view.job
    if job.state is not JobState.ENDED:
        text = job.exit_text or "The job still runs."
        return Check("end", CheckOutcome.SKIPPED, text)
    code = "an unknown exit code" if job.exit_code is None else describe_exit_code(job.exit_code, job.exit_signal)
    if job.exit_code is None:
        return Check("end", CheckOutcome.SKIPPED, f"The job ended with {code}.")
    return _make_check("end", job.exit_code == 0, f"The job ended with {code}.")


def _check_steps(run: RecordedRun, budget: Budget) -> Check:
    finished = run.view.progress.finished_steps
    least = max(1, budget.steps or 1)
    if not finished:
        return _make_check("steps", False, "No finished step was recorded: there is nothing to measure.")
    return _make_check("steps", finished >= least, f"{format_count(finished, 'step')} finished, at least {least} required.")


def _check_memory(run: RecordedRun, budget: Budget) -> Iterator[Check]:
    for name, limit, peak in (
        ("GPU", budget.gpu_memory, find_gpu_peak(run)),
        ("host", budget.host_memory, _find_host_peak(run)),
    ):
        if limit is not None:
            yield _check_peak(name, limit, peak)


def _check_peak(kind: str, limit: SizeLimit, peak: int) -> Check:
    name = f"{kind.lower()}_memory"
    if not peak:
        return Check(name, CheckOutcome.SKIPPED, f"No {kind} memory was recorded.")
    text = f"The peak was {format_bytes(peak, limit.units)}, the limit is {limit.text}."
    return _make_check(name, peak <= limit.bytes, text)


def find_gpu_peak(run: RecordedRun) -> int:
    """Return the highest reserved memory of any GPU in bytes; 0 where none was recorded."""
    return max((gpu.reserved_peak_bytes or 0 for gpu in run.view.gpus), default=0)


def _find_host_peak(run: RecordedRun) -> int:
    return max((rank.rss_peak_bytes for rank in run.view.ranks), default=0)


def _check_speed(run: RecordedRun, budget: Budget) -> Iterator[Check]:
    rows = run.source.job_steps[budget.warmup_steps :]
    tokens = run.source.job_tokens[budget.warmup_steps :]
    usual = find_usual(rows["iteration_s"], rows["skipped"])
    unknown = f"No step was recorded{_describe_warmup(budget)}."
    if (limit := budget.iteration_seconds) is not None:
        if usual.any():
            median = measure_iteration(rows)
            took = f"The median iteration{_describe_warmup(budget)} took {format_seconds(median)}"
            text = f"{took}, the limit is {format_seconds(limit)}."
            yield _make_check("iteration_seconds", median <= limit, text)
        else:
            yield Check("iteration_seconds", CheckOutcome.FAILED, unknown)
    if (least := budget.tokens_per_second) is not None:
        known = usual & ((tokens > 0) | rows["counted"])
        if (tokens[known] > 0).any():
            rate = measure_token_rate(rows, tokens, known)
            text = f"{rate:,.0f} tokens per second{_describe_warmup(budget)}, at least {least:,.0f} required."
            yield _make_check("tokens_per_second", rate >= least, text)
        else:
            yield Check("tokens_per_second", CheckOutcome.FAILED, "No tokens were counted in the recorded steps.")


def _describe_warmup(budget: Budget) -> str:
    """Return which steps are left out: a summary and a report have all."""
    return f" after a warm-up of {format_count(budget.warmup_steps, 'step')}" if budget.warmup_steps else ""


def _check_findings(findings: tuple[Finding, ...], budget: Budget) -> Iterator[Check]:
    for name in budget.forbidden:
        found = [finding for finding in findings if finding.name == name or _is_as_severe(finding, name)]
        text = "It did not occur." if not found else f"{found[0].headline}."
        if len(found) > 1:
            text += f" {format_count(len(found) - 1, 'more finding')} of this kind."
        yield _make_check(f"finding {name}", not found, text)


def _is_as_severe(finding: Finding, name: str) -> bool:
    return (
        name in SEVERITIES
        and finding.severity is not Severity.INFO
        and (name == "warning" or finding.severity is Severity.ERROR)
    )


def _check_baseline(run: RecordedRun, baseline: RecordedRun, budget: Budget) -> Iterator[Check]:
    name = baseline.recording.name
    if reason := describe_machines(run, baseline) or _describe_difference(run, baseline, _SAME_WORK):
        yield Check("slowdown", CheckOutcome.SKIPPED, f"Not compared with the baseline {name}: {reason}.")
    else:
        yield _check_slowdown(run, baseline, budget)
    growth = budget.memory_growth_percent / 100
    for label, peak, before in (
        ("gpu_memory_growth", find_gpu_peak(run), find_gpu_peak(baseline)),
        ("host_memory_growth", _find_host_peak(run), _find_host_peak(baseline)),
    ):
        if peak and before:
            change = peak / before - 1
            text = f"The peak was {format_bytes(peak)}, {_format_change(change)} of the baseline's {format_bytes(before)}"
            yield _make_check(label, change <= growth, f"{text}; at most {_format_change(growth)} is allowed.")


def _check_slowdown(run: RecordedRun, baseline: RecordedRun, budget: Budget) -> Check:
    pace, before = (measure_pace(side.source, budget.warmup_steps) for side in (run, baseline))
    if pace is None or before is None or min(pace.steps, before.steps) < MIN_STEPS:
        counts = " and ".join(str(0 if one is None else one.steps) for one in (pace, before))
        text = f"Too few steps to compare: {counts} after the warm-up, {MIN_STEPS} needed in each recording."
        return Check("slowdown", CheckOutcome.SKIPPED, text)
    slower, explained = compare_paces(pace, before)
    times = f"{_format_time(pace.unhindered_s)} against {_format_time(before.unhindered_s)} an iteration"
    times += _describe_warmup(budget)
    if max(pace.waiting, before.waiting) > _WAITING_SHARE:
        times += ", without waiting for cores"
    text = f"{times}: {format_percent(abs(slower), 1)} {'slower' if slower > 0 else 'faster'}"
    noise = (
        f"noise explains up to {format_percent(explained, 1)}"
        if math.isfinite(explained)
        else "noise explains any difference"
    )
    limit = budget.slowdown_percent / 100
    if slower <= limit:
        return _make_check("slowdown", True, f"{text}; {format_percent(limit, 1)} is allowed, {noise}.")
    if slower <= explained:
        return Check(
            "slowdown", CheckOutcome.SKIPPED, f"{text}, but {noise}: run it again on a quieter machine, or for longer."
        )
    return _make_check("slowdown", False, f"{text}; {format_percent(limit, 1)} is allowed, {noise}.")


def _format_change(share: float) -> str:
    return f"{share * 100:+.1f} %"


def _format_time(seconds: float) -> str:
    """Return a time with four digits, in which 3 % can be seen: ``1.234 s``, ``41.23 ms``."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def describe_machines(run: RecordedRun, baseline: RecordedRun) -> str:
    """Return how the machines differ, as a clause; "" where they are alike."""
    ours, theirs = (_describe_machine(side) for side in (run, baseline))
    return f"it ran on another machine, {theirs} against {ours}" if ours != theirs else ""


def _describe_machine(run: RecordedRun) -> str:
    node = read_lowest_rank(run.recording, events.Node)
    if node is None:
        return "an unknown machine"
    gpus = [gpu.name for gpu in node.gpus or ()]
    kinds = [f"{gpus.count(name)} {name}" for name in dict.fromkeys(gpus)]
    nodes = len(run.recording.at().nodes)
    parts = [*kinds, f"{format_count(node.cores or 0, 'core')} of {node.cpu or 'an unknown processor'}"]
    return ", ".join([*([format_count(nodes, "node")] if nodes > 1 else []), *parts])


def describe_other_job(run: RecordedRun, baseline: RecordedRun) -> str:
    """Return why the baseline is of another job, as a clause; "" where both train the same model, or one's is unknown."""
    return _describe_difference(run, baseline, _SAME_JOB, is_known=True)


def _describe_difference(run: RecordedRun, baseline: RecordedRun, names: Collection[str], *, is_known: bool = False) -> str:
    """Return the first of these rows of the setup that differs, as a clause; "" if they are alike.

    ``is_known``: rows that a recording lacks do not count.
    """
    for measure in compare_setup([run, baseline]):
        if measure.name in names and measure.is_different and not (is_known and None in measure.values):
            ours, theirs = (_format_setting(value) for value in measure.values)
            verb = "are" if measure.name == "parameters" else "is"
            return f"its {measure.name} {verb} {theirs}, not {ours}"
    return ""


def _format_setting(value: Value) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
