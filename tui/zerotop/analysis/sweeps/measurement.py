"""The measurements of one point of a sweep: peak memory, pace, and cores in the optimizer's step.

The warm-up steps are left out of all but memory, which must fit from the first step on. The remaining n steps have n - 1
intervals between their ends: the first begins at the end of the last warm-up step, which is late if that one was slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerotop.analysis.failures.diagnosis import find_failure
from zerotop.analysis.failures.end import MEMORY
from zerotop.analysis.failures.oom_log_parser import CUDA
from zerotop.analysis.failures.out_of_memory import find_post_mortem
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.steps.job_pace import estimate_tokens
from zerotop.analysis.sweeps.grading import read_expectation
from zerotop.analysis.views.job_exit import Losses, read_ending
from zerotop.recording.output.tail import read_output_tail
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Rows, iter_samples, split_samples
from zerotop.recording.steps.step_table import RankSteps, StepTable
from zerotop.recording.sweeps import CRASHED, HUNG, OK, OUT_OF_MEMORY
from zerotop_probe.recording.tables import PHASE_CODE

_STEP_CODE = PHASE_CODE["step"]
# Read around the steps, for a sample before the first and after the last.
_AROUND_NS = 3_000_000_000
_LINE_BYTES = 1000  # of the output's end, for its last line


def measure_point(recording: Recording, warmup: int) -> dict[str, Any]:
    """Return the measured fields of a ``sweeps.Result`` by name; None where nothing was recorded."""
    table = StepTable(recording)
    table.update()
    ranks = [process for process in table.rank_steps if len(process.step_rows)]
    measured = [process.recorded_steps[process.recorded_steps["step"] >= warmup] for process in ranks]
    pace = _measure_pace(measured)
    return {
        "steps": max((len(rows) for rows in measured), default=None),
        "micro_batch_tokens": _find_micro_batch(measured),
        "allocated_peak_bytes": _find_highest(ranks, "allocated_peak_bytes"),
        "reserved_peak_bytes": _find_highest(ranks, "reserved_peak_bytes"),
        "nvml_peak_bytes": _find_highest(ranks, "nvml_process_bytes"),
        "host_peak_bytes": _sum_host_peaks(ranks),
        **_read_expected(recording),
        "step_cores": _measure_step_cores(recording, ranks, measured),
        **pace,
    }


def _read_expected(recording: Recording) -> dict[str, int]:
    """Return the fields with the prediction that was kept at the launch."""
    expected = read_expectation(recording)
    figures = expected.figures if expected is not None else {}
    return {f"expected_{name}_bytes": round(figures[name][1]) for name in ("allocated", "reserved") if name in figures}


def measure_shortage(recording: Recording) -> dict[str, int]:
    """Return the fields of a ``sweeps.Result`` about the end of a job that ran out of GPU memory; none if it did not."""
    found = find_post_mortem(recording.at(recording.end_ns))
    if found is None or found.kind != CUDA or found.requested_bytes is None or found.allocated_bytes is None:
        return {}
    is_too_small = (found.largest_free_block_bytes or 0) < found.requested_bytes
    unusable = (found.unallocated_bytes or 0) if is_too_small else 0
    return {"needed_bytes": found.allocated_bytes + found.requested_bytes, "unusable_bytes": unusable}


def judge_outcome(recording: Recording, exit_code: int, *, is_hung: bool) -> tuple[str, str]:
    """Return a job's outcome and a sentence about it; "" if it ended well and its recording is complete."""
    if is_hung:
        return _judge_hung(recording)
    if exit_code == 0:
        ending = read_ending(recording)
        return OK, Losses(ending.lost_records, ending.lost_output_bytes).loss_sentence
    failure = find_failure(recording.at(recording.end_ns))
    if failure is None:
        return CRASHED, read_ending(recording).text or f"The exit code is {exit_code}."
    sentence = " ".join(filter(None, (failure.what, failure.why)))
    if failure.kind == MEMORY:
        return OUT_OF_MEMORY, sentence
    last_line = "" if failure.last_words else _read_last_line(recording)
    return CRASHED, f"{sentence} Its last line: {last_line}" if last_line else sentence


