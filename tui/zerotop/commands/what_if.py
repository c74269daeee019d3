"""``zerotop what-if``: the memory and time of a recorded training at another setting."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace

from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.memory.expected.zero_model import compute_expected
from zerotop.analysis.sweeps.asked_setting import Changes, WhatIfAnswer, answer_changes
from zerotop.analysis.sweeps.baseline import NoBaselineError, read_baseline
from zerotop.analysis.sweeps.estimates import OptionEstimate
from zerotop.analysis.sweeps.grading import build_expectation
from zerotop.analysis.sweeps.ranking import choose_option, find_hardware, rank_recorded
from zerotop.analysis.sweeps.what_if_time import TimePrediction
from zerotop.analysis.sweeps.what_if_verdict import (
    describe_baseline,
    describe_changes,
    describe_recorded,
    describe_time,
    judge_gpu,
    judge_host,
    list_ledger,
    note_needed,
)
from zerotop.analysis.text_tables import align_columns
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.estimate_text import format_moment, format_ranking, recommend
from zerotop.commands.common.open_recording import open_named
from zerotop.commands.estimate import read_kept_figures


def format_answer(answer: WhatIfAnswer, recommendation: str, *, explain: bool) -> Iterator[str]:
    """Yield verdicts with a recommendation, the ledger from the recorded to the asked setting, and the time.

    A recorded failure is answer enough, without one. With ``explain`` each row has its formula, and every moment is listed.
    """
    yield judge_gpu(answer)
    yield from describe_recorded(answer)
    if answer.failure is None:
        yield recommendation
    yield judge_host(answer)
    if nvme := sum(compute_expected(answer.setting.setup).nvme.values()):
        yield f"NVMe of a node: {format_bytes(nvme * answer.setting.node_ranks)} by ZeRO's formulas."
    yield describe_time(answer)
    yield ""
    yield describe_baseline(answer.base)
    yield describe_changes(answer)
    yield ""
    yield from _format_ledger(answer, explain=explain)
    if explain:
        for moment in answer.memory.moments[1:]:
            yield from format_moment(moment)
    if answer.time.rows:
        yield ""
        yield from _format_time(answer.time, explain=explain)


def _format_ledger(answer: WhatIfAnswer, *, explain: bool) -> Iterator[str]:
    moment = answer.memory.moments[0]
    cells: list[tuple[str, ...]] = [(f"at the {moment.name}, which decides", "recorded", "then", "least", "most", "")]
    for row in list_ledger(answer):
        ends = (format_bytes(row.low), format_bytes(row.high)) if row.high > row.low else ("", "")
        name = row.name if row.is_sum else f"  {row.name}"
        sizes = (format_bytes(row.before) if row.before is not None else "", format_bytes(row.after))
        cells.append((name, *sizes, *ends, row.formula if explain else ""))
    yield from align_columns(cells, "<>>>><")
    yield note_needed(answer)
    if answer.recorded.moments[0].name != moment.name:
        decided = answer.recorded.moments[0]
        size = format_bytes(decided.bytes)
        yield f"In the recording the {decided.name} decides, with {size}: its sums are of that moment."


def _format_time(time: TimePrediction, *, explain: bool) -> Iterator[str]:
    cells = [("seconds of a step", "recorded", "then", "least", "most", "")]
    for row in time.rows:
        ends = (f"{row.low:,.4f}", f"{row.high:,.4f}") if row.high > row.low else ("", "")
        cells.append((f"  {row.name}", f"{row.before:,.4f}", f"{row.likely:,.4f}", *ends, row.formula if explain else ""))
    yield from align_columns(cells, "<>>>><")


def what_if(options: argparse.Namespace) -> int:
    """Print the answer, or JSON. Return 0."""
    changes = Changes(**{name: getattr(options, name) for name in Changes.__slots__})
    with open_named(options.recording) as recording:
        try:
            base = read_baseline(recording)
            figures = read_kept_figures()
            if figures is not None and figures.gpu == base.gpu:
                base = replace(base, machine=figures.values)
            answer = answer_changes(base, changes, options.gpu_memory)
            free = changes if options.all else replace(changes, stage=None, offload=None, micro_batch=None)
            ranked = rank_recorded(base, free, options.gpu_memory, all_gpus=options.all)
        except NoBaselineError as error:
            raise Problem(str(error)) from error
    hardware = find_hardware(answer)
    recommendation = recommend(ranked, hardware, _format_command(options, choose_option(ranked, hardware)))
    if options.json:
        setting, seconds = answer.setting, answer.time.seconds if answer.time.rows else None
        content = {
            "recording": base.name,
            "setting": {"gpus": setting.gpus, "nodes": setting.nodes, **asdict(setting.setup), **asdict(setting.work)},
            "gpu_bytes": answer.gpu_bytes,
            "limit_bytes": answer.limit_bytes,
            "fits": answer.fits,
            "needed_bytes": answer.room.needed if answer.room is not None else answer.memory.needed,
            "verdict": [judge_gpu(answer), *describe_recorded(answer)],
            "memory": asdict(answer.memory),
            "recorded": asdict(answer.recorded),
            "host": {"node_bytes": base.host_bytes, "needed_bytes": answer.host_needed, "fits": answer.fits_host},
            "expectation": asdict(build_expectation(setting.setup, setting.work, answer.memory, seconds)),
            "recommendation": recommendation,
            "options": [asdict(option) | {"fits": option.fits(hardware)} for option in ranked] if options.all else [],
            "time": {**asdict(answer.time), "seconds": seconds},
        }
        print(json.dumps(content, indent=1))
        return 0
    if options.all:
        lines = [recommendation, "", *format_ranking(ranked, hardware)]
    else:
        lines = [*format_answer(answer, recommendation, explain=options.explain)]
    print(*map(escape_unprintable, lines), sep="\n")
    return 0


def _format_command(options: argparse.Namespace, chosen: OptionEstimate | None) -> str:
    """Return the command that explains an option; "" without one."""
    if chosen is None:
        return ""
    asked = {name: getattr(options, name) for name in Changes.__slots__}
    mode = {} if chosen.is_loop else {"stage": chosen.stage, "offload": chosen.offload}
    asked |= {**mode, "micro_batch": chosen.micro_batch, "gpus": chosen.gpus}
    words = [
        word for name, value in asked.items() if value is not None for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return shlex.join(["zerotop", "what-if", options.recording, *words])
