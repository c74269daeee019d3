"""The text of ``zerotop estimate``: the recommendation, the table, and the sums behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.memory.expected.beyond_allocated import Interval
from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate
from zerotop.analysis.sweeps.estimates import Hardware, OptionEstimate, choose_option
from zerotop.analysis.sweeps.settings import OFFLOAD_DEVICES
from zerotop.analysis.text_tables import align_columns


def recommend(rows: Sequence[OptionEstimate], hardware: Hardware) -> list[str]:
    """Return the recommendation, and the config to paste."""
    least = min(rows, key=lambda row: row.memory.needed)
    name, needed = name_option(least), format_bytes(least.memory.needed)
    if hardware.gpu_bytes is None:
        return [f"The least memory: {name}, at most {needed} of each GPU. Give --gpu-memory for a verdict."]
    size = format_bytes(hardware.gpu_bytes)
    chosen = choose_option(rows, hardware)
    if chosen is None:
        advice = "more GPUs, a smaller micro-batch, --gradient-checkpointing or a fused loss need less"
        return [f"Nothing fits in {size}: {name} may need {needed} of each GPU; {advice}."]
    name = name_option(chosen)
    spare = format_bytes(hardware.gpu_bytes - chosen.memory.needed)
    host = f", {format_bytes(chosen.host_bytes)} of host memory on each node" if chosen.offload != "none" else ""
    return [
        f"{name[0].upper()}{name[1:]} fits: it needs at most {format_bytes(chosen.memory.needed)} of {size},"
        f" {spare} to spare{host}.",
        *([] if chosen.is_loop else [_format_config(chosen)]),
    ]


def name_option(row: OptionEstimate) -> str:
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
        for moment in memory.moments:
            yield ""
            yield f"{name_option(row)}, {moment.name}: {format_bytes(moment.bytes)}"
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
