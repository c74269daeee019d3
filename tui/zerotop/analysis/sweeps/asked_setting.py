"""Another setting of a recorded training: the changes that were asked for, checked, and the answer of the formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerotop.analysis.failures.out_of_memory import PostMortem
from zerotop.analysis.memory.expected.beyond_allocated import JobMemory, Room
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup
from zerotop.analysis.sweeps.baseline import Baseline, NoBaselineError
from zerotop.analysis.sweeps.estimates import USABLE_HOST
from zerotop.analysis.sweeps.recorded_moments import LaterBatch
from zerotop.analysis.sweeps.regimes import PURE_DEEPSPEED, size_states
from zerotop.analysis.sweeps.settings import OFFLOAD, PARTIAL_OFFLOAD, STAGE, find_excess, find_obstacle
from zerotop.analysis.sweeps.what_if import change_setup, name_offload, predict_memory
from zerotop.analysis.sweeps.what_if_time import TimePrediction, predict_time

EVALUATION = "eval"
"""The outer phase of a failure in evaluation."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What is asked to differ from a recorded setting; None: as recorded. Named as the options of ``what-if``."""

    stage: int | None = None
    offload: str | None = None  # one of OFFLOAD_DEVICES
    offload_ratio: float | None = None  # of the optimizer's elements that are offloaded
    micro_batch: int | None = None
    seq_length: int | None = None
    accumulation: int | None = None
    gpus: int | None = None  # on a node
    nodes: int | None = None
    checkpointing: str | None = None  # on or off
    optimizer: str | None = None  # of OPTIMIZERS
    dtype: str | None = None  # of DTYPES


