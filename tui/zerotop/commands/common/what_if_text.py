"""The text of ``zerotop what-if``: verdicts, the ledger from the recorded to the asked setting, and the time."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.memory.expected.zero_model import compute_expected
from zerotop.analysis.sweeps.asked_setting import WhatIfAnswer
from zerotop.analysis.sweeps.what_if_time import TimePrediction
from zerotop.analysis.sweeps.what_if_verdict import (
    NEEDED_NOTE,
    describe_baseline,
    describe_changes,
    describe_time,
    judge_gpu,
    judge_host,
    list_ledger,
)
from zerotop.analysis.text_tables import align_columns
from zerotop.commands.common.estimate_text import format_moment


def format_answer(answer: WhatIfAnswer, *, explain: bool) -> Iterator[str]:
    """Yield the lines; with ``explain`` each row has its formula, and every moment is listed."""
    yield judge_gpu(answer)
    yield judge_host(answer)
    if nvme := sum(compute_expected(answer.setting.setup).nvme.values()):
        yield f"NVMe of a node: {format_bytes(nvme * answer.setting.gpus)} by ZeRO's formulas."
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
    if answer.base.evaluation_peak is not None:
        yield ""
        size = format_bytes(answer.base.evaluation_peak)
        yield f"Outside of these steps, as in evaluation, up to {size} were allocated: that is not in this answer."


def _format_ledger(answer: WhatIfAnswer, *, explain: bool) -> Iterator[str]:
    moment = answer.memory.moments[0]
    cells: list[tuple[str, ...]] = [(f"at the {moment.name}, which decides", "recorded", "then", "least", "most", "")]
    for row in list_ledger(answer):
        ends = (format_bytes(row.low), format_bytes(row.high)) if row.high > row.low else ("", "")
        name = row.name if row.is_sum else f"  {row.name}"
        sizes = (format_bytes(row.before), format_bytes(row.after))
        cells.append((name, *sizes, *ends, row.formula if explain else ""))
    yield from align_columns(cells, "<>>>><")
    yield NEEDED_NOTE
    if answer.recorded.moments[0].name != moment.name:
        decided = answer.recorded.moments[0]
        yield f"In the recording the {decided.name} decides, with {format_bytes(decided.bytes)}."


def _format_time(time: TimePrediction, *, explain: bool) -> Iterator[str]:
    cells = [("seconds of a step", "recorded", "then", "least", "most", "")]
    for row in time.rows:
        ends = (f"{row.low:.4f}", f"{row.high:.4f}") if row.high > row.low else ("", "")
        cells.append((f"  {row.name}", f"{row.before:.4f}", f"{row.likely:.4f}", *ends, row.formula if explain else ""))
    yield from align_columns(cells, "<>>>><")
