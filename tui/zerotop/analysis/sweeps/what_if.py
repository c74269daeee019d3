"""The memory of a recorded training at another setting: measured at the old one, plus what the formulas say differs.

The sums are those of :mod:`zerotop.analysis.memory.expected.peak_moments`. What they do not know of a job is taken from its
recording: the activations and the loss of a token, what lasts beyond the states, what an update takes beyond the formula.
At the recorded setting each moment is what was measured. The part that differs is extrapolated, and has an interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zerotop.analysis.memory.expected import beyond_allocated
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.peak_moments import (
    BACKWARD,
    END_OF_BACKWARD,
    LOSS,
    STEP,
    WORKSPACE_BYTES,
    MemoryRow,
    PeakMoment,
    Workload,
    count_updated,
    keep_layers,
    list_buckets,
    list_gathered,
    list_gradients,
    list_held_gradients,
    list_lasting_buffers,
    list_layer,
    list_reductions,
    list_states,
    list_update,
)
from zerotop.analysis.memory.expected.step_blocks import is_simulated, simulate_beyond
from zerotop.analysis.memory.expected.zero_model import EngineSetup
from zerotop.analysis.sweeps.baseline import Baseline, NoBaselineError
from zerotop.analysis.sweeps.settings import OFFLOAD_DEVICES

_STATES_SPREAD, _TOKENS_SPREAD, _LAYERS_SPREAD = 0.03, 0.03, 0.15
"""Of the bytes that differ: of states and buffers, of what scales with tokens, of layers by formula."""
_SETUP_SPREAD = 0.015  # of all, at another stage, offload or number of GPUs
_LARGEST_SHARE = 0.3  # of all parameters in the largest tensor, where its size was not recorded
_RESERVED_SPREAD = 0.18  # of reserved memory, where it is not as recorded
_HOST_SPREAD = 0.15  # of the host memory that differs
_HOST_NOISE = 0.08  # between runs
_CONTEXT_STEP = 0.32e9  # contexts of one setting differ by this, as NCCL and cuBLAS open one more channel or handle
_BEYOND = "beyond the formulas"
_SQUARE = "blocks of rows x rows"
_SAME_MOMENT = 0.02  # a measured backward is this close to the moment that decided it


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What a recording measured of one micro-batch: it scales with tokens."""

    layers: float  # saved by the forward, without the logits' copies in the loss
    logits: float  # a copy in the loss, in fp32; 0 where the loss shows none
    loss: float  # layers and all copies when the loss's backward holds most
    is_loss_measured: bool  # else another moment was higher
    fixed: float  # of the backward's peak, what no moment explains: perhaps it does not scale
    reduction: float  # of a reduction that decides, what its formula lacks
    square: float = 0.0  # of blocks of rows x rows elements, which grow with the square of the rows


def change_setup(setup: EngineSetup, stage: int, offload: str) -> EngineSetup:
    """Return the setup with another stage and offload mode, one of ``OFFLOAD_DEVICES``."""
    devices = OFFLOAD_DEVICES[offload]
    if devices == (setup.offload_optimizer, setup.offload_parameters):
        return replace(setup, stage=stage, offloaded_share=setup.offloaded_share if stage == 3 else 1.0)
    optimizer, parameters = devices
    return replace(setup, stage=stage, offload_optimizer=optimizer, offload_parameters=parameters, offloaded_share=1.0)


def name_offload(setup: EngineSetup) -> str:
    """Return the offload mode by its name in ``OFFLOAD_DEVICES``; "" for another combination of devices."""
    devices = (setup.offload_optimizer, setup.offload_parameters)
    return next((name for name, pair in OFFLOAD_DEVICES.items() if pair == devices), "")


def predict_memory(base: Baseline, setup: EngineSetup, work: Workload, ranks_on_gpu: int = 1) -> beyond_allocated.JobMemory:
    """Return the memory of one rank at another setting. Raises NoBaselineError where the recording does not tell.

    ``ranks_on_gpu``: those that share a GPU there.
    """
    same = (setup, work) == (base.setup, base.work)
    tokens = _read_token_bytes(base)
    moments = _list_moments(base, tokens, setup, work)
    likely = moments[0].bytes
    width = 0.0 if same else _find_width(base, tokens, setup, work, moments[0])
    note = f"the {moments[0].name}: the highest of {len(moments)} moments"
    allocated = beyond_allocated.Interval(likely - width, likely, likely + width, note)
    reserved = _predict_reserved(base, allocated, setup, work, is_changed=not same)
    context = _find_context(base, setup, is_changed=not same)
    device = beyond_allocated.add_intervals(reserved, context, "reserved + context")
    if base.gpu_bytes is not None:
        share = base.gpu_bytes / ranks_on_gpu
        reserved, device = _limit(reserved, max(likely, share - context.likely)), _limit(device, share)
    stuck = tokens.logits * _count_tokens(work) / _count_tokens(base.work) if moments[0].name == LOSS else 0.0
    row = MemoryRow("stuck segments", stuck, "a free block of fp32 logits between blocks in use")
    host, host_rows = _predict_host(base, setup, work)
    return beyond_allocated.JobMemory(moments, allocated, reserved, context, device, host, host_rows, row, ranks_on_gpu)


