"""The moments of a step at which a GPU's allocated memory may be highest, each with its own sum.

The states are those of :mod:`zerotop.analysis.memory.expected.zero_model`; this module adds what lives for part of a step.
Sources: DeepSpeed's ``stage_1_and_2.py``, ``stage3.py`` and ``bf16_optimizer.py``; PyTorch's ``torch/optim/adam.py``
(``_multi_tensor_adam`` holds the square roots of all second moments at once) and ``fsdp/_flat_param.py``; Liger-Kernel's
``fused_linear_cross_entropy.py``; ``modeling_llama.py`` and its relatives in Transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerotop.analysis.formatting import format_parameters
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.zero_model import EngineSetup, compute_expected
from zerotop.analysis.memory.tensor_inventory import (
    FROZEN_PARAMETERS,
    GRADIENTS,
    MASTER_WEIGHTS,
    OPTIMIZER_STATE,
    PARAMETERS,
)

WORKSPACE_BYTES = 70_000_000
"""cuBLAS's workspaces, of 8 to 32 MiB for each handle and stream: a constant, since they depend on the matrices."""

DEFAULT_BUCKET = 500_000_000
"""DeepSpeed's ``reduce_bucket_size`` in elements."""

_LIVE_PARAMETERS = 1_000_000_000  # stage3_max_live_parameters
_BUCKET_ROW = "reduce bucket"
_SUB_GROUP = 1_000_000_000  # sub_group_size: elements that stage 3 updates at once

LOSSES = {
    "logits": (12, "fp32 copy, its log-softmax and the gradient of 16-bit logits"),
    "fused": (8, "16-bit logits, an fp32 copy and the gradient in place of the logits"),
    "chunked": (2, "16-bit logits; the loss is computed in chunks"),
    "liger": (0, "no logits: the head and the loss are one operation over chunks"),
}
"""Bytes for each word of the vocabulary and token when the loss's backward begins, by the kind of loss."""

LOSS, BACKWARD, REDUCTION = "loss", "backward of the last layer", "first reduction"
LAST_REDUCTION, END_OF_BACKWARD, STEP = "last reduction", "end of backward", "optimizer step"
"""Names of moments."""

