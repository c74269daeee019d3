"""What ZeRO's formulas say each row of a ledger should be, and how far what was measured is from that.

From "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054), section 3.1 for what mixed
precision with Adam needs and section 5 for who keeps which part. With P parameters, w bytes each (2 in fp16 and bf16, 4 in
fp32) and N data-parallel ranks, bytes on each rank's GPU:

=====  ==========  =========  ==============  ===============
stage  parameters  gradients  master weights  optimizer state
=====  ==========  =========  ==============  ===============
0      w P         w P        4 P             8 P
1      w P         w P        4 P / N         8 P / N
2      w P         w P / N    4 P / N         8 P / N
3      w P / N     w P / N    4 P / N         8 P / N
=====  ==========  =========  ==============  ===============

which is the paper's 2 P + 2 P + K P with K = 12. Gradients, master weights and state are those of the parameters that train;
other optimizers than Adam keep other states. Training in fp32 needs no master weights in stage 0; DeepSpeed's stages 1 to 3
keep their own copy of the partition all the same (``single_partition_of_fp32_groups``, ``fp32_partitioned_groups_flat``).

Offload (https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training, and the estimates in
:mod:`zerotop.analysis.memory.deepspeed_estimates`): with ``offload_optimizer`` master weights and state lie in host
memory, and gradients as 4 P / N bytes of fp32 beside them; on the GPU these live only in buckets. With ``offload_param``
parameters lie there too, as w P / N. On NVMe they are in no memory but for buffers. What stage 3 keeps whole on each rank
(``stage3_param_persistence_threshold``), buckets and activations are in no formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerotop.analysis.memory.deepspeed_estimates import Estimate, RuleOfThumb, estimate_zero2, estimate_zero3
from zerotop.analysis.memory.host_ledger import HostLedger
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.memory.phase_peaks import RankPeaks
from zerotop.analysis.memory.tensor_inventory import (
    AFTER_UPDATE,
    CATEGORIES,
    GRADIENTS,
    MASTER_WEIGHTS,
    MOMENT_TEXTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    Inventory,
)
from zerotop.session.reader import Event

# Bytes of state for each parameter, by what an inner optimizer's class is called; the first that fits.
_STATE_BYTES = (("8bit", 2), ("adam", 8), ("lamb", 8), ("lion", 4), ("adagrad", 4), ("muon", None), ("sgd", None))

# The phases of an update.
_UPDATE = ("step", "optimizer", "cpu_optimizer", "grads_to_cpu", "params_to_gpu", "allgather")

_FREED = "Gradients live from the backward to the update."


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What the formulas need to know of an engine."""

    stage: int
    offload_optimizer: str  # "none", "cpu", "nvme"
    offload_parameters: str
    offloaded_share: float  # of the optimizer, 1 unless the configuration says less
    bytes_each: int  # of a parameter
    ranks: int  # data-parallel
    parameters: int
    trainable: int
    state_each: int | None  # bytes of optimizer state for a parameter; None where that is not known
    trains: bool
    on_gpu: bool  # False where DeepSpeed's accelerator is the CPU: all memory is the host's
    largest_layer: int | None  # parameters of the largest layer; None where not recorded