@dataclass(frozen=True, slots=True)
class Setting:
    """A training as the formulas know it, and where it runs."""

    setup: EngineSetup
    work: Workload
    gpus: int  # on a node
    nodes: int
    ranks_on_gpu: int = 1  # those that share a GPU

    @property
    def node_ranks(self) -> int:
        """The ranks of a node."""
        return max(1, self.setup.ranks // self.nodes)


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """A recorded setting and the asked one."""

    base: Baseline
    setting: Setting
    gpu_bytes: int | None
    limit_bytes: int | None  # what PyTorch may use of the recorded GPU, if less
    is_same_gpu: bool  # the recorded one
    recorded: JobMemory
    memory: JobMemory
    time: TimePrediction

    @property
    def fits(self) -> bool | None:
        """Whether a GPU holds the upper end of what is needed; None if that, or the size of the GPU, is not known."""
        if self.failure is not None and not self.failure.is_on_host:
            return False
        if self.room is None or (self.left_out is not None and self.room.spare > 0):
            return None
        return self.room.spare > 0

    @property
    def room(self) -> Room | None:
        """What it needs at most of what a GPU has; None if its size is not known."""
        memory = self.memory if self.later_batch is None or self.measured_more is None else self.recorded
        return memory.measure_room(self.gpu_bytes, self.limit_bytes, self.measured_most)

    @property
    def measured_most(self) -> int | None:
        """The most that the recording allocated outside of the forecast's steps, if the answer is for its own setting."""
        if (self.is_changed and self.measured_more is None) or self.failure is not None:
            return None
        return max(self.measured_more or 0, self.base.start_peak)

    @property
    def failure(self) -> PostMortem | None:
        """How the recording ran out of memory, if the answer is for its setting, or for larger micro-batches."""
        return self.base.failure if self.is_same_gpu and (not self.is_changed or self._exceeds_failed) else None

    @property
    def left_out(self) -> PostMortem | None:
        """The recorded lack of GPU memory, if neither the forecast nor the recording tells whether it recurs.

        A forecast is of training: it has no evaluation, and no micro-batches that are larger than those that were asked for.
        """
        failed = self.base.failure
        if failed is None or failed.is_on_host or self.failure is not None:
            return None
        if failed.outer_phase == EVALUATION:
            return failed
        work, base = self.setting.work, self.base
        if failed.rows and work.micro_batch >= failed.rows and work.sequence >= (failed.sequence or 0):
            return None
        room = self.recorded.measure_room(base.gpu_bytes, base.limit_bytes)
        return failed if room is None or room.spare > 0 else None

    @property
    def _exceeds_failed(self) -> bool:
        """Whether only the work differs, and a micro-batch is at least as large as the one that ran out of GPU memory."""
        failed, work, own = self.base.failure, self.setting.work, self.base.work
        if failed is None or failed.is_on_host or not failed.rows or self.setting.setup != self.base.setup:
            return False
        is_larger = work.micro_batch >= max(failed.rows, own.micro_batch) and work.sequence >= (failed.sequence or 0)
        return is_larger and replace(work, micro_batch=own.micro_batch, sequence=own.sequence) == own

    @property
    def is_changed(self) -> bool:
        """Whether the setting is not the recorded one."""
        asked, base = self.setting, self.base
        return (asked.setup, asked.work, asked.ranks_on_gpu) != (base.setup, base.work, base.ranks_on_gpu)

    @property
    def measured_more(self) -> int | None:
        """The most that a recorded step of the asked setting allocated, if the forecast says less."""
        if (later := self.later_batch) is not None:
            return later.peak if later.peak >= self.base.peak else None
        return None if self.is_changed or self.base.highest_peak is None else self.base.highest_peak.allocated_bytes

    @property
    def later_batch(self) -> LaterBatch | None:
        """The batch of later steps of the recording, if the answer is for that and nothing else differs."""
        return find_later_batch(self.base, self.setting)

    @property
    def full_steps(self) -> tuple[int, int] | None:
        """The steps near which memory that grows as recorded fills a GPU: by as much a step, and in proportion to the batch.

        None where the recording's memory does not grow to the end, the size of the GPU is not known, or nothing is spare.
        """
        room, leak = self.memory.measure_room(self.gpu_bytes, self.limit_bytes), self.base.leak
        if leak is None or room is None or room.spare <= 0:
            return None
        each = leak.bytes_each * (1 if room.is_limited else self.setting.ranks_on_gpu)
        # The forecast has what had grown up to its steps.
        since = max(leak.since_step, self.base.steps[1] if self.base.steps is not None else 0)
        steps = [since + int(room.spare / (each * ratio)) for ratio in (1.0, self.batch_ratio)]
        return steps[0], steps[1]

    @property
    def batch_ratio(self) -> float:
        """The tokens, or rows, of a micro-batch beside those that were recorded."""
        asked, recorded = (one.micro_batch * (one.sequence or 1) for one in (self.setting.work, self.base.work))
        return asked / recorded

    @property
    def host_needed(self) -> float | None:
        """The upper end of the memory that the ranks of a node need in all."""
        return self.memory.host.high * self.setting.node_ranks if self.base.host_rss is not None else None

    @property
    def fits_host(self) -> bool | None:
        """Whether a node like the recorded one holds that."""
        if self.failure is not None and self.failure.is_on_host:
            return False
        if self.host_needed is None or self.base.host_bytes is None:
            return None
        return self.host_needed < USABLE_HOST * self.base.host_bytes


def answer_changes(base: Baseline, changes: Changes, gpu_bytes: int | None = None) -> WhatIfAnswer:
    """Return the memory and time of a changed setting. Raises NoBaselineError.

    ``gpu_bytes``: of another GPU than the recorded one.
    """
    setting = choose_setting(base, changes)
    return WhatIfAnswer(
        base=base,
        setting=setting,
        gpu_bytes=gpu_bytes or base.gpu_bytes,
        limit_bytes=None if gpu_bytes else base.limit_bytes,
        is_same_gpu=gpu_bytes in (None, base.gpu_bytes),
        recorded=predict_memory(base, base.setup, base.work, base.ranks_on_gpu),
        memory=predict_memory(base, setting.setup, setting.work, setting.ranks_on_gpu),
        time=_predict_time(base, setting),
    )


def find_later_batch(base: Baseline, setting: Setting) -> LaterBatch | None:
    """Return the batch of later steps, if only the work of the setting differs, and is that of theirs."""
    asked, work, later = setting.work, base.work, base.later_batch
    if later is None or (setting.setup, setting.ranks_on_gpu) != (base.setup, base.ranks_on_gpu) or asked == work:
        return None
    own = replace(work, micro_batch=later.micro_batch, sequence=later.sequence, accumulation=later.accumulation)
    return later if asked == own else None


def _predict_time(base: Baseline, setting: Setting) -> TimePrediction:
    if find_later_batch(base, setting) is not None:
        return TimePrediction((), (0.0, 0.0, 0.0), "It was measured.")
    asked, recorded = ((one.setup, one.work, one.ranks_on_gpu) for one in (setting, base))
    if base.ranks_on_gpu > 1 and asked != recorded:
        reason = "Ranks share a GPU in the recording, so how long it computes for each is not known: record a few steps."
        return TimePrediction((), (0.0, 0.0, 0.0), reason)
    return predict_time(base, setting.setup, setting.work, setting.nodes)


def choose_setting(base: Baseline, changes: Changes) -> Setting:
    """Return the recorded setting with the changes. Raises NoBaselineError for what cannot be."""
    gpus, nodes = changes.gpus or base.gpus, changes.nodes or base.nodes
    names = ("gpus", "nodes", "micro_batch", "seq_length", "accumulation")
    if excess := find_excess({name: getattr(changes, name) for name in names}):
        raise NoBaselineError(excess)
    is_shared = base.ranks_on_gpu > 1 and (gpus, nodes) == (base.gpus, base.nodes)
    ranks = base.setup.ranks if is_shared else gpus * nodes
    if ranks != base.setup.ranks:
        if base.ranks_on_gpu == 1 and base.gpus * base.nodes != base.setup.ranks:
            raise NoBaselineError(
                f"{base.name} does not train one replica on each GPU, so another number of GPUs has no formula"
            )
        if base.setup.is_loop and base.setup.stage == 3 and 1 in (ranks, base.setup.ranks):
            raise NoBaselineError(
                "FSDP gathers nothing on one GPU: give two or more, or `zerotop estimate MODEL --framework none`"
            )
    setup = replace(base.setup, ranks=ranks)
    setup = _change_states(base, setup, changes.dtype, changes.optimizer)
    setup = _change_zero(base, setup, changes.stage, changes.offload)
    setup = _change_share(setup, changes.offload_ratio)
    return Setting(setup, _change_work(base, changes), gpus, nodes, base.ranks_on_gpu if is_shared else 1)


def _change_zero(base: Baseline, setup: EngineSetup, stage: int | None, offload: str | None) -> EngineSetup:
    if stage is None and offload is None:
        return setup
    if setup.is_loop:
        raise NoBaselineError(f"{base.name} trains without DeepSpeed, whose settings --stage and --offload are")
    mode = offload or name_offload(setup)
    chosen = setup.stage if stage is None else stage
    obstacle = find_obstacle({STAGE: chosen, OFFLOAD: mode}, {}) if mode else "Give --offload: its devices have no name"
    if obstacle:
        raise NoBaselineError(obstacle.rstrip("."))
    return change_setup(setup, chosen, mode)


def _change_share(setup: EngineSetup, ratio: float | None) -> EngineSetup:
    if ratio is None:
        return setup
    if setup.is_loop or setup.stage != 3 or setup.offload_optimizer != "cpu":
        raise NoBaselineError(f"{PARTIAL_OFFLOAD}: give --stage 3 --offload optimizer, or leave --offload-ratio")
    return replace(setup, offloaded_share=ratio)


def _change_states(base: Baseline, setup: EngineSetup, dtype: str | None, optimizer: str | None) -> EngineSetup:
    if dtype is None and optimizer is None:
        return setup
    if setup.is_loop or setup.trainable < setup.parameters:
        raise NoBaselineError(
            f"{base.name} trains without DeepSpeed, or only a part of its parameters: its states are measured, and another"
            " dtype or optimizer has no formula. `zerotop estimate MODEL` takes them"
        )
    if dtype == "pure":
        raise NoBaselineError(PURE_DEEPSPEED)
    recorded = "fp32" if setup.bytes_each == 4 else "mixed"
    weight, state, master = size_states(dtype or recorded, optimizer or "adamw")
    if optimizer is None and setup.state_each is not None:  # of the recorded optimizer, in another dtype
        state = setup.state_each * state // size_states(recorded, "adamw")[1]
    computes_wide = (dtype or recorded) == "fp32"
    return replace(setup, bytes_each=weight, state_each=state, master_each=master, computes_wide=computes_wide)


def _change_work(base: Baseline, changes: Changes) -> Workload:
    work, length = base.work, changes.seq_length
    if length and not work.sequence:
        raise NoBaselineError(
            f"{base.name} counts rows, not tokens, so another length has no formula: --micro-batch has one"
        )
    rows, accumulation = changes.micro_batch or work.micro_batch, changes.accumulation or work.accumulation
    kept = {"on": "full", "off": "none", None: work.checkpointing}[changes.checkpointing]
    return replace(work, micro_batch=rows, sequence=length or work.sequence, accumulation=accumulation, checkpointing=kept)
