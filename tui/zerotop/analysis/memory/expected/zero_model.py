"""Expected bytes of each row of a ledger by ZeRO's formulas, and their difference from the measured ones.

A loop without DeepSpeed is stage 0 without master weights, FSDP is stage 3; its state follows from its optimizers
(:mod:`zerotop.analysis.memory.expected.optimizer_states`), its frozen parameters have a dtype of their own. Quantized
parameters have no formula.

From "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054), section 3.1 for the needs of
mixed precision with Adam and section 5 for the partition. With P parameters, w bytes each (2 in fp16 and bf16, 4 in
fp32) and N data-parallel ranks, bytes on each rank's GPU:

=====  ==========  =========  ==============  ===============
stage  parameters  gradients  master weights  optimizer state
=====  ==========  =========  ==============  ===============
0      w P         w P        4 P             8 P
1      w P         w P        4 P / N         8 P / N
2      w P         w P / N    4 P / N         8 P / N
3      w P / N     w P / N    4 P / N         8 P / N
=====  ==========  =========  ==============  ===============

the paper's 2 P + 2 P + K P with K = 12. Gradients, master weights and state are those of trainable parameters; other
optimizers than Adam keep other states. Training in fp32 needs no master weights in stage 0; DeepSpeed's stages 1 to 3
keep their own copy of the partition nevertheless (``single_partition_of_fp32_groups``, ``fp32_partitioned_groups_flat``).

Offload (https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training, and the estimates in
:mod:`zerotop.analysis.memory.expected.deepspeed_estimates`): with ``offload_optimizer`` master weights and state are in host
memory, and gradients as 4 P / N bytes of fp32 with them; on the GPU gradients live only in buckets. With ``offload_param``
parameters are in host memory too, as w P / N. On NVMe they use no memory but buffers. The formulas include neither the
parameters that stage 3 keeps whole (``stage3_param_persistence_threshold``) nor buckets nor activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerotop.analysis.engine import LOOP, keep_latest
from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate, RuleOfThumb, estimate_zero2, estimate_zero3
from zerotop.analysis.memory.expected.optimizer_states import DTYPE_BYTES, StateBytes, compute_state_bytes
from zerotop.analysis.memory.host_ledger import HostLedger
from zerotop.analysis.memory.ledger_rows import GpuLedger, LedgerRow
from zerotop.analysis.memory.phase_peaks import RankPeaks
from zerotop.analysis.memory.tensor_inventory import (
    CATEGORIES,
    FROZEN_PARAMETERS,
    GRADIENTS,
    MASTER_WEIGHTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    TensorInventory,
    is_after_update,
)
from zerotop_probe.recording.events import Engine, EngineFacts

# Bytes of state for each parameter by a part of the inner optimizer's class name; the first match counts.
_STATE_BYTES = (("8bit", 2), ("adam", 8), ("lamb", 8), ("lion", 4), ("adagrad", 4), ("muon", None), ("sgd", None))

_LOOP_STAGES = {"": 0, "DDP": 0, "DataParallel": 0, "FSDP": 3, "FSDP2": 3}

# The phases of an update.
UPDATE_PHASES = ("step", "optimizer", "cpu_optimizer", "grads_to_cpu", "params_to_gpu", "allgather")

_FREED = "Gradients live from the backward to the update."


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model, and the bytes of its states."""

    parameters: int
    trainable: int
    largest_layer: int | None  # parameters of the largest layer; None where not recorded
    bytes_each: int = 2  # of a parameter
    state_each: int | None = 8  # bytes of optimizer state for a parameter, by default Adam's; None where not known
    frozen_bytes: int | None = None  # of frozen parameters with a dtype of their own, on all ranks together, not quantized
    master_each: int = 4  # bytes of a master weight
    is_loop: bool = False  # without DeepSpeed
    is_sharded: bool = False  # a loop's, by FSDP
    computes_wide: bool = False  # activations are in fp32
    wide_residual: bool = False  # the inputs of layers alone are in fp32
    offloaded_share: float = 1.0  # of the optimizer where it is offloaded, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup(TrainedModel):
    """The properties of an engine that the formulas need."""

    stage: int
    offload_optimizer: str  # "none", "cpu", "nvme"
    offload_parameters: str
    ranks: int  # data-parallel
    trains: bool
    on_gpu: bool  # False where DeepSpeed's accelerator is the CPU, which uses host memory only
    loop_state: StateBytes | None = None  # of a loop's optimizers; None where not known


