"""The text of ``zerotop what-if``: verdicts, the ledger from the recorded to the asked setting, and the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.memory.expected.beyond_allocated import Interval, JobMemory
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup, compute_expected
from zerotop.analysis.sweeps.baseline import Baseline
from zerotop.analysis.sweeps.what_if import name_offload
from zerotop.analysis.sweeps.what_if_time import TimePrediction
from zerotop.analysis.text_tables import align_columns
from zerotop.commands.common.other_setting import describe_baseline

_USABLE_HOST = 0.95  # of a node's memory


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """A recorded setting and the asked one."""

    base: Baseline
    setup: EngineSetup
    work: Workload
    gpus: int  # on a node
    gpu_bytes: int | None
    recorded: JobMemory
    memory: JobMemory
    time: TimePrediction

    @property
    def fits(self) -> bool | None:
        """Whether a GPU holds the upper end of what is needed; None if its size is not known."""
        return None if self.gpu_bytes is None else self.memory.needed < self.gpu_bytes

    @property
    def host_needed(self) -> float | None:
        """The upper end of the memory that the ranks of a node need in all."""
        return self.memory.host.high * self.gpus if self.base.host_rss is not None else None

    @property
    def fits_host(self) -> bool | None:
        """Whether a node like the recorded one holds that."""
        if self.host_needed is None or self.base.host_bytes is None:
            return None
        return self.host_needed < _USABLE_HOST * self.base.host_bytes


def format_answer(answer: WhatIfAnswer, *, explain: bool) -> Iterator[str]:
    """Yield the lines; with ``explain`` each row has its formula, and every moment is listed."""
    yield _judge_gpu(answer)
    yield _judge_host(answer)
    if nvme := sum(compute_expected(answer.setup).nvme.values()):
        yield f"NVMe of a node: {format_bytes(nvme * answer.gpus)} by ZeRO's formulas."
    yield _describe_time(answer)
    yield ""
    yield describe_baseline(answer.base)
    yield _describe_changes(answer)
    yield ""
    yield from _format_ledger(answer, explain=explain)
    if explain:
        for moment in answer.memory.moments[1:]:
            yield ""
            yield f"{moment.name}: {format_bytes(moment.bytes)}"
            cells = [(f"  {row.name}", format_bytes(row.bytes), row.formula) for row in moment.rows if row.bytes]
            yield from align_columns(cells, "<><")
    if answer.time.rows:
        yield ""
        yield from _format_time(answer.time, explain=explain)
    if answer.base.evaluation_peak is not None:
        yield ""
        size = format_bytes(answer.base.evaluation_peak)
        yield f"Outside of these steps, as in evaluation, up to {size} were allocated: that is not in this answer."


def _name_setting(setup: EngineSetup, work: Workload) -> str:
    rows = f"{work.micro_batch:,} x {work.sequence:,} tokens" if work.sequence else f"{work.micro_batch:,} rows"
    if setup.is_loop:
        return rows
    offload = name_offload(setup)
    with_offload = f" with offload of {offload.replace('_', ' and ')}" if offload != "none" else ""
    return f"stage {setup.stage}{with_offload}, {rows}"


def _judge_gpu(answer: WhatIfAnswer) -> str:
    name, needed = _name_setting(answer.setup, answer.work), answer.memory.needed
    subject = name[0].upper() + name[1:]
    if answer.gpu_bytes is None:
        return f"{subject}: it needs at most {format_bytes(needed)} of each GPU. Give --memory for a verdict."
    size, spare = format_bytes(answer.gpu_bytes), answer.gpu_bytes - needed
    if answer.fits:
        return f"{subject}, fits: it needs at most {format_bytes(needed)} of {size}, {format_bytes(spare)} to spare."
    least = answer.memory.allocated.low + answer.memory.context.low
    may = "may need" if least < answer.gpu_bytes else "needs"
    return f"{subject}, does not fit: it {may} {format_bytes(needed)} of {size}, {format_bytes(-spare)} too much."


def _judge_host(answer: WhatIfAnswer) -> str:
    base, needed = answer.base, answer.host_needed
    if needed is None:
        return "Host memory: not known, as the recording has no samples of its processes."
    before = (base.host_rss or 0) * base.gpus
    text = f"Host memory of a node: {format_bytes(before)} -> {format_bytes(answer.memory.host.likely * answer.gpus)}"
    if answer.fits_host is None:
        return f"{text}; the node's memory was not recorded."
    size = format_bytes(base.host_bytes or 0)
    return f"{text}, {'fits' if answer.fits_host else 'does not fit: the kernel would kill a rank'} (it has {size})."


def _describe_time(answer: WhatIfAnswer) -> str:
    if not answer.time.rows:
        return f"Time: not known. {answer.time.reason}"
    low, likely, high = answer.time.seconds
    before = sum(row.before for row in answer.time.rows)
    between = f" ({low:.3g} to {high:.3g})" if high > 1.001 * low else ""
    text = f"Time of a step: {before:.3g} s -> {likely:.3g} s{between}"
    if answer.work.sequence:
        tokens = answer.work.tokens * answer.work.accumulation * answer.setup.ranks
        text += f", {tokens / likely:,.0f} tokens/s"
    return f"{text}."


def _describe_changes(answer: WhatIfAnswer) -> str:
    base, setup, work = answer.base, answer.setup, answer.work
    pairs = (
        ("stage", base.setup.stage, setup.stage),
        ("offload", name_offload(base.setup), name_offload(setup)),
        ("GPUs", base.setup.ranks, setup.ranks),
        ("micro-batch", base.work.micro_batch, work.micro_batch),
        ("length", base.work.sequence, work.sequence),
        ("accumulation", base.work.accumulation, work.accumulation),
        ("checkpointing", base.work.checkpointing, work.checkpointing),
        ("bytes of a weight", base.setup.bytes_each, setup.bytes_each),
        ("bytes of its state", base.setup.state_each, setup.state_each),
    )
    changes = [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
    return ", ".join(changes) if changes else "as recorded: all figures are measurements"


def _format_ledger(answer: WhatIfAnswer, *, explain: bool) -> Iterator[str]:
    moment = answer.memory.moments[0]
    before = next((one for one in answer.recorded.moments if one.name == moment.name), None)
    old = {row.name: row.bytes for row in before.rows} if before is not None else {}
    cells: list[tuple[str, ...]] = [(f"at the {moment.name}, which decides", "recorded", "then", "least", "most", "")]
    new = {row.name: row.bytes for row in moment.rows}
    formulas = {row.name: row.formula for one in (before, moment) if one is not None for row in one.rows}
    for name in dict.fromkeys([*old, *new]):
        sizes = old.get(name, 0.0), new.get(name, 0.0)
        if any(abs(size) >= 1 << 20 for size in sizes):
            cells.append((f"  {name}", *map(format_bytes, sizes), "", "", formulas[name] if explain else ""))
    for name in ("allocated", "reserved", "context", "device", "host"):
        first, part = getattr(answer.recorded, name), getattr(answer.memory, name)
        cells.append(_format_interval(_LABELS[name], first, part, explain=explain))
    yield from align_columns(cells, "<>>>><")
    if answer.recorded.moments[0].name != moment.name:
        decided = answer.recorded.moments[0]
        yield f"In the recording the {decided.name} decides, with {format_bytes(decided.bytes)}."


_LABELS = {
    "allocated": "allocated",
    "reserved": "reserved",
    "context": "outside PyTorch",
    "device": "NVML, the process",
    "host": "host memory of a rank",
}


def _format_interval(name: str, before: Interval, part: Interval, *, explain: bool) -> tuple[str, ...]:
    ends = (format_bytes(part.low), format_bytes(part.high)) if part.high > part.low else ("", "")
    return name, format_bytes(before.likely), format_bytes(part.likely), *ends, part.formula if explain else ""


def _format_time(time: TimePrediction, *, explain: bool) -> Iterator[str]:
    cells = [("seconds of a step", "recorded", "then", "least", "most", "")]
    for row in time.rows:
        ends = (f"{row.low:.4f}", f"{row.high:.4f}") if row.high > row.low else ("", "")
        cells.append((f"  {row.name}", f"{row.before:.4f}", f"{row.likely:.4f}", *ends, row.formula if explain else ""))
    yield from align_columns(cells, "<>>>><")
