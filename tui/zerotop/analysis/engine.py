"""The engine that trains in a job, DeepSpeed's or a loop without one: its facts, and how sentences describe it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.formatting import format_count, format_parameters
from zerotop.recording.moments.at import At
from zerotop.recording.moments.rank_records import add_library
from zerotop_probe.recording import events
from zerotop_probe.recording.events import EngineFacts, PipelineStage

# How many consecutive steps tell which batch is the usual one: as many as the pace of a running job is of.
_BATCH_STEPS = 10
_BATCH_DTYPE = np.dtype([("step", "<i8"), ("rows", "<i8"), ("micro_steps", "<i4")])
DEVICE_NAMES = {"cpu": "CPU", "nvme": "NVMe"}
LOOP = "loop"  # a kind


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSummary:
    """A DeepSpeed engine, or a loop without one. None and "": not recorded, or nothing trains yet."""

    kind: str = ""  # LOOP, or "" for a DeepSpeed engine and while nothing trains
    parallelism: str = ""  # of a loop: "DDP", "DataParallel", "FSDP", "FSDP2" or ""
    library: str = ""  # "Trainer"; of a loop also "Lightning" or "Accelerate"; "" if it is hand-written
    model: str = ""  # the model's class, or the name in its config
    parameters: int | None = None
    trainable_parameters: int | None = None
    zero_stage: int | None = None  # None without a DeepSpeed engine
    offload_optimizer: str = "none"  # "none", "cpu" or "nvme"
    offload_parameters: str = "none"
    dtype: str = ""  # "fp32", "fp16" or "bf16"; of a loop, of the parameters that it trains
    frozen_dtype: str = ""  # of a loop's frozen parameters; "" without
    autocast: str = ""  # the dtype of autocast; "" without
    inner_optimizer: str = ""  # its class; of a loop with several, joined by " + "
    micro_batch: int | None = None
    gradient_accumulation: int | None = None
    batch_step: int | None = None  # from which step on they are so, where they changed; None: in all steps
    ranks: int | None = None  # world size
    replicas: int | None = None  # ranks, or groups of ranks, that each train on a micro-batch of their own
    stages: int | None = None  # of a pipeline; None without
    computes_in: str = ""  # the dtype in which FSDP computes; "" for that of the parameters

    @property
    def is_loop(self) -> bool:
        """Whether it trains without DeepSpeed."""
        return self.kind == LOOP

    @property
    def has_begun(self) -> bool:
        """Whether there is an engine or a loop."""
        return self.is_loop or self.zero_stage is not None

    @property
    def gathers_parameters(self) -> bool:
        """Whether ranks gather parameters within forward and backward, and so wait for each other there."""
        return self.zero_stage == 3 or self.parallelism.startswith("FSDP")

    @property
    def setup_text(self) -> str:
        """Return how it trains in a few words: ``ZeRO-2`` or ``DDP x 4, bf16, AdamW``; empty while nothing trains."""
        return self._describe_setup(self.short_precision)

    @property
    def method_text(self) -> str:
        """Return the same without the data type."""
        return self._describe_setup("")

    def _describe_setup(self, precision: str) -> str:
        if self.is_loop:
            return ", ".join(filter(None, (self._parallelism_text, precision, self._optimizer_text)))
        zero = f"ZeRO-{self.zero_stage}" if self.zero_stage is not None else ""
        return ", ".join(filter(None, (self.stages_text, zero)))

    @property
    def batch_ranks(self) -> int | None:
        """Return how many micro-batches the ranks train on at once."""
        return self.replicas or self.ranks

    @property
    def stages_text(self) -> str:
        """Return ``2 stages`` of a pipeline; else ""."""
        return format_count(self.stages, "stage") if self.stages else ""

    @property
    def outside_text(self) -> str:
        """Return the name of an iteration's time outside the recorded phases: ``outside DeepSpeed``."""
        if self.stages:
            return "outside DeepSpeed, other stages"
        return "between the phases" if self.is_loop else "outside DeepSpeed"

    @property
    def _parallelism_text(self) -> str:
        return f"{self.parallelism} x {self.ranks}" if self.parallelism and self.ranks else self.parallelism

    @property
    def _optimizer_text(self) -> str:
        return self.inner_optimizer or "no optimizer"

    @property
    def _base_text(self) -> str:
        """Return ``bf16 base, fp32 trained`` for adapters on a frozen base of another dtype; else ""."""
        is_other = self.dtype and self.frozen_dtype and self.frozen_dtype != self.dtype
        return f"{self.frozen_dtype} base, {self.dtype} trained" if is_other else ""

    @property
    def short_precision(self) -> str:
        """Return the dtype of computation, or the dtypes of the frozen base and of the trained parameters."""
        return self.autocast or self.computes_in or self._base_text or self.dtype

    @property
    def precision_text(self) -> str:
        """Return the dtype of the parameters, and that of computation if it differs: ``fp32, bf16 autocast``."""
        autocast = f"{self.autocast} autocast" if self.autocast and self.autocast != self.dtype else ""
        mixed = f"computes in {self.computes_in}" if self.computes_in and self.computes_in != self.dtype else ""
        return ", ".join(filter(None, (self._base_text or self.dtype, autocast, mixed)))

    def describe_engine(self) -> str:
        """Return a phrase such as ``Llama, 8,030.0 M parameters, ZeRO-2, optimizer on CPU, bf16, batch 2 x 1 x 8 (...)``."""
        if not self.has_begun:
            return "no training was recorded"
        offloads = (("optimizer", self.offload_optimizer), ("parameters", self.offload_parameters))
        batch = (self.micro_batch, self.gradient_accumulation, self.batch_ranks)
        since = "" if self.batch_step is None else f" from step {self.batch_step} on"
        groups = "ranks" if self.batch_ranks == self.ranks else "data-parallel groups"
        parts = (
            self.model,
            self._describe_parameters(),
            *((self._parallelism_text, self._optimizer_text) if self.is_loop else (self.setup_text,)),
            *(f"{part} on {DEVICE_NAMES.get(device, device)}" for part, device in offloads if device != "none"),
            self.precision_text,
            f"batch {' x '.join(map(str, batch))} (micro-batch x accumulation x {groups}){since}"
            if None not in batch
            else format_count(self.ranks, "rank")
            if self.ranks
            else "",
        )
        return ", ".join(part for part in parts if part)

    def _describe_parameters(self) -> str:
        if not self.parameters:
            return ""
        trained = self.trainable_parameters
        some = f" ({format_parameters(trained)} trained)" if trained is not None and trained < self.parameters else ""
        return f"{format_parameters(self.parameters)} parameters{some}"


