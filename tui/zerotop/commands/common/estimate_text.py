"""The text of ``zerotop estimate``: the recommendation, the table, and the sums behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerotop.analysis.formatting import format_bytes, format_count
from zerotop.analysis.memory.expected.beyond_allocated import Interval
from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate
from zerotop.analysis.memory.expected.peak_moments import PeakMoment
from zerotop.analysis.sweeps.estimates import Hardware, OptionEstimate
from zerotop.analysis.sweeps.ranking import choose_option
from zerotop.analysis.sweeps.settings import OFFLOAD_DEVICES, describe_offload
from zerotop.analysis.sweeps.what_if_verdict import name_left_out
from zerotop.analysis.text_tables import align_columns


def recommend(rows: Sequence[OptionEstimate], hardware: Hardware, command: str = "") -> str:
    """Return one line: the fastest that fits, how much it spares, and the config or command to paste."""
    least = min(rows, key=lambda row: row.measure_needed(hardware))
    if hardware.gpu_bytes is None:
        needed = format_bytes(least.measure_needed(hardware))
        return f"The least memory: {name_option(least)}, at most {needed} of each GPU. Give --gpu-memory for a verdict."
    chosen = choose_option(rows, hardware)
    if chosen is None:
        return _advise(rows, hardware)
    usable = [row for row in rows if row.is_usable(hardware)]
    fitting, timed = len(usable), sum(row.rate is not None for row in usable)
    room = chosen.measure_room(hardware)
    assert room is not None  # its GPU's size is known
    name = name_option(chosen, rows)
    host = f", {format_bytes(chosen.host_bytes)} of host memory on each node" if chosen.offload != "none" else ""
    of_timed = f"{timed} whose speed is known, of " if 0 < timed < fitting else ""
    best = "the only one whose speed is known, of " if timed == 1 else f"the fastest of {of_timed}"
    others = f"{best}{fitting} that fit" if fitting > 1 else "nothing else fits" if len(rows) > 1 else ""
    fits = "fits at first" if chosen.growth else "fits"
    parts = [
        f"{name[0].upper()}{name[1:]} {fits}: it needs at most {format_bytes(room.needed)} of"
        f" {room.sizes}, {format_bytes(room.spare)} to spare{host}{f', {chosen.growth}' if chosen.growth else ''}",
        f"{others}{_format_rate(chosen) if fitting > 1 else ''}",
    ]
    paste = command or ("" if chosen.is_loop else format_config(chosen))
    return "; ".join(filter(None, parts)) + (f": {paste}" if paste else ".")


def _advise(rows: Sequence[OptionEstimate], hardware: Hardware) -> str:
    size = format_bytes(hardware.gpu_bytes or 0)
    in_gpu = [row for row in rows if row.fits(hardware)]
    if in_gpu:
        least = min(in_gpu, key=lambda row: row.host_bytes)
        has = format_bytes(hardware.host_bytes or 0)
        needed = format_bytes(least.memory.host.high * least.node_ranks)
        return (
            f"Nothing fits: {name_option(least, rows)} fits in {size}, but may need {needed} of a node's memory, which has"
            f" {has}; fewer ranks on a node or offload to NVMe need less."
        )
    left_out = next(
        (row.left_out for row in rows if (room := row.measure_room(hardware)) is not None and room.spare > 0), None
    )
    if left_out is not None:
        return f"Nothing is recommended: no forecast includes {name_left_out(left_out)}. {left_out.advice}"
    least = min(rows, key=lambda row: row.measure_needed(hardware))
    advice = "more GPUs, a smaller micro-batch, --gradient-checkpointing or a fused loss need less"
    room = least.measure_room(hardware)
    needed, size = (format_bytes(room.needed), room.sizes) if room is not None else ("", size)
    return f"Nothing fits in {size}: {name_option(least, rows)} may need {needed} of each GPU; {advice}."


def name_option(row: OptionEstimate, rows: Sequence[OptionEstimate] = ()) -> str:
    """Return ``stage 2 with offload of optimizer``, with rows and GPUs where ``rows`` differ in them."""
    name = f"stage {row.stage}"
    if row.is_loop:
        name = "FSDP" if row.stage == 3 else "the whole model on each GPU"
    elif row.offload != "none":
        name += f" with offload of {describe_offload(row.offload)}"
    if len({one.gpus for one in rows}) > 1:
        name += f" on {format_count(row.gpus, 'GPU')}"
    if len({one.micro_batch for one in rows}) > 1:
        name += f" with {format_count(row.micro_batch, 'row')} a micro-batch"
    return name


_RULE = "no offload, most GPUs, lowest stage, largest micro-batch"


def _format_rate(row: OptionEstimate) -> str:
    return f", {row.rate:,.0f} {row.rate_unit}" if row.rate is not None else " by rule, as no run tells its speed"


def format_config(row: OptionEstimate) -> str:
    """Return the parts of a DeepSpeed config."""
    optimizer, parameters = OFFLOAD_DEVICES[row.offload]
    parts = [f'"stage": {row.stage}']
    ratio = f', "ratio": {row.offloaded_share:g}' if row.offloaded_share < 1 else ""
    parts += [f'"offload_optimizer": {{"device": "{optimizer}"{ratio}}}'] if optimizer != "none" else []
    parts += [f'"offload_param": {{"device": "{parameters}"}}'] if parameters != "none" else []
    return f'"zero_optimization": {{{", ".join(parts)}}}, "train_micro_batch_size_per_gpu": {row.micro_batch}'


def format_ranking(rows: Sequence[OptionEstimate], hardware: Hardware) -> Iterator[str]:
    """Yield the table of all combinations in their order."""
    heads = ("", "GPUs", "stage", "offload", "micro-batch", "at most needed", "to spare", "host/node", "speed", "")
    cells: list[tuple[str, ...]] = [heads]
    for number, row in enumerate(rows, 1):
        room = row.measure_room(hardware)
        spare = format_bytes(room.spare) if room is not None else ""
        rate = f"{row.rate:,.0f} {row.rate_unit}" if row.rate is not None else "-"
        setting = (str(number), str(row.gpus), str(row.stage), row.offload, f"{row.micro_batch:,}")
        verdict = _judge(row, hardware)
        cells.append(
            (*setting, format_bytes(row.measure_needed(hardware)), spare, format_bytes(row.host_bytes), rate, verdict)
        )
    yield from align_columns(cells, ">>><>>>>><")
    yield from _note_left_out(rows)
    yield f"Order: those that fit, by rule ({_RULE}), and by speed where the"
    yield "recording tells it of both. Each setting is listed up to its first micro-batch that does not fit."


def _judge(row: OptionEstimate, hardware: Hardware) -> str:
    fits = row.fits(hardware)
    if fits and row.fits_host is False:
        return "does not fit in the host's memory"
    if row.has_failed:
        return "ran out of memory"
    unknown = "fits without it" if row.left_out is not None else ""
    return {True: "fits at first" if row.growth else "fits", False: "does not fit", None: unknown}[fits]


def format_options(rows: Sequence[OptionEstimate], hardware: Hardware) -> Iterator[str]:
    """Yield the table of all options."""
    cells = [("stage", "offload", "allocated/GPU", "decided by", "reserved", "at most needed", "host/node", "NVMe/node", "")]
    for row in rows:
        memory = row.memory
        verdict = _judge(row, hardware)
        sizes = (
            format_bytes(memory.reserved.likely),
            format_bytes(row.measure_needed(hardware)),
            format_bytes(row.host_bytes),
        )
        nvme = format_bytes(row.nvme_bytes) if row.nvme_bytes else "-"
        first = (str(row.stage), row.offload, format_bytes(memory.allocated.likely), memory.moments[0].name)
        cells.append((*first, *sizes, nvme, verdict))
    yield from align_columns(cells, "><><>>>><")
    yield from _note_left_out(rows)
    room = rows[0].measure_room(hardware)
    parts = "allocated" if room is not None and room.is_limited else "allocated and of CUDA's context"
    yield f"At most needed: the upper end of {parts}, and segments that PyTorch cannot give back."
    yield "It gives the rest of reserved back before it runs out of memory."


def _note_left_out(rows: Sequence[OptionEstimate]) -> Iterator[str]:
    """Yield what "it" is, which is in no forecast."""
    left_out = next((row.left_out for row in rows if row.left_out is not None), None)
    if left_out is not None:
        yield f"It: {name_left_out(left_out)}, which is in no figure of this table."


def explain(rows: Sequence[OptionEstimate], chosen: OptionEstimate | None) -> Iterator[str]:
    """Yield the sums of the recommended option, else of each in the table."""
    for row in [chosen] if chosen is not None else rows:
        memory = row.memory
        for moment in memory.moments:
            yield from format_moment(moment, f"{name_option(row)}, ")
        yield ""
        parts = (("allocated", memory.allocated), ("reserved", memory.reserved), ("context", memory.context))
        cells = [_format_interval(name, part) for name, part in (*parts, ("host memory of a rank", memory.host))]
        cells += [(f"  {one.name}", format_bytes(one.bytes), one.formula) for one in (memory.stuck, *memory.host_rows)]
        yield from align_columns(cells, "<><")


def format_moment(moment: PeakMoment, whose: str = "") -> Iterator[str]:
    """Yield the sum of a moment, with its formulas."""
    yield ""
    yield f"{whose}{moment.name}: {format_bytes(moment.bytes)}"
    cells = [(f"  {one.name}", format_bytes(one.bytes), one.formula) for one in moment.rows if one.bytes]
    yield from align_columns(cells, "<><")


def _format_interval(name: str, part: Interval) -> tuple[str, str, str]:
    ends = f"{format_bytes(part.low)} to {format_bytes(part.high)}"
    return name, format_bytes(part.likely), f"{ends}: {part.formula}"


# --- DeepSpeed's own estimates ------------------------------------------------------------------------------------------


def format_own(rows: Sequence[Estimate]) -> list[str]:
    """Return the table of DeepSpeed's own estimates."""
    cells = [("DeepSpeed's own estimates, without activations", "GPU", "host/node")]
    for row in rows:
        cells.append((f"  stage {row.stage}, {row.option_text}", format_bytes(row.gpu_bytes), format_bytes(row.host_bytes)))
    has_stage_3 = any(row.stage == 3 for row in rows)
    notes = (
        [] if has_stage_3 else ["Those of stage 3 need the size of the largest layer, which the recording does not have."]
    )
    return [*align_columns(cells, "<>>"), *notes]