def _predict_reserved(
    base: Baseline, allocated: beyond_allocated.Interval, setup: EngineSetup, work: Workload, *, is_changed: bool
) -> beyond_allocated.Interval:
    """Return reserved memory: allocated, and what segments hold beyond it.

    The difference that a simulation of the allocator makes between both settings, where the model's layers were recorded.
    Else half of what the recording had scales with allocated and the rest stays: the mean of both extremes.
    """
    beyond = max(0, base.reserved - base.peak)
    shape = base.shape
    if is_changed and shape is not None and is_simulated(shape, base.setup) and is_simulated(shape, setup):
        before, after = (
            simulate_beyond(shape, *setting, base.rules) for setting in ((base.setup, base.work), (setup, work))
        )
        likely = allocated.likely + max(0, beyond + after - before)
        note = "allocated, and what was beyond it, with the difference of two simulations of PyTorch's allocator"
    else:
        likely = allocated.likely + beyond * (1 + allocated.likely / base.peak) / 2
        note = "allocated, and what was beyond it, half of which scales"
    spread = _RESERVED_SPREAD if is_changed else 0.0
    return beyond_allocated.Interval(max(allocated.low, (1 - spread) * likely), likely, (1 + spread) * likely, note)


def _limit(part: beyond_allocated.Interval, most: float) -> beyond_allocated.Interval:
    return beyond_allocated.Interval(min(part.low, most), min(part.likely, most), min(part.high, most), part.formula)


def _count_tokens(work: Workload) -> int:
    return work.micro_batch * (work.sequence or 1)


def _sum(rows: Sequence[MemoryRow]) -> float:
    return sum(row.bytes for row in rows)


# --- what the recording tells ----------------------------------------------------------------------------------------------


def _list_static(setup: EngineSetup, work: Workload) -> list[MemoryRow]:
    workspaces = MemoryRow("workspaces", WORKSPACE_BYTES, "cuBLAS, a constant")
    return [*list_states(setup), workspaces, *list_lasting_buffers(setup, work)]


def _read_token_bytes(base: Baseline) -> TokenBytes:
    """Return what scales with tokens, and separately the blocks of rows x rows at the moment of the loss."""
    tokens = _read_loss(base)
    if base.square is None:
        return tokens
    square = min(float(base.square.bytes), tokens.loss - tokens.layers)
    return replace(tokens, loss=tokens.loss - square, logits=min(tokens.logits, tokens.loss - square), square=square)


def _read_loss(base: Baseline) -> TokenBytes:
    setup, work, first, last = base.setup, base.work, base.first, base.last
    gathered = _sum(list_gathered(_shape(base), setup))
    saved = max(0.0, first.forward_end - first.kept - gathered)
    logits = max(0, first.forward_peak - first.forward_end)
    in_forward = max(saved, first.forward_peak - first.kept - gathered)
    assumed = in_forward + logits / 2
    layers = max(0.0, saved - logits)
    # In its last micro-batch the loss is on top of what the others left.
    in_backward = last.backward_peak - last.kept - gathered
    reduction = max((moment.bytes for moment in _list_reductions(setup, work, [], [], layers - logits / 2)), default=0.0)
    # Stage 1 keeps its buckets from the first micro-batch on.
    lacking = first.backward_peak - first.kept - gathered - reduction
    if abs(lacking) <= _SAME_MOMENT * first.backward_peak and reduction > 1.02 * assumed:
        return TokenBytes(layers, logits, assumed, is_loss_measured=False, fixed=0.0, reduction=lacking)
    lacking = min(0.0, lacking)  # it was not the highest, whatever the formula says
    if logits and work.checkpointing != "none" and in_backward > 1.3 * assumed:
        # A layer is recomputed, or a large gradient is reduced: the recording does not tell which.
        fixed = in_backward - assumed
        return TokenBytes(layers, logits, assumed, is_loss_measured=True, fixed=fixed, reduction=lacking)
    return TokenBytes(layers, logits, max(in_backward, in_forward), is_loss_measured=True, fixed=0.0, reduction=lacking)