def read_first_engine(at: At) -> EngineFacts:
    """Return the facts of the lowest rank's engine or loop number 0, with its last autocast; empty before there is one."""
    engines = [event for event in at.events_of(events.Engine) if not event.engine]
    first = min(reversed(engines), key=lambda event: event.writer.rank, default=None)
    if first is None:
        return EngineFacts({})
    engine = add_library(first, at.events_of(events.TotalSteps))
    changes = (event for event in at.events_of(events.TrainingChanged) if event.writer == first.writer)
    later = (one for event in changes if event.unix_ns > first.unix_ns for one in event.changes)
    autocast = [{one.name: one.after} for one in later if one.name == "autocast"]
    return EngineFacts(engine.facts | add_stages(event.pipeline for event in engines) | (autocast or [{}])[-1])


def add_stages(pipelines: Iterable[PipelineStage | None]) -> dict[str, int | None]:
    """Return the parameters of a whole pipeline from the facts of its ranks; empty unless those of each stage are known."""
    by_stage = {one.stage: one for one in pipelines if one}
    if not by_stage or len(by_stage) != next(iter(by_stage.values())).stages:
        return {}
    return {
        "parameters": sum(one.parameters or 0 for one in by_stage.values()),
        "trainable_parameters": sum(one.trainable_parameters or 0 for one in by_stage.values()),
    }


def keep_latest(engines: Iterable[events.Engine]) -> list[events.Engine]:
    """Return the last event of each number: a DeepSpeed engine takes over the number of a loop before it."""
    return list({event.engine or 0: event for event in engines}.values())


def find_takeovers(engines: Iterable[events.Engine]) -> dict[int, int]:
    """Return when a DeepSpeed engine took over the number of a loop (unix nanoseconds), by number.

    ``engines``: the ``engine`` events of one process, in order. Inventories before that time are the loop's, and outdated.
    """
    loops: set[int] = set()
    takeovers: dict[int, int] = {}
    for event in engines:
        number = event.engine or 0
        if event.kind == LOOP:
            loops.add(number)
        elif number in loops:
            takeovers[number] = event.unix_ns
            loops.discard(number)
    return takeovers


def parse_engine(engine: EngineFacts) -> dict[str, Any]:
    """Return the fields of an :class:`EngineSummary` from the facts of an ``engine`` event."""
    stated = {one.name: getattr(engine, one.name, None) for one in dataclasses.fields(EngineSummary)}
    known = {name: value for name, value in stated.items() if value not in (None, "")}
    computes_in = (engine.sharding.dtype if engine.sharding is not None else None) or ""
    stages = engine.pipeline.stages if engine.pipeline is not None else None
    counts = {"ranks": engine.world_size, "replicas": find_replicas(engine), "stages": stages}
    return {**known, **counts, "computes_in": computes_in}


