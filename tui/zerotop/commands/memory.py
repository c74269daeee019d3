"""``zerotop memory``: where a recording's memory was, what was expected, who owns the peak, and why it was not enough."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from zerotop.analysis.failures.diagnosis import find_failure as what_ended
from zerotop.analysis.failures.failure import Failure
from zerotop.analysis.failures.out_of_memory import PostMortem, find_post_mortem
from zerotop.analysis.memory.allocator_health import AllocatorHealth, read_allocator_health
from zerotop.analysis.memory.deepspeed_estimates import Estimate, RuleOfThumb
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.host_ledger import HostLedger, read_host_ledgers
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.memory.memory_view import find_last_alive
from zerotop.analysis.memory.peak_ledger import PeakLedger, read_peak_ledgers
from zerotop.analysis.memory.phase_peaks import RankPeaks, read_rank_peaks
from zerotop.analysis.memory.tensor_inventory import read_inventory
from zerotop.analysis.memory.zero_model import (
    Difference,
    EngineSetup,
    compare_ledger,
    compute_rule_of_thumb,
    estimate_job,
    is_for_setup,
    parse_setups,
    sum_expected,
)
from zerotop.analysis.processes.alive_ranks import find_alive_processes, read_events
from zerotop.analysis.steps.optimizer_phases import compute_medians, read_step_parts
from zerotop.analysis.steps.step_table import read_steps
from zerotop.analysis.views.notices import describe_damage
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.memory_text import format_report
from zerotop.session import catalog
from zerotop.session.reader import Session


@dataclass(frozen=True)
class MemoryReport:
    """All that is told of one moment."""

    session: str
    unix_ns: int
    step: int | None  # the step after whose end it is; None where it is another moment
    notices: tuple[str, ...]  # sentences about the recording
    setup: EngineSetup | None  # of the first rank's first engine that trains
    engines: int  # how many that rank has
    gpus: tuple[GpuLedger, ...]
    gpu_differences: tuple[tuple[Difference, ...], ...]  # for each of the GPUs
    hosts: tuple[HostLedger, ...]
    host_differences: tuple[tuple[Difference, ...], ...]
    peaks: tuple[RankPeaks, ...]
    at_peak: tuple[PeakLedger, ...]
    rules: dict[int, RuleOfThumb]  # the rule of thumb with what was measured, by rank
    estimates: tuple[Estimate, ...]
    allocators: tuple[AllocatorHealth, ...]
    updates: dict[int, dict[str, float]]  # the median of what the parts of step() take, by rank, see step_parts
    post_mortem: PostMortem | None  # of the want of memory
    failure: Failure | None  # what ended the job, whatever it was; what of it the post-mortem has is not repeated


def memory(options: argparse.Namespace) -> int:
    """Prints the report. Returns 0."""
    session = Session.open(catalog.find_session(options.session))
    unix_ns, step = _choose_moment(session, options.at)
    until_ns = unix_ns if options.at is not None else session.last_written_ns
    failure = find_post_mortem(session, until_ns)
    if options.at is None and failure is not None and failure.unix_ns is not None and failure.survived is not True:
        unix_ns, step = failure.unix_ns, None
    died = what_ended(session, until_ns)
    report = build_report(session, unix_ns, step, failure, replace(died, memory=None) if died is not None else None)
    if options.json:
        print(json.dumps(build_json(report), indent=1))
    else:
        print("\n".join(map(escape_unprintable, format_report(report))))
    return 0


def _choose_moment(session: Session, step: int | None) -> tuple[int, int | None]:
    """The end of that step, or of the last one; where none was finished the last moment with all ranks."""
    source = RecordingSource(session)
    last = source.last_step
    wanted = last if step is None else step
    unix_ns = source.find_step_end(wanted) if wanted is not None else None
    if unix_ns is not None:
        return unix_ns, wanted
    if step is not None:
        finished = "no step is" if last is None else f"the last that is finished is step {last}"
        raise Problem(f"Step {step} is not finished in this recording: {finished}")
    return find_last_alive(session, session.last_written_ns, None), None


def build_report(
    session: Session, unix_ns: int, step: int | None, failure: PostMortem | None, died: Failure | None = None
) -> MemoryReport:
    """Looks at everything as it was known at a moment."""
    processes = find_alive_processes(session, unix_ns)
    setups = parse_setups(read_events(session, "engine", processes[0], unix_ns)) if processes else []
    known = setups[0] if setups else None
    gpus, hosts = read_ledgers(session, unix_ns), read_host_ledgers(session, unix_ns)
    said = sum_expected(setups)
    peaks = read_rank_peaks(session, unix_ns)
    by_process = {each.process: each for each in peaks}
    told = {process: read_inventory(session, process, unix_ns) for process in processes if process in by_process}
    return MemoryReport(
        session=session.name,
        unix_ns=unix_ns,
        step=step,
        notices=tuple(describe_damage(session)),
        setup=known,
        engines=len(setups),
        gpus=gpus,
        gpu_differences=tuple(compare_ledger(gpu, said) if said is not None and gpu.ranks else () for gpu in gpus),
        hosts=hosts,
        host_differences=tuple(compare_ledger(host, said) if said is not None else () for host in hosts),
        peaks=peaks,
        at_peak=read_peak_ledgers(session, unix_ns),
        rules={process.rank: compute_rule_of_thumb(i, by_process[process]) for process, i in told.items() if i is not None},
        estimates=estimate_job(known, nodes=len({host.host for host in hosts})) if known is not None else (),
        allocators=read_allocator_health(session, unix_ns, read_steps(session)),
        updates=_measure_updates(session, unix_ns),
        post_mortem=failure,
        failure=died,
    )


def _measure_updates(session: Session, unix_ns: int) -> dict[int, dict[str, float]]:
    rows = read_step_parts(session)
    rows = rows[rows["begin_unix_ns"] < unix_ns]
    return {int(rank): compute_medians(rows[rows["rank"] == rank]) for rank in np.unique(rows["rank"])}


def build_json(report: MemoryReport) -> dict[str, Any]:
    """The report as plain values: bytes, seconds and unix nanoseconds; labels beside keys, differences beside rows."""
    plain: dict[str, Any] = asdict(report)
    for name in ("gpu", "host"):
        for found, differences in zip(plain[f"{name}s"], plain.pop(f"{name}_differences"), strict=True):
            found["differences"] = [
                {**each, "difference_bytes": _subtract_bytes(each["measured_bytes"], each["expected_bytes"])}
                for each in differences
            ]
    for told, estimate in zip(plain["estimates"], report.estimates, strict=True):
        told |= {
            "options": estimate.option_text,
            "this_job": report.setup is not None and is_for_setup(estimate, report.setup),
        }
    for rank, rule in report.rules.items():
        plain["rules"][rank]["bytes"] = rule.peak_bytes
    return plain


def _subtract_bytes(measured: int, said: int | None) -> int | None:
    return None if said is None else measured - said