@dataclass(frozen=True, slots=True)
class ExpectedBytes:
    """Bytes of one rank by category; unknown categories are missing."""

    gpu: dict[str, int]
    host: dict[str, int]
    nvme: dict[str, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """One row, expected and measured."""

    key: str  # a category
    expected_bytes: int | None  # None without a formula
    measured_bytes: int
    note: str = ""
    is_outdated: bool = False  # memory has changed since it was measured

    @property
    def difference_bytes(self) -> int | None:
        """Measured less expected; None if that says nothing of this moment."""
        return None if self.expected_bytes is None or self.is_outdated else self.measured_bytes - self.expected_bytes


def parse_setup(engine: EngineFacts) -> EngineSetup | None:
    """Return the setup of an engine or loop from the facts of its event; None where stage or parameters are missing."""
    is_loop = engine.kind == LOOP
    stage = _LOOP_STAGES.get(engine.parallelism or "") if is_loop else engine.zero_stage
    parameters = engine.parameters
    if stage is None or parameters is None:
        return None
    sharers = engine.sharding.ranks if engine.sharding is not None else None
    trainable, bytes_each = engine.trainable_parameters, DTYPE_BYTES.get(str(engine.dtype), 2)
    optimizers = engine.optimizers or ()
    return EngineSetup(
        stage=stage,
        offload_optimizer=str(engine.offload_optimizer or "none"),
        offload_parameters=str(engine.offload_parameters or "none"),
        offloaded_share=_read_offloaded_share(engine),
        bytes_each=bytes_each,
        ranks=max(1, sharers or engine.data_parallel or engine.world_size or 1),
        parameters=parameters,
        trainable=trainable if trainable is not None else parameters,
        state_each=None if is_loop else _find_state_bytes(engine.inner_optimizer or ""),
        trains=bool(engine.optimizer),
        on_gpu=not str(engine.device or "cuda").startswith("cpu"),
        largest_layer=engine.largest_layer_parameters,
        is_loop=is_loop,
        is_sharded=is_loop and stage == 3,
        loop_state=compute_state_bytes(optimizers, bytes_each, is_sharded=stage == 3) if is_loop else None,
        frozen_bytes=_compute_frozen(engine) if is_loop else None,
    )


def _compute_frozen(engine: EngineFacts) -> int | None:
    """Return the bytes of a loop's frozen parameters that are not quantized, on all ranks together."""
    parameters, trainable, quantized = engine.parameters, engine.trainable_parameters, engine.quantized_parameters
    if engine.frozen_dtype is None or parameters is None or trainable is None or quantized is None:
        return None
    return (parameters - trainable - quantized) * DTYPE_BYTES.get(str(engine.frozen_dtype), 2)


def parse_setups(engines: Iterable[Engine]) -> list[EngineSetup]:
    """Return the setups of one process's engines, those that train first."""
    setups = [setup for event in keep_latest(engines) if (setup := parse_setup(event)) is not None]
    return sorted(setups, key=lambda setup: not setup.trains)


def _read_offloaded_share(engine: EngineFacts) -> float:
    try:
        share = (engine.config or {})["zero_optimization"]["offload_optimizer"]["ratio"]
    except (KeyError, TypeError):
        return 1.0
    return float(share) if isinstance(share, (int, float)) and 0 <= share <= 1 else 1.0


def _find_state_bytes(optimizer: str) -> int | None:
    return next((size for name, size in _STATE_BYTES if name in optimizer.lower()), None)


def _multiply_known(size: int | None, count: int) -> int | None:
    return None if size is None else size * count


def compute_expected(setup: EngineSetup) -> ExpectedBytes:
    """Return the expected bytes of one rank on its GPU, in host memory and on NVMe."""
    expected = ExpectedBytes({}, {}, {})
    kept = setup.trainable if setup.is_loop or setup.frozen_bytes is not None else setup.parameters
    weights = _compute_share(setup.bytes_each * kept, setup, 3)
    device = setup.offload_parameters if setup.stage == 3 else "none"
    _put_category(expected, PARAMETERS, weights, device, 1.0)
    if setup.frozen_bytes is not None:
        _put_category(expected, FROZEN_PARAMETERS, _compute_share(setup.frozen_bytes, setup, 3), device, 1.0)
    if setup.trains:
        device, share = setup.offload_optimizer if setup.stage else "none", setup.offloaded_share
        if device != "none":
            _put_category(expected, GRADIENTS, _compute_share(4 * setup.trainable, setup, 1), device, 1.0)
        else:
            _put_category(expected, GRADIENTS, _compute_share(setup.bytes_each * setup.trainable, setup, 2), "none", 1.0)
        if not setup.is_loop:
            has_master = setup.bytes_each < 4 or setup.stage > 0
            master = _compute_share(setup.master_each * setup.trainable, setup, 1) if has_master else 0
            _put_category(expected, MASTER_WEIGHTS, master, device, share)
        loop = setup.loop_state
        state = loop.moments if loop is not None else _multiply_known(setup.state_each, setup.trainable)
        if state is not None:
            _put_category(expected, OPTIMIZER_STATE, _compute_share(state, setup, 1), device, share)
        if loop is not None:
            expected.gpu[OPTIMIZER_STATE] += loop.scalars
            expected.host[OPTIMIZER_STATE] += loop.host_scalars
    if setup.on_gpu:
        return expected
    host = {name: expected.gpu.get(name, 0) + expected.host.get(name, 0) for name in expected.gpu | expected.host}
    return ExpectedBytes({}, host, expected.nvme)


def sum_expected(setups: Iterable[EngineSetup]) -> ExpectedBytes | None:
    """Return the sum over all engines of one process; None without engines. A category that one engine lacks is unknown."""
    parts = [compute_expected(setup) for setup in setups]
    if not parts:
        return None
    gpu, host, nvme = ([getattr(part, name) for part in parts] for name in ("gpu", "host", "nvme"))
    return ExpectedBytes(_sum_categories(gpu), _sum_categories(host), _sum_categories(nvme))


def _sum_categories(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    trained = [part for part in parts if len(part) > 1] or parts
    names = set.intersection(*map(set, trained))
    return {name: sum(part.get(name, 0) for part in parts) for name in CATEGORIES if name in names}


def _compute_share(size: int, setup: EngineSetup, from_stage: int) -> int:
    """Return one rank's share of ``size`` bytes that are partitioned from a stage on."""
    return -(-size // setup.ranks) if setup.stage >= from_stage else size


def _put_category(expected: ExpectedBytes, category: str, size: int, device: str, share: float) -> None:
    """Add a category of which a share is offloaded to a device, or to none."""
    offloaded = round(size * share) if device != "none" else 0
    expected.gpu[category] = size - offloaded
    expected.host[category] = offloaded if device == "cpu" else 0
    expected.nvme[category] = offloaded if device == "nvme" else 0


def compare_ledger(ledger: GpuLedger | HostLedger, expected: ExpectedBytes) -> tuple[Difference, ...]:
    """Return the difference of each category of a ledger; a GPU of several ranks is expected to hold all their shares."""
    ranks = len(ledger.ranks) if isinstance(ledger, GpuLedger) else 1
    sizes = expected.gpu if isinstance(ledger, GpuLedger) else expected.host
    differences = []
    for row in ledger.rows:
        if row.key not in CATEGORIES:
            continue
        total = sizes[row.key] * ranks if row.key in sizes else None
        is_freed = row.key == GRADIENTS and 2 * row.bytes < (total or 0) and is_after_update(row.basis)
        is_outdated = isinstance(row, LedgerRow) and row.is_outdated
        differences.append(Difference(row.key, total, row.bytes, _FREED if is_freed else "", is_outdated))
    return tuple(differences)


def estimate_job(setup: EngineSetup, *, nodes: int = 1) -> tuple[Estimate, ...]:
    """Return DeepSpeed's estimates for all options, none for a loop. Stage 3 needs the size of the largest layer.

    ``nodes``: how many were sampled, possibly none.
    """
    if setup.is_loop:
        return ()
    nodes = max(1, nodes)
    gpus = max(1, setup.ranks // nodes)
    estimates = estimate_zero2(setup.parameters, gpus=gpus, nodes=nodes)
    if setup.largest_layer is not None:
        estimates += estimate_zero3(setup.parameters, setup.largest_layer, gpus=gpus, nodes=nodes)
    return estimates


def is_for_setup(estimate: Estimate, setup: EngineSetup) -> bool:
    """Return whether an estimate is for the job's options; its use of zero.Init is not known."""
    options = (estimate.stage, estimate.offload_optimizer, estimate.offload_parameters)
    return options == (setup.stage, setup.offload_optimizer != "none", setup.offload_parameters != "none")


_MUCH_KEPT = 0.25  # of a peak, in tensors that outlive their step


def compute_rule_of_thumb(inventory: TensorInventory, peaks: RankPeaks) -> RuleOfThumb | None:
    """Return the rule with one rank's measured figures: an inventory after an update, and its peaks by phase.

    None where much outlives the steps, which the rule would call activations.
    """
    parameters = inventory.device.get(PARAMETERS, 0)
    optimizer = inventory.device.get(MASTER_WEIGHTS, 0) + inventory.device.get(OPTIMIZER_STATE, 0)
    highest = {peak.phase: peak.allocated_bytes for peak in peaks.phases}
    in_update = max(highest.get(phase, 0) for phase in UPDATE_PHASES)
    grown = inventory.growth.bytes if inventory.growth is not None else 0
    if inventory.held_bytes + grown > _MUCH_KEPT * max(highest.values(), default=0):
        return None
    return RuleOfThumb(
        parameters=parameters,
        optimizer=optimizer,
        gradients=inventory.gradients_alive,
        intermediates=max(0, in_update - parameters - optimizer - inventory.gradients_alive),
        activations=max(0, highest.get("forward", 0) - parameters - optimizer),
    )


def is_foreach(engine: EngineFacts) -> bool:
    """Return whether PyTorch's Adam updates all tensors at once by foreach functions, its default on a GPU.

    Other optimizers need other temporaries, which no formula here knows.
    """
    inner = str(engine.inner_optimizer or "").lower()
    # Of its config DeepSpeed makes DeepSpeedCPUAdam on the CPU, and FusedAdam on the GPU (``_configure_basic_optimizer``).
    is_made = inner == "deepspeedcpuadam" and "optimizer" in (engine.config or {})
    settings = [one.settings or {} for one in engine.optimizers or ()]
    is_other = any(one.get("fused") is True or one.get("foreach") is False for one in settings)
    packages = {one.package for one in engine.optimizers or () if one.package}
    is_adam = (not inner or "adam" in inner) and (not packages or "torch" in packages)
    return is_adam and "fused" not in inner and not is_made and not is_other