def find_replicas(engine: EngineFacts) -> int | None:
    """Return how many micro-batches the ranks of a job train on at once: fewer than ranks if several share one."""
    rows, whole = (engine.micro_batch or 0) * (engine.gradient_accumulation or 0), engine.train_batch or 0
    if engine.kind != LOOP and rows and whole and not whole % rows:
        return whole // rows
    return engine.world_size


def measure_batch(engine: EngineFacts, steps: NDArray[Any]) -> dict[str, Any]:
    """Return micro-batch and accumulation of a loop that states neither, as in most of its last steps (STEP_DTYPE).

    The last batch of an epoch may be smaller. If several sizes are equally frequent, the largest counts. Empty if a library
    states them and they never changed, before the first step, with several optimizers, each of which may have its own
    backwards, and if the micro-batches of a step differ. "batch_step" is the first known step since they last changed.
    """
    is_known = (steps["micro_steps"] > 0) & (steps["steps"] <= 1)
    known = np.empty(np.count_nonzero(is_known), _BATCH_DTYPE)  # whole rows of many steps take long to copy
    for name in _BATCH_DTYPE.names or ():
        known[name] = steps[name][is_known]
    stated = {"micro_batch": engine.micro_batch, "gradient_accumulation": engine.gradient_accumulation}
    is_stated = None not in stated.values()
    if not len(known) or not (is_stated or (engine.kind == LOOP and len(engine.optimizers or ()) == 1)):
        return {}
    known = known[_begins_with_forwards(known) :]
    rows, count = _find_last_batch(known, int(steps["step"][-1]))
    begin = _find_last_change(known, rows, count)
    sizes = {"micro_batch": rows // count if rows > 0 and not rows % count else None, "gradient_accumulation": count}
    measured = {name: size for name, size in sizes.items() if size is not None and (is_stated or stated[name] is None)}
    if is_stated:
        rows_of_stated = (engine.micro_batch or 0) * (engine.gradient_accumulation or 0)
        are_counted_alike = bool((known["rows"] == rows_of_stated).any())
        if not (begin and len(measured) == len(sizes) and are_counted_alike):
            return {}
    return {**measured, **({"batch_step": int(known["step"][begin])} if begin and measured else {})}


def _find_usual_batch(steps: NDArray[Any]) -> tuple[int, int]:
    """Return the most frequent rows and micro-steps."""
    pairs, frequencies = np.unique(np.stack([steps["rows"], steps["micro_steps"]]), axis=1, return_counts=True)
    rows, count = (int(number) for number in pairs[:, np.flatnonzero(frequencies == frequencies.max())[-1]])
    return rows, count


def _find_last_batch(known: NDArray[Any], last_step: int) -> tuple[int, int]:
    """Return rows and micro-steps of the last steps, of which only some may be known."""
    usual = _find_usual_batch(known[-_BATCH_STEPS:])
    recent = known[known["step"] > last_step - _BATCH_STEPS]
    if not len(recent):
        return usual
    rows, count = _find_usual_batch(recent)
    # One that is smaller may be the last of an epoch.
    is_sure = rows > usual[0] or np.count_nonzero((recent["rows"] == rows) & (recent["micro_steps"] == count)) > 1
    return (rows, count) if is_sure else usual


def _find_last_change(steps: NDArray[Any], rows: int, count: int) -> int:
    """Return the index of the first step since most of some consecutive ones last had another batch; 0 if none is known.

    Batches that differ from step to step, most of the last ones before it from each other, have not changed.
    """
    is_other = (steps["rows"] != rows) | (steps["micro_steps"] != count)
    others = np.concatenate([[0], np.cumsum(is_other)])
    length = min(_BATCH_STEPS, len(steps))
    ends = np.flatnonzero(2 * (others[length:] - others[:-length]) > length) + length
    if not len(ends):
        return 0
    before = steps[: ends[-1]][is_other[: ends[-1]]]
    old_rows, old_count = _find_usual_batch(before[-length:])
    is_old = (steps["rows"] == old_rows) & (steps["micro_steps"] == old_count)
    begin = int(np.flatnonzero(is_old[: ends[-1]])[-1]) + 1
    if 2 * np.count_nonzero(is_old[max(0, begin - length) : begin]) <= min(length, begin):
        return 0
    since = np.flatnonzero(~is_other[begin:])
    return begin + int(since[0]) if len(since) else 0


def _begins_with_forwards(steps: NDArray[Any]) -> bool:
    """Whether the first step has more rows than the next one, because it includes forwards before the training."""
    if len(steps) < 2 or steps["step"][0] != 0:
        return False
    first, second = (int(rows) for rows in steps["rows"][:2])
    return 0 < 2 * second <= first and first % second == 0
