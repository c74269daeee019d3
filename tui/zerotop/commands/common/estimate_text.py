"""The text of ``zerotop estimate``: the recommendation, the table, and the sums behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.memory.expected.beyond_allocated import Interval
from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate
from zerotop.analysis.sweeps.estimates import Hardware, OptionEstimate, choose_option
from zerotop.analysis.sweeps.settings import OFFLOAD_DEVICES
from zerotop.analysis.text_tables import align_columns

# Of a GPU's memory; the rest is for what the estimate from a recording leaves out.
_USABLE_SHARE = 0.9


def recommend(rows: Sequence[OptionEstimate], hardware: Hardware) -> list[str]:
    """Return the recommendation, and the config to paste; nothing for a recording."""
    known = [(row, row.memory) for row in rows if row.memory is not None]
    if not known:
        return []
    least, memory = min(known, key=lambda pair: pair[1].needed if pair[1] is not None else 0.0)
    assert memory is not None
    name, needed = _name_option(least), format_bytes(memory.needed)
    if hardware.gpu_bytes is None:
        return [f"The least memory: {name}, at most {needed} of each GPU. Give --gpu-memory for a verdict."]
    size = format_bytes(hardware.gpu_bytes)
    chosen = choose_option(rows, hardware)
    if chosen is None or chosen.memory is None:
        advice = "more GPUs, a smaller micro-batch, --gradient-checkpointing or a fused loss need less"
        return [f"Nothing fits in {size}: {name} may need {needed} of each GPU; {advice}."]
    name = _name_option(chosen)
    spare = format_bytes(hardware.gpu_bytes - chosen.memory.needed)
    host = f", {format_bytes(chosen.host_bytes)} of host memory on each node" if chosen.offload != "none" else ""
    return [
        f"{name[0].upper()}{name[1:]} fits: at most {format_bytes(chosen.memory.needed)} of {size}, {spare} to spare{host}.",
        *([] if chosen.is_loop else [_format_config(chosen)]),
    ]


def _name_option(row: OptionEstimate) -> str:
    if row.is_loop:
        return "FSDP" if row.stage == 3 else "the whole model on each GPU"
    return f"stage {row.stage}" + (f" with offload of {row.offload.replace('_', ' and ')}" if row.offload != "none" else "")


def _format_config(row: OptionEstimate) -> str:
    optimizer, parameters = OFFLOAD_DEVICES[row.offload]
    parts = [f'"stage": {row.stage}']
    parts += [f'"offload_optimizer": {{"device": "{optimizer}"}}'] if optimizer != "none" else []
    parts += [f'"offload_param": {{"device": "{parameters}"}}'] if parameters != "none" else []
    return f'  "zero_optimization": {{{", ".join(parts)}}}'


def format_options(rows: Sequence[OptionEstimate], hardware: Hardware) -> Iterator[str]:
    """Yield the table of all options."""
    cells = [("stage", "offload", "allocated/GPU", "decided by", "reserved", "at most needed", "host/node", "NVMe/node", "")]
    for row in rows:
        if row.memory is None:
            continue
        memory = row.memory
        verdict = {True: "fits", False: "does not fit", None: ""}[row.fits(hardware)]
        sizes = (format_bytes(memory.reserved.likely), format_bytes(memory.needed), format_bytes(row.host_bytes))
        nvme = format_bytes(row.nvme_bytes) if row.nvme_bytes else "-"
        first = (str(row.stage), row.offload, format_bytes(memory.allocated.likely), memory.moments[0].name)
        cells.append((*first, *sizes, nvme, verdict))
    yield from align_columns(cells, "><><>>>><")
    yield "At most needed: the upper end of allocated and of CUDA's context, and segments that PyTorch cannot give back."


def explain(rows: Sequence[OptionEstimate], chosen: OptionEstimate | None) -> Iterator[str]:
    """Yield the sums of the recommended option, else of each in the table."""
    for row in [chosen] if chosen is not None else rows:
        memory = row.memory
        if memory is None:
            continue
        for moment in memory.moments:
            yield ""
            yield f"{_name_option(row)}, {moment.name}: {format_bytes(moment.bytes)}"
            cells = [(f"  {one.name}", format_bytes(one.bytes), one.formula) for one in moment.rows if one.bytes]
            yield from align_columns(cells, "<><")
        yield ""
        parts = (("allocated", memory.allocated), ("reserved", memory.reserved), ("context", memory.context))
        cells = [_format_interval(name, part) for name, part in (*parts, ("host memory of a rank", memory.host))]
        cells += [(f"  {one.name}", format_bytes(one.bytes), one.formula) for one in (memory.stuck, *memory.host_rows)]
        yield from align_columns(cells, "<><")


def _format_interval(name: str, part: Interval) -> tuple[str, str, str]:
    ends = f"{format_bytes(part.low)} to {format_bytes(part.high)}"
    return name, format_bytes(part.likely), f"{ends}: {part.formula}"


# --- recordings and sweeps -------------------------------------------------------------------------------------------------


def recommend_recorded(rows: Sequence[OptionEstimate], hardware: Hardware) -> list[str]:
    """Return the answer for a recording: what fits and costs the least time.

    Rows come in that order, but offloads after all stages.
    """
    if hardware.gpu_bytes is None or all(row.fits(hardware) is None for row in rows):
        return []
    for row in sorted(rows, key=lambda row: (row.offload != "none", "nvme" in row.offload)):
        size = row.total_bytes if row.activation_bytes is not None else row.gpu_bytes
        if row.fits(hardware) and size <= _USABLE_SHARE * hardware.gpu_bytes:
            offload = "no offload" if row.offload == "none" else f"offload {row.offload}"
            each = f"{format_bytes(size)} of the {format_bytes(hardware.gpu_bytes)} of each GPU"
            return [f"Start with stage {row.stage}, {offload}: {each}. What follows it needs less memory and more time."]
    return [f"Nothing fits with {1 - _USABLE_SHARE:.0%} to spare: more GPUs, a shorter sequence or a smaller micro-batch."]


def format_states(rows: list[OptionEstimate], hardware: Hardware, *, has_state: bool) -> list[str]:
    """Return the table of a recording's options."""
    cells = [
        ("stage", "offload", "states/GPU", "+ activations", "host/node", "NVMe/node", "DeepSpeed says/GPU", "host/node", "")
    ]
    for row in rows:
        first = row.own_estimates[0] if row.own_estimates else None
        total = format_bytes(row.total_bytes) if row.activation_bytes is not None else "-"
        verdict = {True: "fits", False: "does not fit", None: ""}[row.fits(hardware)]
        own = (format_bytes(first.gpu_bytes), format_bytes(first.host_bytes)) if first is not None else ("-", "-")
        host, nvme = (format_bytes(size) if size else "-" for size in (row.host_bytes, row.nvme_bytes))
        sizes = (format_bytes(row.gpu_bytes), total, host, nvme)
        cells.append((str(row.stage), row.offload, *sizes, *own, verdict))
    notes = [
        "States by ZeRO's formulas (arXiv:1910.02054): parameters, gradients, fp32 master weights, optimizer state.",
        *([] if has_state else ["The optimizer's state is missing: its size is not known."]),
        "Not included: buckets, gathered layers of stage 3, CUDA's context and fragmentation.",
    ]
    return [*align_columns(cells, "><>>>>>><"), *notes]


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
