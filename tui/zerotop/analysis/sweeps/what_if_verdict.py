"""The sentences and the ledger of another setting: what fits, the host's memory, the time, what changes row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

from zerotop.analysis.failures.out_of_memory import PostMortem
from zerotop.analysis.formatting import Text, format_bytes, format_parameters, format_percent, format_seconds, pluralize
from zerotop.analysis.hardware.gpu_speeds import measure_mfu
from zerotop.analysis.memory.expected.beyond_allocated import Interval, JobMemory, add_intervals
from zerotop.analysis.sweeps.asked_setting import EVALUATION, Setting, WhatIfAnswer
from zerotop.analysis.sweeps.baseline import Baseline
from zerotop.analysis.sweeps.settings import describe_offload
from zerotop.analysis.sweeps.what_if import name_offload

_SUMS = {
    "allocated": "allocated",
    "context": "outside PyTorch",
    "needed": "must fit",
    "reserved": "reserved",
    "device": "NVML, the process",
    "host": "host memory of a rank",
}
_NEEDED_NOTE = (
    "Must fit{place}: {parts} and stuck segments{ranks}. What else is reserved PyTorch gives back before it fails."
)
_OTHER_PACE = 1.05  # times the step of the forecast, from which on the pace of later steps is told
_FAR_MEAN = 1.2  # times a usual step, from which on it is told, too
_SMALLEST = 1 << 20  # bytes of a row that is listed


@dataclass(frozen=True, slots=True)
class LedgerChange:
    """One row: bytes as recorded and at the asked setting, with the interval where it has one."""

    name: str
    before: float | None  # None: the recording has no such row at this moment
    after: float
    low: float
    high: float
    formula: str
    is_sum: bool = False

    @property
    def difference(self) -> float:
        return self.after - (self.before or 0.0)

    @property
    def size(self) -> float:
        """The larger of both."""
        return max(abs(self.before or 0.0), abs(self.after))


def list_ledger(answer: WhatIfAnswer) -> Iterator[LedgerChange]:
    """Yield the rows of the moment that decides, then what must fit and its parts, what PyTorch takes, and host memory."""
    moment = answer.memory.moments[0]
    before = next((one for one in answer.recorded.moments if one.name == moment.name), None)
    old = {row.name: row.bytes for row in before.rows} if before is not None else {}
    new = {row.name: row.bytes for row in moment.rows}
    formulas = {row.name: row.formula for one in (before, moment) if one is not None for row in one.rows}
    for name in dict.fromkeys([*old, *new]):
        then = new.get(name, 0.0)
        change = LedgerChange(name, old.get(name), then, then, then, formulas[name])
        if change.size >= _SMALLEST:
            yield change
    for name, title in _SUMS.items():
        recorded, part = (_find_sum(memory, name, _is_limited(answer)) for memory in (answer.recorded, answer.memory))
        yield LedgerChange(title, recorded.likely, part.likely, part.low, part.high, part.formula, is_sum=True)


def _is_limited(answer: WhatIfAnswer) -> bool:
    """Return whether what PyTorch may use decides, and not what the GPU has."""
    return answer.room is not None and answer.room.is_limited


def note_needed(answer: WhatIfAnswer) -> str:
    """Return what must fit."""
    if _is_limited(answer):
        return _NEEDED_NOTE.format(place=" in what PyTorch may use", parts="allocated", ranks="")
    count = answer.memory.ranks_on_gpu
    ranks = f", of the {count} ranks that share a GPU" if count > 1 else ""
    return _NEEDED_NOTE.format(place="", parts="allocated, outside PyTorch", ranks=ranks)


def _find_sum(memory: JobMemory, name: str, is_limited: bool) -> Interval:
    if name != "needed":
        part: Interval = getattr(memory, name)
        return part
    part, stuck = memory.allocated, memory.stuck.bytes
    if is_limited:
        return Interval(part.low, part.likely + stuck, part.high + stuck, "allocated + stuck segments")
    count = memory.ranks_on_gpu
    formula = "allocated + outside PyTorch + stuck segments" + (f", of {count} ranks" if count > 1 else "")
    both = add_intervals(part, memory.context, formula)
    return Interval(count * both.low, count * (both.likely + stuck), memory.needed, formula)


def name_setting(setting: Setting) -> str:
    """Return ``stage 3 with offload of optimizer, 4 x 512 tokens``."""
    setup, work = setting.setup, setting.work
    rows = (
        f"{work.micro_batch:,} x {work.sequence:,} tokens"
        if work.sequence
        else f"{work.micro_batch:,} {pluralize(work.micro_batch, 'row')}"
    )
    if setup.is_loop:
        return rows
    offload = name_offload(setup)
    with_offload = f" with offload of {describe_offload(offload)}" if offload not in ("", "none") else ""
    return f"stage {setup.stage}{with_offload}, {rows}"


def judge_gpu(answer: WhatIfAnswer) -> Text:
    """Return whether a GPU holds the upper end of the setting."""
    name, room = name_setting(answer.setting), answer.room
    needed, size = (room.needed, room.sizes) if room is not None else (answer.memory.needed, None)
    spare = abs(room.spare) if room is not None else 0.0
    values: dict[str, Any] = {"name": name[0].upper() + name[1:], "needed": needed, "size": size, "spare": spare}
    if (failure := answer.failure) is not None and not failure.is_on_host:
        values |= {"rank": failure.rank, "step": failure.step, "cause": failure.cause}
        start = "As recorded, it does not fit[: rank {rank} ran out of GPU memory][ in step {step}]. {cause}"
        if answer.is_changed:
            start = "{name}, does not fit: as recorded, with no larger micro-batches, memory ran out. {cause}"
        rest = " The forecast is of {last}: {name}, which need at most {needed:bytes}[ of {size}]."
        values["last"] = name_steps(answer.base.steps) if answer.base.steps is not None else "its steps"
        return Text(f"{start}{rest}", values)
    if answer.measured_more is not None and answer.base.steps is not None:
        growth = describe_growth(answer)
        later = answer.later_batch
        values |= {
            "growth": growth or None,
            "most": answer.measured_more,
            "steps": name_steps(later.steps) if later is not None else describe_peak(answer.base),
            "last": answer.base.steps[1],
        }
        verdict = {
            True: f", fits{' so far' if growth else ''}: it needed up to {{needed:bytes}} of {{size}}",
            False: ", does not fit {size}: it needed {needed:bytes}",
        }
        start = verdict[answer.fits] if answer.fits is not None else ": it needed up to {needed:bytes} of each GPU"
        values["forecast"] = answer.memory.allocated.likely
        rest = ", with {most:bytes} allocated in {steps}[, {growth}]."
        of_last = " The rows are of step {last}, which allocated {forecast:bytes}."
        rest += " The rows are a forecast from step {last}." if later is not None else of_last
        return Text(f"{{name}}{start}{rest}", values)
    values["start"] = answer.base.start_peak
    more = " Before the first step, the recording allocated up to {start:bytes}."
    more = more if answer.base.start_peak > answer.memory.allocated.high else ""
    if room is None:
        return Text("{name}: it needs at most {needed:bytes} of each GPU. Give --memory for a verdict." + more, values)
    if answer.left_out is not None and room.spare > 0:
        values |= {"part": name_left_out(answer.left_out)}
        sentence = (
            "{name}: without {part}, it needs at most {needed:bytes} of {size}; whether it fits with that is not known."
        )
    elif growth := describe_growth(answer):
        values["growth"] = growth
        sentence = "{name}, fits at first: it needs at most {needed:bytes} of {size}, {spare:bytes} to spare, {growth}."
    elif answer.fits:
        sentence = "{name}, fits: it needs at most {needed:bytes} of {size}, {spare:bytes} to spare."
    elif _find_sum(answer.memory, "needed", room.is_limited).low < room.size:
        sentence = "{name}, does not fit: it may need {needed:bytes} of {size}, {spare:bytes} too much."
    else:
        sentence = "{name}, does not fit: it needs {needed:bytes} of {size}, {spare:bytes} too much."
    return Text(sentence + more, values)


def describe_growth(answer: WhatIfAnswer) -> str:
    """Return by how much memory grew a step in the recording, and when that fills a GPU; "" where it does not grow."""
    leak, full = answer.base.leak, answer.full_steps
    if leak is None or full is None or not answer.fits:
        return ""
    text = f"but memory grew by {format_bytes(leak.bytes_each)} a step: full near step {full[0]:,}"
    if answer.batch_ratio == 1:
        return text
    scaled = format_bytes(leak.bytes_each * answer.batch_ratio)
    return f"{text}, or near {full[1]:,} if it grows with the batch, by {scaled}"


def name_left_out(failure: PostMortem) -> str:
    """Return ``the evaluation that ran out of memory``."""
    return f"the {'evaluation' if failure.outer_phase == EVALUATION else 'micro-batch'} that ran out of memory"


def describe_peak(base: Baseline) -> str:
    """Return the steps in which most was allocated: ``steps 1,073 to 1,115``; "" where the forecast has it."""
    return base.highest_peak.describe_steps() if base.highest_peak is not None else ""


def judge_host(answer: WhatIfAnswer) -> Text:
    """Return whether a node like the recorded one holds the upper end of all ranks."""
    base = answer.base
    if answer.failure is not None and answer.failure.is_on_host:
        return Text("Host memory: as recorded, it does not fit. {cause}", {"cause": answer.failure.cause})
    if answer.host_needed is None:
        return Text("Host memory: not known, as the recording has no samples of its processes.")
    before, after = (
        (base.host_rss or 0) * max(1, base.setup.ranks // base.nodes),
        answer.memory.host.likely * answer.setting.node_ranks,
    )
    ends = {
        None: "; the node's memory was not recorded.",
        True: ", fits (it has {size:bytes}).",
        False: ", does not fit: the kernel would kill a rank (it has {size:bytes}).",
    }
    sentence = "Host memory of a node: {before:bytes} -> {after:bytes}" + ends[answer.fits_host]
    return Text(sentence, {"before": before, "after": after, "size": base.host_bytes})


def describe_recorded(answer: WhatIfAnswer) -> Iterator[Text]:
    """Yield what the recording shows and the forecast has not: a leak, a failure, a higher peak."""
    base = answer.base
    if (leak := base.leak) is not None:
        steps = leak.until_step - leak.since_step
        values: dict[str, Any] = {
            "grown": leak.bytes,
            "since": leak.since_step,
            "until": leak.until_step,
            "each": leak.bytes / steps,
        }
        yield Text(
            "Its memory grew to the end: steps {since} to {until} left {grown:bytes} behind, {each:bytes} each. The forecast"
            " does not grow.",
            values,
        )
    if base.failure is not None and answer.failure is None:
        yield Text("The recorded setting ran out of memory. {cause}", {"cause": base.failure.cause})
    if base.highest_peak is not None and answer.measured_more is None and base.failure is None:
        values = {"most": base.highest_peak.allocated_bytes, "steps": describe_peak(base)}
        yield Text("In {steps}, the recording allocated up to {most:bytes}: that is not in this forecast.", values)


def describe_time(answer: WhatIfAnswer) -> str:
    """Return the time of a step before and after, or why it is not known."""
    tokens = answer.setting.work.tokens * answer.setting.work.accumulation * answer.setting.setup.ranks
    if answer.later_batch is not None and answer.base.later is not None:
        step, seconds = answer.base.later
        pace = f"; at that pace {tokens / seconds:,.0f} tokens/s" if answer.setting.work.sequence else ""
        return f"Time of a step: {format_seconds(seconds)}, the median from step {step:,} on, with this batch{pace}."
    if not answer.time.rows:
        return f"Time: not known. {answer.time.reason}"
    low, likely, high = answer.time.seconds
    before = sum(row.before for row in answer.time.rows)
    between = f" ({format_seconds(low)} to {format_seconds(high)})" if high > 1.001 * low else ""
    mean = answer.base.mean_s or 0.0
    is_usual = mean > _FAR_MEAN * before
    text = f"Time of a {'usual ' if is_usual else ''}step: {format_seconds(before)} -> {format_seconds(likely)}{between}"
    if answer.setting.work.sequence:
        text += f"; at that pace {tokens / likely:,.0f} tokens/s"
        base, setup = answer.base, answer.setting.setup
        gpus = answer.setting.gpus * answer.setting.nodes
        sizes = (setup.parameters, setup.trainable, gpus)
        mfu = measure_mfu(tokens / likely, *sizes, [base.gpu], base.computes_in, base.model)
        text += f", MFU {format_percent(mfu, 1)}" if isfinite(mfu) else ""
    longer = f" With longer ones and pauses, steps took {format_seconds(mean)} on average in the recording."
    text += f".{longer if is_usual else ''}"
    step, seconds = answer.base.later or (0, before)
    if max(seconds / before, before / seconds) > _OTHER_PACE:
        text += f" From step {step:,} on, steps took {format_seconds(seconds)} (median); none was recorded in full detail."
    return text


def describe_changes(answer: WhatIfAnswer) -> str:
    """Return what differs from the recorded setting."""
    base, setup, work = answer.base, answer.setting.setup, answer.setting.work
    pairs = (
        ("stage", base.setup.stage, setup.stage),
        ("offload", name_offload(base.setup), name_offload(setup)),
        ("offload ratio", base.setup.offloaded_share, setup.offloaded_share),
        ("GPUs", base.gpus * base.nodes, answer.setting.gpus * answer.setting.nodes),
        ("ranks on each GPU", base.ranks_on_gpu, answer.setting.ranks_on_gpu),
        ("micro-batch", base.work.micro_batch, work.micro_batch),
        ("length", base.work.sequence, work.sequence),
        ("accumulation", base.work.accumulation, work.accumulation),
        ("checkpointing", base.work.checkpointing, work.checkpointing),
        ("bytes of a weight", base.setup.bytes_each, setup.bytes_each),
        ("bytes of its state", base.setup.state_each, setup.state_each),
    )
    changes = [f"{name} {_format_value(old)} -> {_format_value(new)}" for name, old, new in pairs if old != new]
    return ", ".join(changes) if changes else "as recorded: all figures are measurements"


def describe_baseline(base: Baseline) -> str:
    """Return a line about what was recorded."""
    size = f", {format_bytes(base.gpu_bytes)} each" if base.gpu_bytes else ""
    gpus = f"{base.nodes} x {base.gpus} {base.gpu or 'GPU'}{'s' if base.gpus > 1 else ''}{size}"
    gpus += f", {base.ranks_on_gpu} ranks on each" if base.ranks_on_gpu > 1 else ""
    return f"{base.name}: {format_parameters(base.setup.parameters)} parameters on {gpus}{describe_steps(base)}"


def describe_steps(base: Baseline) -> str:
    """Return ``, measured in steps 182 to 241, after the median step changed at step 100``."""
    if base.steps is None:
        return ""
    text = f", measured in {name_steps(base.steps)}"
    if base.timed_steps is not None and base.timed_steps != base.steps:
        text = f", memory of {name_steps(base.steps)}, times of {name_steps(base.timed_steps)}"
    if base.pace_change is None:
        return text
    return (
        f"{text}, {'after' if base.pace_change <= base.steps[0] else 'before'} the median step changed at step"
        f" {base.pace_change:,}"
    )


def name_steps(steps: tuple[int, int]) -> str:
    """Return ``steps 182 to 241``."""
    first, last = steps
    return f"steps {first:,} to {last:,}" if last > first else f"step {first:,}"


def _format_value(value: float | str | None) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)