def _read_last_line(recording: Recording) -> str:
    lines = read_output_tail(recording.at(recording.end_ns), _LINE_BYTES).decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _judge_hung(recording: Recording) -> tuple[str, str]:
    """A rank that ran out of memory lets the others wait for it."""
    post_mortem = find_post_mortem(recording.at(recording.end_ns))
    if post_mortem is not None and post_mortem.survived is not True:
        return OUT_OF_MEMORY, post_mortem.cause
    for finding in detect_findings(recording, recording.end_ns):
        if finding.name in ("hung_ranks", "stuck_at_start"):
            return HUNG, f"{finding.headline}. {finding.details}".strip()
    return HUNG, "No rank finished a phase and nothing was printed for too long."


def _find_micro_batch(measured: Sequence[Rows]) -> int | None:
    """Return the median tokens of a micro-batch of one rank."""
    tokens = np.concatenate([np.empty(0), *(rows["tokens"] / np.maximum(1, rows["micro_steps"]) for rows in measured)])
    tokens = tokens[tokens > 0]
    return round(float(np.median(tokens))) if len(tokens) else None


def _find_highest(ranks: Sequence[RankSteps], column: str) -> int | None:
    return max((size for process in ranks if (size := int(process.step_rows[column].max())) > 0), default=None)


def _sum_host_peaks(ranks: Sequence[RankSteps]) -> int | None:
    """Return the sum of the ranks' highest RSS on the node where it is largest."""
    by_host: dict[str, int] = {}
    for process in ranks:
        size = int(process.step_rows["host_rss_bytes"].max())
        by_host[process.source.host] = by_host.get(process.source.host, 0) + max(0, size)
    return max(by_host.values(), default=0) or None


def _measure_pace(measured: Sequence[Rows]) -> dict[str, float | None]:
    """Return iterations and tokens per second over the intervals between measured steps, of the slowest rank."""
    seconds = max((rows["iteration_s"][1:] for rows in measured), key=np.sum, default=np.empty(0))
    count = max((len(rows) - 1 for rows in measured), default=0)
    if count < 1 or seconds.sum() <= 0:
        return {"iterations_per_s": None, "tokens_per_s": None}
    tokens = sum(estimate_tokens(rows[1:], rows["tokens"][1:]) for rows in measured)
    spread = {"slowest_per_s": 1 / float(seconds.max()), "fastest_per_s": 1 / float(seconds.min())}
    total = float(seconds.sum())
    rates = {"iterations_per_s": count / total, "tokens_per_s": tokens / total if tokens > 0 else None}
    return {**rates, **(spread if count > 1 and seconds.min() > 0 else {})}


def _measure_step_cores(recording: Recording, ranks: Sequence[RankSteps], measured: Sequence[Rows]) -> float | None:
    """Return the processor time in step() per second of it: the sum of a node's ranks, on the busiest node.

    Processor time is interpolated at the begin and end of each step(), which may be shorter than a sampler's tick.
    """
    by_host: dict[str, float] = {}
    for process, rows in zip(ranks, measured, strict=True):
        if len(rows):
            cores = _measure_rank_cores(recording, process, rows)
            by_host[process.source.host] = by_host.get(process.source.host, 0.0) + cores
    highest = max(by_host.values(), default=0.0)
    return highest or None


def _measure_rank_cores(recording: Recording, process: RankSteps, rows: Rows) -> float:
    source = process.source
    begin_ns, end_ns = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    spans = source.between(begin_ns, end_ns)
    spans = spans[(spans["phase"] == _STEP_CODE) & (spans["engine"] == 0)]
    begins, ends = spans["begin_ns"] + source.offset_ns, spans["end_ns"] + source.offset_ns
    best = 0.0
    tables = recording.sources["processes"]
    for table, samples in zip(tables, iter_samples(tables, begin_ns - _AROUND_NS, end_ns + _AROUND_NS), strict=True):
        for pid, (times, records) in split_samples(samples, "pid"):
            if (table.host, pid) != (source.host, source.pid) or len(times) < 2:
                continue
            cpu_ns = records["cpu_ns"].astype(np.float64)
            first = times[0]
            used = [np.interp(at - first, times - first, cpu_ns, left=np.nan, right=np.nan) for at in (begins, ends)]
            spent = used[1] - used[0]
            known = ~np.isnan(spent)
            if known.any():
                best = max(best, float(spent[known].sum() / max(1, (ends - begins)[known].sum())))
    return best