@dataclass(frozen=True, slots=True)
class ExpectedBytes:
    """Bytes of one rank by category; a category that is missing is not known."""

    gpu: dict[str, int]
    host: dict[str, int]
    nvme: dict[str, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """One row, expected and measured."""

    key: str  # a category
    expected_bytes: int | None  # None where no formula says it
    measured_bytes: int
    note: str = ""

    @property
    def difference_bytes(self) -> int | None:
        """Measured less expected."""
        return None if self.expected_bytes is None else self.measured_bytes - self.expected_bytes


def parse_setup(engine: Mapping[str, Any]) -> EngineSetup | None:
    """From the facts of an ``engine`` event; None where they lack what the formulas need."""
    stage, parameters = engine.get("zero_stage"), engine.get("parameters")
    if not isinstance(stage, int) or not isinstance(parameters, int):
        return None
    trainable, ranks = engine.get("trainable_parameters"), engine.get("data_parallel") or engine.get("world_size")
    layer = engine.get("largest_layer_parameters")
    return EngineSetup(
        stage=stage,
        offload_optimizer=str(engine.get("offload_optimizer") or "none"),
        offload_parameters=str(engine.get("offload_parameters") or "none"),
        offloaded_share=_read_offloaded_share(engine),
        bytes_each=4 if engine.get("dtype") == "fp32" else 2,
        ranks=max(1, ranks if isinstance(ranks, int) else 1),
        parameters=parameters,
        trainable=trainable if isinstance(trainable, int) else parameters,
        state_each=_find_state_bytes(str(engine.get("inner_optimizer") or "")),
        trains=bool(engine.get("optimizer")),
        on_gpu=not str(engine.get("device") or "cuda").startswith("cpu"),
        largest_layer=layer if isinstance(layer, int) else None,
    )


def parse_setups(engines: Iterable[Event]) -> list[EngineSetup]:
    """Of the engines of one process, those that train first."""
    found = [known for event in engines if (known := parse_setup(event.facts)) is not None]
    return sorted(found, key=lambda known: not known.trains)


def _read_offloaded_share(engine: Mapping[str, Any]) -> float:
    try:
        share = engine["config"]["zero_optimization"]["offload_optimizer"]["ratio"]
    except (KeyError, TypeError):
        return 1.0
    return float(share) if isinstance(share, (int, float)) and 0 <= share <= 1 else 1.0


def _find_state_bytes(optimizer: str) -> int | None:
    return next((size for name, size in _STATE_BYTES if name in optimizer.lower()), None)


def compute_expected(setup: EngineSetup) -> ExpectedBytes:
    """What the formulas say one rank holds, and where."""
    found = ExpectedBytes({}, {}, {})
    weights = setup.bytes_each * setup.parameters
    _put_category(
        found, PARAMETERS, _compute_share(weights, setup, 3), setup.offload_parameters if setup.stage == 3 else "none", 1.0
    )
    if setup.trains:
        _put_gradients(found, setup)
        where, share = setup.offload_optimizer if setup.stage else "none", setup.offloaded_share
        keeps_master = setup.bytes_each < 4 or setup.stage > 0
        _put_category(
            found, MASTER_WEIGHTS, _compute_share(4 * setup.trainable, setup, 1) if keeps_master else 0, where, share
        )
        if setup.state_each is not None:
            _put_category(found, OPTIMIZER_STATE, _compute_share(setup.state_each * setup.trainable, setup, 1), where, share)
    if setup.on_gpu:
        return found
    host = {name: found.gpu.get(name, 0) + found.host.get(name, 0) for name in found.gpu | found.host}
    return ExpectedBytes({}, host, found.nvme)


def sum_expected(setups: Iterable[EngineSetup]) -> ExpectedBytes | None:
    """The same of all engines of one process together; None where there are none. What is not known of one is not known."""
    each = [compute_expected(setup) for setup in setups]
    if not each:
        return None
    gpu, host, nvme = ([getattr(one, name) for one in each] for name in ("gpu", "host", "nvme"))
    return ExpectedBytes(_sum_categories(gpu), _sum_categories(host), _sum_categories(nvme))


def _sum_categories(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    trained = [part for part in parts if len(part) > 1] or parts
    names = set.intersection(*map(set, trained))
    return {name: sum(part.get(name, 0) for part in parts) for name in CATEGORIES if name in names}


def _put_gradients(found: ExpectedBytes, setup: EngineSetup) -> None:
    if setup.stage and setup.offload_optimizer != "none":
        _put_category(found, GRADIENTS, _compute_share(4 * setup.trainable, setup, 1), setup.offload_optimizer, 1.0)
    else:
        _put_category(found, GRADIENTS, _compute_share(setup.bytes_each * setup.trainable, setup, 2), "none", 1.0)


def _compute_share(size: int, setup: EngineSetup, from_stage: int) -> int:
    """What of something one rank keeps that is partitioned from a stage on."""
    return -(-size // setup.ranks) if setup.stage >= from_stage else size


def _put_category(found: ExpectedBytes, category: str, size: int, where: str, share: float) -> None:
    away = round(size * share) if where != "none" else 0
    found.gpu[category] = size - away
    found.host[category] = away if where == "cpu" else 0
    found.nvme[category] = away if where == "nvme" else 0


def compare_ledger(ledger: GpuLedger | HostLedger, expected: ExpectedBytes) -> tuple[Difference, ...]:
    """Each category of a ledger beside what is expected; what several ranks on one GPU hold is expected of each of them."""
    ranks = len(ledger.ranks) if isinstance(ledger, GpuLedger) else 1
    sizes = expected.gpu if isinstance(ledger, GpuLedger) else expected.host
    counted = {row.key: row for row in ledger.rows if row.key in CATEGORIES}
    found = []
    for name in CATEGORIES:
        if name in counted:
            size, row = sizes.get(name), counted[name]
            total = None if size is None else size * ranks
            freed = name == GRADIENTS and 2 * row.bytes < (total or 0) and MOMENT_TEXTS[AFTER_UPDATE] in row.basis
            found.append(Difference(name, total, row.bytes, _FREED if freed else ""))
    return tuple(found)


def estimate_job(setup: EngineSetup, *, nodes: int = 1) -> tuple[Estimate, ...]:
    """DeepSpeed's estimates for a job like this in all their option rows; those of stage 3 need the largest layer's size.

    ``nodes`` are those that were seen: none where nobody sampled.
    """
    nodes = max(1, nodes)
    gpus = max(1, setup.ranks // nodes)
    found = estimate_zero2(setup.parameters, gpus=gpus, nodes=nodes)
    if setup.largest_layer is not None:
        found += estimate_zero3(setup.parameters, setup.largest_layer, gpus=gpus, nodes=nodes)
    return found


def is_for_setup(estimate: Estimate, setup: EngineSetup) -> bool:
    """Whether an estimate is for what the job does; whether its model was made under zero.Init is not known."""
    options = (estimate.stage, estimate.offload_optimizer, estimate.offload_parameters)
    return options == (setup.stage, setup.offload_optimizer != "none", setup.offload_parameters != "none")


def compute_rule_of_thumb(inventory: Inventory, peaks: RankPeaks) -> RuleOfThumb:
    """The rule with what was measured of one rank: an inventory after an update, and its peaks by phase."""
    kept = inventory.device.get(PARAMETERS, 0)
    optimizer = inventory.device.get(MASTER_WEIGHTS, 0) + inventory.device.get(OPTIMIZER_STATE, 0)
    highest = {peak.phase: peak.allocated_bytes for peak in peaks.phases}
    in_update = max(highest.get(phase, 0) for phase in _UPDATE)
    return RuleOfThumb(
        parameters=kept,
        optimizer=optimizer,
        gradients=inventory.gradients_alive,
        intermediates=max(0, in_update - kept - optimizer - inventory.gradients_alive),
        activations=max(0, highest.get("forward", 0) - kept - optimizer),
    )