def _list_reductions(
    setup: EngineSetup, work: Workload, static: Sequence[MemoryRow], others: Sequence[MemoryRow], layers: float
) -> list[PeakMoment]:
    """Return the moments of the reductions; ``layers``: what the forward keeps, without the logits, in bytes."""
    kept = MemoryRow("activations", layers, "measured: what the forward keeps, without the logits")
    return list_reductions(setup, work, static, [*others, kept])


def _shape(base: Baseline) -> ModelShape:
    """Return the model's shape, or one without layers: what needs them is refused before."""
    return base.shape or ModelShape(0, 0, 0, 0, None, None)


# --- the moments -----------------------------------------------------------------------------------------------------------


def _list_moments(base: Baseline, tokens: TokenBytes, setup: EngineSetup, work: Workload) -> tuple[PeakMoment, ...]:
    ratio = _count_tokens(work) / _count_tokens(base.work)
    static = [*_list_static(setup, work), *_list_beyond(base, ratio)]
    gathered = list_gathered(_shape(base), setup)
    held = _list_held(base, setup, work)
    scaled = f"measured, x {ratio:.3g} tokens" if ratio != 1 else "measured"
    layers, changed = _change_layers(base, setup, work, scaled)
    loss = [
        MemoryRow("activations", tokens.layers * ratio, f"{scaled}: what the forward keeps"),
        *layers,
        MemoryRow("logits and loss", (tokens.loss - tokens.layers) * ratio, f"{scaled}: beyond what the forward keeps"),
    ]
    if tokens.square and base.square is not None:
        square = (work.micro_batch / base.work.micro_batch) ** 2
        note = f"measured{f', x {square:.3g}' if square != 1 else ''}: {base.square.text}"
        loss.append(MemoryRow(_SQUARE, tokens.square * square, note))
    same_work = work.checkpointing == base.work.checkpointing
    if tokens.fixed and same_work and (list_buckets(setup, work) or not list_buckets(base.setup, base.work)):
        loss.append(
            MemoryRow("in the backward", tokens.fixed, "measured beyond the loss: a recomputed layer or a reduction")
        )
    kept = [loss[0], *layers]
    without_logits = (tokens.layers - tokens.logits / 2) * ratio
    than_formula = (
        "more than the formula of the reduction" if tokens.reduction > 0 else "less than the formula of the reduction"
    )
    lacking = [MemoryRow(than_formula, tokens.reduction, "measured")] if tokens.reduction else []
    moments = [PeakMoment(LOSS, (*static, *gathered, *held, *loss))]
    if changed:
        moments.append(PeakMoment(BACKWARD, (*static, *gathered, *held, *kept, *changed)))
    moments += _list_reductions(setup, work, [*static, *lacking], [*held, *layers], without_logits)
    gradients = list_gradients(setup, work)
    moments.append(PeakMoment(END_OF_BACKWARD, (*static, *gathered, *gradients)))
    moments.append(PeakMoment(STEP, (*static, *list_update(setup, work), *_list_update_beyond(base, setup))))
    return tuple(sorted(moments, key=lambda moment: -moment.bytes))


def _list_beyond(base: Baseline, ratio: float) -> Iterator[MemoryRow]:
    """Yield what lasts beyond the formulas.

    Up to the size of 16-bit logits it is an output that the script holds until the next step, which scales with tokens.
    """
    beyond = base.first.kept - _sum(_list_static(base.setup, base.work))
    output = min(max(0.0, beyond), (base.first.forward_peak - base.first.forward_end) / 2)
    note = "measured between steps: buffers, quantized weights, outputs that the script holds"
    yield MemoryRow(_BEYOND, beyond + output * (ratio - 1), note)


def _list_held(base: Baseline, setup: EngineSetup, work: Workload) -> list[MemoryRow]:
    """Return the gradients that earlier micro-batches left, as measured where the setting has the same ones."""
    rows = list_held_gradients(setup, work)
    before = list_held_gradients(base.setup, base.work)
    if base.work.accumulation > 1 and work.accumulation > 1:
        beyond = base.last.kept - base.first.kept - _sum(before)
        rows.append(MemoryRow("gradients beyond the formulas", beyond, "measured between micro-batches"))
    return rows