CHECKPOINTINGS = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One part of a sum."""

    name: str
    bytes: float
    formula: str


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """A moment of a step, and what is allocated then."""

    name: str
    rows: tuple[MemoryRow, ...]

    @property
    def bytes(self) -> float:
        return sum(row.bytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class Workload:
    """The settings of a step that decide what lives beside the states."""

    micro_batch: int
    sequence: int
    accumulation: int = 1
    checkpointing: str = "none"  # one of CHECKPOINTINGS
    loss: str = "logits"  # one of LOSSES
    has_score_matrices: bool = False  # attention keeps s x s matrices
    foreach: bool = True  # the optimizer's form
    update_in_backward: bool = False  # each parameter is updated as soon as its gradient is there
    bucket: int = DEFAULT_BUCKET  # elements
    overlap_comm: bool = False  # gradients are reduced in another stream; in stage 3 always

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.sequence


def compute_moments(shape: ModelShape, setup: EngineSetup, work: Workload) -> tuple[PeakMoment, ...]:
    """Return the moments of one step on one GPU, the highest first."""
    states = [*list_states(setup)]
    states.append(MemoryRow("workspaces", WORKSPACE_BYTES, "cuBLAS, a constant"))
    states += list_lasting_buffers(setup, work)
    gathered = list_gathered(shape, setup)
    held = list_held_gradients(setup, work)
    ends = _keep_ends(shape) * work.tokens
    kept = keep_layers(shape, setup, work)
    logits, note = LOSSES[work.loss]
    loss = [
        kept,
        MemoryRow("logits and loss", logits * shape.vocabulary * work.tokens, f"{logits} v t: {note}"),
        MemoryRow("embedding, last norm, head", ends, "what they save, t tokens"),
        *_list_liger(shape, setup, work),
    ]
    layer = list_layer(shape, setup, work)
    moments = [
        PeakMoment(LOSS, (*states, *gathered, *held, *loss)),
        PeakMoment(BACKWARD, (*states, *gathered, *held, kept, *layer)),
        *list_reductions(setup, work, states, [*held, kept]),
        PeakMoment(END_OF_BACKWARD, (*states, *gathered, *list_gradients(setup, work), *layer)),
        PeakMoment(STEP, (*states, *list_update(setup, work))),
    ]
    return tuple(sorted(moments, key=lambda moment: -moment.bytes))


_PARTITIONED_FROM = {PARAMETERS: 3, FROZEN_PARAMETERS: 3, MASTER_WEIGHTS: 1, OPTIMIZER_STATE: 1}  # stages


def list_states(setup: EngineSetup) -> Iterable[MemoryRow]:
    """Yield the states that last from step to step."""
    for name, size in compute_expected(setup).gpu.items():
        if not size or name == GRADIENTS:
            continue
        divided = _divide(setup, _PARTITIONED_FROM[name])
        whole = size * setup.ranks if divided else size
        count = setup.parameters - setup.trainable if name == FROZEN_PARAMETERS else setup.trainable
        each = f"{whole / max(1, count):.2g} bytes x {format_parameters(count)}{divided}"
        yield MemoryRow(name.replace("_", " "), size, each)


def _share(setup: EngineSetup, count: float, stage: int = 1) -> float:
    return count / setup.ranks if setup.stage >= stage else count


def _is_offloaded(setup: EngineSetup) -> bool:
    return setup.offload_optimizer != "none"


def _width(setup: EngineSetup) -> float:
    """Return the size of activations over that in 16 bits."""
    return 2.0 if setup.computes_wide else 1.0


# --- activations -----------------------------------------------------------------------------------------------------------


def _is_frozen(setup: EngineSetup) -> bool:
    return setup.trainable < setup.parameters


def _keep_one_layer(shape: ModelShape, setup: EngineSetup, work: Workload) -> float:
    """Return the bytes that one layer saves for each token."""
    if shape.counted is not None:
        each: float = shape.counted.kept_frozen if _is_frozen(setup) else shape.counted.kept
    else:
        each = 34 * shape.hidden
    return _width(setup) * (each + 5 * shape.heads * work.sequence * work.has_score_matrices)


def _keep_ends(shape: ModelShape) -> int:
    return shape.kept.ends if shape.kept is not None else 5 * shape.hidden


def keep_layers(shape: ModelShape, setup: EngineSetup, work: Workload) -> MemoryRow:
    wide = 2.0 if setup.wide_residual else _width(setup)
    full, inputs = _keep_one_layer(shape, setup, work), 2 * shape.hidden * wide
    each, formula = {
        "none": (full, "what autograd saves of each layer"),
        "selective": ((full + inputs) / 2, "what autograd saves of every second layer, inputs of others"),
        "full": (inputs, "the input of each layer"),
    }[work.checkpointing]
    return MemoryRow("activations", shape.layers * each * work.tokens, f"L t {each / 1e3:,.1f} kB: {formula}")


def list_layer(shape: ModelShape, setup: EngineSetup, work: Workload) -> list[MemoryRow]:
    """Return what the backward of one layer holds: gradients inside its MLP, and, recomputed, what it saves."""
    inner = shape.counted.inner if shape.counted is not None else 4 * shape.hidden
    each = _width(setup) * (6 * inner + 2 * shape.hidden)
    rows = [
        MemoryRow("gradients in a layer", each * work.tokens, "t (6 f + 2 h): of the MLP's product, gate, up and result")
    ]
    if work.checkpointing == "none":
        return rows
    saved = _keep_one_layer(shape, setup, work)
    if setup.is_loop and setup.stage == 3 and _is_frozen(setup):
        copies = 2 * shape.hidden * shape.layers * work.tokens
        note = "2 h L t, seen in the backward of FSDP with frozen weights; its cause is not known"
        rows.append(MemoryRow("second copy of layer inputs", copies, note))
    else:
        saved += _width(setup) * _keep_ends(shape)
    rows.append(MemoryRow("recomputed layer", saved * work.tokens, "what autograd saves of one layer"))
    return rows


def _list_liger(shape: ModelShape, setup: EngineSetup, work: Workload) -> list[MemoryRow]:
    if work.loss != "liger":
        return []
    chunks = -(-shape.vocabulary // shape.hidden)
    chunk = 1 << (-(-work.tokens // chunks) - 1).bit_length()
    rows = [MemoryRow("chunk of logits", 6 * min(chunk, work.tokens) * shape.vocabulary, "6 v pow2(t h / v)")]
    if not _is_frozen(setup):
        size = 2 * shape.vocabulary * shape.hidden
        rows.append(MemoryRow("gradient of the head", size, "2 v h, made in the forward"))
    return rows


# --- ZeRO and FSDP ---------------------------------------------------------------------------------------------------------


def list_lasting_buffers(setup: EngineSetup, work: Workload) -> list[MemoryRow]:
    if setup.is_loop:
        if setup.stage or setup.ranks == 1:
            return []
        size = setup.bytes_each * setup.trainable
        return [MemoryRow("DDP buckets", size, "a copy of all gradients (torch/csrc/distributed/c10d/reducer.cpp)")]
    if setup.stage == 3:
        rows = [MemoryRow(_BUCKET_ROW, setup.bytes_each * work.bucket, "bytes of a parameter x reduce_bucket_size")]
        if not _is_offloaded(setup):
            partition = _share(setup, setup.bytes_each * setup.trainable)
            rows.append(MemoryRow("gradient partition", partition, "2 P / N, kept from the start"))
        return rows
    if setup.stage in (1, 2) and _is_offloaded(setup):
        size = setup.bytes_each * min(setup.largest_layer or 0, setup.trainable)
        return [MemoryRow("gradients on their way to the CPU", size, "the largest tensor")]
    return []


def list_gathered(shape: ModelShape, setup: EngineSetup) -> list[MemoryRow]:
    if setup.stage < 3 or setup.ranks == 1:
        if setup.stage == 3 and setup.offload_parameters != "none":
            return [MemoryRow("gathered parameters", setup.bytes_each * setup.parameters, "all of them on one GPU")]
        return []
    if not setup.is_loop:
        size = setup.bytes_each * min(setup.parameters, _LIVE_PARAMETERS)
        return [MemoryRow("gathered parameters", size, "min(P, stage3_max_live_parameters)")]
    if shape.counted is None:
        return []
    root, layer = shape.counted.embeddings, shape.counted.layer
    frozen = setup.frozen_bytes or 0
    # The frozen share is gathered as it is stored.
    each = 2 * max(0, frozen - 2 * root) / (shape.layers * layer) if frozen else 8
    return [
        MemoryRow("gathered root unit", 2 * root, "embedding and head, 2 bytes each"),
        MemoryRow("gathered layers", each * layer, "two layers" if _is_frozen(setup) else "two layers and their gradients"),
    ]


def list_held_gradients(setup: EngineSetup, work: Workload) -> list[MemoryRow]:
    """Return the gradients that earlier micro-batches have left."""
    if work.accumulation == 1 or work.update_in_backward:
        return []
    rows = list_gradients(setup, work)
    if setup.stage == 1 and not setup.is_loop:  # whole until the last micro-batch
        rows = [MemoryRow("gradients", setup.bytes_each * setup.trainable, f"{setup.bytes_each} bytes of each parameter")]
        if not _is_offloaded(setup):
            rows.append(MemoryRow(_BUCKET_ROW, setup.bytes_each * work.bucket, "kept between micro-batches"))
    return rows


def list_buckets(setup: EngineSetup, work: Workload) -> list[int]:
    """Return the bytes of each bucket that stages 1 and 2 have in a backward: with ``overlap_comm`` two, filled in turn."""
    if setup.is_loop or setup.stage not in (1, 2):
        return []
    return [setup.bytes_each * work.bucket] * (2 if work.overlap_comm else 1)


def list_reductions(
    setup: EngineSetup, work: Workload, static: Sequence[MemoryRow], kept: Sequence[MemoryRow]
) -> list[PeakMoment]:
    """Return the moments at which stages 1 and 2 reduce the first gradients, and the last; none elsewhere.

    ``static``: what lives all the time; ``kept``: what earlier micro-batches and the forward left. A gradient larger than
    the bucket is reduced by itself: cut by ranks into a copy, and if it is offloaded, its norm is one of fp64.
    """
    buckets = list_buckets(setup, work)
    if not buckets:
        return []
    rows = [MemoryRow(_BUCKET_ROW, sum(buckets), f"{len(buckets)} x bytes of a parameter x reduce_bucket_size")]
    largest = min(setup.largest_layer or 0, setup.trainable)
    if largest:
        rows.append(MemoryRow("largest gradient", setup.bytes_each * largest, "before it is in the bucket"))
    if largest > work.bucket and _is_offloaded(setup):
        rows.append(MemoryRow("norm of the largest gradient", 8 * largest, "in fp64"))
    elif largest > work.bucket and setup.ranks > 1:
        rows.append(MemoryRow("copy of the largest gradient", setup.bytes_each * largest, "its parts for the ranks"))
    others = [row for row in kept if row.name != _BUCKET_ROW]
    last = (*static, *list_gradients(setup, work), *rows)
    return [PeakMoment(REDUCTION, (*static, *others, *rows)), PeakMoment(LAST_REDUCTION, last)]


def list_gradients(setup: EngineSetup, work: Workload) -> list[MemoryRow]:
    if work.update_in_backward or _is_offloaded(setup) or (setup.stage == 3 and not setup.is_loop):
        return []
    size = _share(setup, setup.bytes_each * setup.trainable, 2)
    return [MemoryRow("gradients", size, f"{setup.bytes_each} bytes of each trained parameter{_divide(setup, 2)}")]


def _divide(setup: EngineSetup, stage: int) -> str:
    return " / N" if setup.stage >= stage and setup.ranks > 1 else ""


def count_updated(setup: EngineSetup) -> float:
    """Return the parameters that a rank updates at once on its GPU."""
    if _is_offloaded(setup):
        return 0.0
    count = _share(setup, setup.trainable)
    return min(count, _SUB_GROUP) if setup.stage == 3 and not setup.is_loop else count


def list_update(setup: EngineSetup, work: Workload) -> Iterable[MemoryRow]:
    """Return what the optimizer holds while it updates."""
    if _is_offloaded(setup) or work.update_in_backward:
        return
    count = count_updated(setup)
    each = setup.bytes_each if setup.is_loop else setup.master_each
    is_partitioned = setup.stage in (1, 2) and not setup.is_loop
    if setup.is_loop or setup.stage == 0:
        yield from list_gradients(setup, work)
    if is_partitioned and not work.foreach:  # this is more than what is left when the fused kernels run
        yield MemoryRow("gradients", setup.bytes_each * count, "of the partition: those of others are freed")
        yield MemoryRow("flattened gradients", setup.bytes_each * count, "of the partition, on their way to fp32")
    if not setup.is_loop:
        yield MemoryRow("gradients in fp32", each * count, "of the parameters that this rank updates")
    if not setup.is_loop and setup.stage == 3 and not work.foreach:
        yield MemoryRow("updated weights", setup.bytes_each * count, "the fused update, cast to 16 bits")
    if work.foreach:
        yield MemoryRow("optimizer temporaries", each * count, "foreach Adam: square roots of the second moments")
