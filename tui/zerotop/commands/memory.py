"""``zerotop memory``: where a recording's memory was, what was expected, who owns the peak, and why it was not enough."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from zerotop.analysis.failures.diagnosis import failure as what_ended
from zerotop.analysis.failures.failure import Failure
from zerotop.analysis.failures.out_of_memory import PostMortem, post_mortem
from zerotop.analysis.memory.allocator_health import AllocatorHealth, allocator_health
from zerotop.analysis.memory.deepspeed_estimates import Estimate, Rule
from zerotop.analysis.memory.gpu_ledger import ledger
from zerotop.analysis.memory.host_ledger import HostLedger, host_ledger
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.memory.memory_view import last_alive
from zerotop.analysis.memory.peak_ledger import PeakLedger, ledger_at_peak
from zerotop.analysis.memory.phase_peaks import RankPeaks, rank_peaks
from zerotop.analysis.memory.tensor_inventory import inventory
from zerotop.analysis.memory.zero_model import (
    Difference,
    Setup,
    compare,
    estimates,
    expected_of,
    is_of,
    rule_of_thumb,
    setups_of,
)
from zerotop.analysis.processes.alive_ranks import events_of, living
from zerotop.analysis.steps.optimizer_phases import step_parts, usual
from zerotop.analysis.steps.step_table import steps
from zerotop.analysis.views.notices import damage
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import printable
from zerotop.commands.common.memory_text import lines
from zerotop.session import catalog
from zerotop.session.reader import Session


@dataclass(frozen=True)
class Report:
    """All that is told of one moment."""

    session: str
    unix_ns: int
    step: int | None  # the step after whose end it is; None where it is another moment
    notices: tuple[str, ...]  # sentences about the recording
    setup: Setup | None  # of the first rank's first engine that trains
    engines: int  # how many that rank has
    gpus: tuple[GpuLedger, ...]
    gpu_differences: tuple[tuple[Difference, ...], ...]  # for each of the GPUs
    hosts: tuple[HostLedger, ...]
    host_differences: tuple[tuple[Difference, ...], ...]
    peaks: tuple[RankPeaks, ...]
    at_peak: tuple[PeakLedger, ...]
    rules: dict[int, Rule]  # the rule of thumb with what was measured, by rank
    estimates: tuple[Estimate, ...]
    allocators: tuple[AllocatorHealth, ...]
    updates: dict[int, dict[str, float]]  # the median of what the parts of step() take, by rank, see step_parts
    post_mortem: PostMortem | None  # of the want of memory
    failure: Failure | None  # what ended the job, whatever it was; what of it the post-mortem has is not repeated


def memory(options: argparse.Namespace) -> int:
    """Prints the report. Returns 0."""
    session = Session.open(catalog.find(options.session))
    unix_ns, step = _moment(session, options.at)
    until_ns = unix_ns if options.at is not None else session.last_written_ns
    failure = post_mortem(session, until_ns)
    if options.at is None and failure is not None and failure.unix_ns is not None and failure.survived is not True:
        unix_ns, step = failure.unix_ns, None
    died = what_ended(session, until_ns)
    report = examine(session, unix_ns, step, failure, replace(died, memory=None) if died is not None else None)
    if options.json:
        print(json.dumps(as_json(report), indent=1))
    else:
        print("\n".join(map(printable, lines(report))))
    return 0


def _moment(session: Session, step: int | None) -> tuple[int, int | None]:
    """The end of that step, or of the last one; where none was finished the last moment with all ranks."""
    source = RecordingSource(session)
    last = source.last_step
    wanted = last if step is None else step
    unix_ns = source.step_time(wanted) if wanted is not None else None
    if unix_ns is not None:
        return unix_ns, wanted
    if step is not None:
        finished = "no step is" if last is None else f"the last that is finished is step {last}"
        raise Problem(f"Step {step} is not finished in this recording: {finished}")
    return last_alive(session, session.last_written_ns, None), None


def examine(
    session: Session, unix_ns: int, step: int | None, failure: PostMortem | None, died: Failure | None = None
) -> Report:
    """Looks at everything as it was known at a moment."""
    processes = living(session, unix_ns)
    setups = setups_of(events_of(session, "engine", processes[0], unix_ns)) if processes else []
    known = setups[0] if setups else None
    gpus, hosts = ledger(session, unix_ns), host_ledger(session, unix_ns)
    said = expected_of(setups)
    peaks = rank_peaks(session, unix_ns)
    by_process = {each.process: each for each in peaks}
    told = {process: inventory(session, process, unix_ns) for process in processes if process in by_process}
    return Report(
        session=session.name,
        unix_ns=unix_ns,
        step=step,
        notices=tuple(damage(session)),
        setup=known,
        engines=len(setups),
        gpus=gpus,
        gpu_differences=tuple(compare(gpu, said) if said is not None and gpu.ranks else () for gpu in gpus),
        hosts=hosts,
        host_differences=tuple(compare(host, said) if said is not None else () for host in hosts),
        peaks=peaks,
        at_peak=ledger_at_peak(session, unix_ns),
        rules={process.rank: rule_of_thumb(i, by_process[process]) for process, i in told.items() if i is not None},
        estimates=estimates(known, nodes=len({host.host for host in hosts})) if known is not None else (),
        allocators=allocator_health(session, unix_ns, steps(session)),
        updates=_updates(session, unix_ns),
        post_mortem=failure,
        failure=died,
    )


def _updates(session: Session, unix_ns: int) -> dict[int, dict[str, float]]:
    rows = step_parts(session)
    rows = rows[rows["begin_unix_ns"] < unix_ns]
    return {int(rank): usual(rows[rows["rank"] == rank]) for rank in np.unique(rows["rank"])}


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain values: bytes, seconds and unix nanoseconds; labels beside keys, differences beside rows."""
    plain: dict[str, Any] = asdict(report)
    for name in ("gpu", "host"):
        for found, differences in zip(plain[f"{name}s"], plain.pop(f"{name}_differences"), strict=True):
            found["differences"] = [
                {**each, "difference_bytes": _less(each["measured_bytes"], each["expected_bytes"])} for each in differences
            ]
    for told, estimate in zip(plain["estimates"], report.estimates, strict=True):
        told |= {"options": estimate.options, "this_job": report.setup is not None and is_of(estimate, report.setup)}
    for rank, rule in report.rules.items():
        plain["rules"][rank]["bytes"] = rule.bytes
    return plain


def _less(measured: int, said: int | None) -> int | None:
    return None if said is None else measured - said