def _change_layers(
    base: Baseline, setup: EngineSetup, work: Workload, scaled: str
) -> tuple[list[MemoryRow], list[MemoryRow]]:
    """Return what checkpointing or other dtypes change of the saved layers, and what the backward of one layer holds."""
    old, new = base.work.checkpointing, work.checkpointing
    is_wider = setup.computes_wide != base.setup.computes_wide
    if old == new and not is_wider:
        return [], []
    if base.shape is None:
        raise NoBaselineError(
            f"{base.name} does not have the sizes of its layers, which another checkpointing or dtype needs: record with"
            " this version, or give the model to `zerotop estimate MODEL`"
        )
    before = keep_layers(base.shape, base.setup, replace(work, checkpointing=old))
    after = keep_layers(base.shape, setup, work)
    change = MemoryRow("layers at the new setting", after.bytes - before.bytes, f"{after.formula}, less {before.formula}")
    return [change], list_layer(base.shape, setup, work)


def _list_update_beyond(base: Baseline, setup: EngineSetup) -> Iterator[MemoryRow]:
    """Yield what the update took beyond its formula, for each parameter that a rank updates."""
    before, after = count_updated(base.setup), count_updated(setup)
    if not before or not after:
        return
    formula = base.first.kept + _sum([*list_update(base.setup, base.work)])
    beyond = base.step_peak - formula
    yield MemoryRow("update beyond the formulas", beyond * after / before, "measured, for each updated parameter")


# --- intervals and what is not allocated -----------------------------------------------------------------------------------


def _find_width(base: Baseline, tokens: TokenBytes, setup: EngineSetup, work: Workload, moment: PeakMoment) -> float:
    """Return half the interval of allocated: of the rows of the deciding moment that differ from the recorded setting."""
    before = {row.name: row.bytes for one in _list_moments(base, tokens, base.setup, base.work)[:1] for row in one.rows}
    width = _SETUP_SPREAD * moment.bytes if setup != base.setup else 0.0
    for row in moment.rows:
        change = abs(row.bytes - before.get(row.name, 0.0))
        by_tokens = row.name in ("activations", "logits and loss", _BEYOND, _SQUARE)
        by_layers = row.name in ("layers at the new setting", "recomputed layer", "gradients in a layer")
        width += change * (_LAYERS_SPREAD if by_layers else _TOKENS_SPREAD if by_tokens else _STATES_SPREAD)
    if setup.offload_optimizer != base.setup.offload_optimizer and not setup.largest_layer and setup.stage in (1, 2):
        width += _LARGEST_SHARE * setup.bytes_each * setup.trainable
    ratio = _count_tokens(work) / _count_tokens(base.work)
    if moment.name == LOSS:
        width += tokens.fixed * abs(ratio - 1)
        width += 0.0 if tokens.is_loss_measured else tokens.logits * ratio
    return width


def _find_context(base: Baseline, setup: EngineSetup, *, is_changed: bool) -> beyond_allocated.Interval:
    usual = beyond_allocated.find_context(base.gpu, setup)
    if base.nvml is None:
        return usual
    measured = float(base.nvml - base.reserved)
    before = beyond_allocated.find_context(base.gpu, base.setup)
    change = [getattr(usual, end) - getattr(before, end) for end in ("low", "likely", "high")]
    note = "measured: NVML less reserved" + (", with the usual difference of NCCL" if change[1] else "")
    low, likely, high = (measured + part for part in change)
    if is_changed:
        low, high = low - _CONTEXT_STEP, max(high + _CONTEXT_STEP, usual.likely)
    return beyond_allocated.Interval(low, likely, high, note)


def _predict_host(
    base: Baseline, setup: EngineSetup, work: Workload
) -> tuple[beyond_allocated.Interval, tuple[MemoryRow, ...]]:
    """Return the host memory of one rank."""
    rows = tuple(beyond_allocated.list_host_rows(setup, work.accumulation))
    if base.host_rss is None:
        return beyond_allocated.Interval(0, 0, 0, "not recorded"), ()
    before = _sum([*beyond_allocated.list_host_rows(base.setup, base.work.accumulation)])
    # If the formula says too much of the recorded setting, the process has its usual size nevertheless.
    least = min(beyond_allocated.LOOP_PROCESS[0] if setup.is_loop else beyond_allocated.DEEPSPEED_PROCESS[0], base.host_rss)
    is_same = (setup, work) == (base.setup, base.work)
    process = base.host_rss - before if is_same else max(base.host_rss - before, least)
    likely = process + _sum(rows)
    if setup.is_loop:  # DeepSpeed sets NCCL up for one rank, too
        likely += beyond_allocated.NCCL_HOST * ((setup.ranks > 1) - (base.setup.ranks > 1))
    change = likely - base.host_rss
    width = _HOST_SPREAD * abs(change) + (0.0 if is_same else _HOST_NOISE * base.host_rss)
    note = "measured, and the difference of what is offloaded" if change else "measured"
    row = MemoryRow("process", process, "measured less what is offloaded by the formula")
    return beyond_allocated.Interval(max(0.0, likely - width), likely, likely + width, note), (row, *rows)
