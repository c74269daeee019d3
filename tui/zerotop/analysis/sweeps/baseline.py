"""What a recording measured of a training at one setting: the moments of a step, its times, its hosts.

The setting is that of the last steps whose phases were recorded; a rank that used the most memory stands for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isfinite
from typing import Any

import numpy as np

from zerotop.analysis.engine import read_first_engine
from zerotop.analysis.failures.last_moments import have_batches_grown
from zerotop.analysis.failures.out_of_memory import PostMortem, find_post_mortem
from zerotop.analysis.findings.support.memory.square_blocks import SquareBlocks, find_square_blocks
from zerotop.analysis.memory.allocator_settings import read_settings
from zerotop.analysis.memory.caching_allocator import DEFAULT_RULES, MIB, AllocatorRules
from zerotop.analysis.memory.expected.model_shape import ModelShape, parse_shape
from zerotop.analysis.memory.expected.peak_moments import DEFAULT_BUCKET, Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup, is_foreach, parse_setup
from zerotop.analysis.memory.gpu_ledger import find_pids
from zerotop.analysis.memory.kept_memory import Leak, find_leak
from zerotop.analysis.memory.nvml_snapshot import read_device_memory
from zerotop.analysis.memory.phase_peaks import PhasePeak, read_rank_peaks
from zerotop.analysis.sweeps.phase_times import PhaseTimes, measure_times
from zerotop.analysis.sweeps.recorded_moments import LaterBatch, MicroStep, RankMoments, find_moments
from zerotop.recording.keys import GpuKey, RankProcess, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import find_gpu_name, find_limit, locate_allocators
from zerotop.recording.moments.rank_records import RankRecords
from zerotop.recording.reader import Recording, Source
from zerotop.recording.steps.step_table import RankSteps, StepTable
from zerotop_probe.recording.event_values import DIMENSIONS
from zerotop_probe.recording.events import Engine, EngineFacts, Hello, OutOfMemory

_HIGHER = 1.02  # times the peak of the steps that stand for the setting
_LOWER = 0.9  # times that peak, which is less than before a rise


class NoBaselineError(Exception):
    """A recording does not hold what a prediction starts from; the message says what, and what would be possible."""


@dataclass(frozen=True, slots=True, eq=False)  # hashed by identity: what follows from one is kept
class Baseline:
    """A recorded setting, and what was measured at it. Bytes are those of the rank that used the most."""

    name: str
    setup: EngineSetup
    work: Workload  # a sequence of 0 means that the recording counts no tokens, but rows
    shape: ModelShape | None
    gpus: int  # on a node
    nodes: int
    gpu: str
    gpu_bytes: int | None
    host_bytes: int | None  # memory that the job's node or cgroup has
    first: MicroStep
    last: MicroStep  # of a step with several micro-batches
    step_peak: int
    reserved: int
    nvml: int | None  # of the process
    host_rss: int | None  # of one rank
    times: PhaseTimes | None
    computes_in: str  # dtype
    highest_peak: PhasePeak | None = None  # of other steps or outside of them, where more was allocated
    start_peak: int = 0  # allocated while the engine was made, before the first step
    limit_bytes: int | None = None  # what PyTorch may use of the GPU, if less
    failure: PostMortem | None = None  # the lack of memory that the job did not survive
    leak: Leak | None = None  # of the rank whose steps left most behind
    square: SquareBlocks | None = None  # of rows x rows elements, that the peak has had since it rose
    rules: AllocatorRules = DEFAULT_RULES
    model: str = ""  # its class
    steps: tuple[int, int] | None = None  # the first and the last of those whose memory counts
    timed_steps: tuple[int, int] | None = None  # likewise of the times: more, where only the memory changed
    batches_differ: bool = False  # of the steps with times, so that none stands for the others
    pace_change: int | None = None  # the step at which the median changed before them, else the next one after them
    mean_s: float | None = None  # of the iterations up to the next such change, pauses included
    later: tuple[int, float] | None = None  # the step of the next such change, and the median iteration since then
    later_batch: LaterBatch | None = None  # of all steps since then
    ranks_on_gpu: int = 1  # those that share a GPU
    threads: int | None = None  # of a rank's CPU optimizer; None for one on each core of the node
    machine: Mapping[str, float] = field(default_factory=dict)  # what `doctor --measure` found on a machine like it

    @property
    def peak(self) -> int:
        """The highest allocated of a training step."""
        return max(self.first.backward_peak, self.last.backward_peak, self.first.forward_peak, self.step_peak)


def read_baseline(recording: Recording, until_step: int | None = None) -> Baseline:
    """Return the last setting of a recording, or its last one before a step. Raises NoBaselineError."""
    at, name = recording.at(), recording.name
    if parse_setup(read_first_engine(at)) is None:
        raise NoBaselineError(
            f"{name} has no DeepSpeed engine or loop, so the size of its model is unknown. `zerotop estimate MODEL` needs no"
            " run"
        )
    table = StepTable(recording)
    table.update()
    # The last process of each rank, as facts are of the last one, too.
    ranks = list({one.source.rank: one for one in table.rank_steps if len(one.step_rows)}.values())
    if not ranks:
        raise NoBaselineError(f"{name} has no finished step. Record a few steps; `zerotop estimate MODEL` needs no run")
    gpus = locate_allocators(at)
    if not gpus:
        raise NoBaselineError(
            f"{name} has no readings of a GPU's allocator, as on a CPU. `zerotop estimate MODEL` needs no run"
        )
    allocators = {identify_process(source): source for source in gpus}
    engine, found = find_moments(recording, ranks, allocators, until_step)
    setup = parse_setup(engine)
    if setup is None:
        raise NoBaselineError(f"{name} does not tell the size of its model before its pace changed")
    if engine.pipeline is not None:
        raise NoBaselineError(f"{name} trains in a pipeline, whose stages differ: there is no formula for it")
    computes_in = str(engine.autocast or (engine.sharding and engine.sharding.dtype) or engine.dtype or "")
    # FSDP and adapters may compute in fewer bits than the dtype of what they train.
    is_plain = setup.stage != 3 and setup.trainable == setup.parameters
    setup = replace(setup, computes_wide=computes_in == "fp32" and setup.bytes_each == 4 and is_plain)
    if not found:
        raise NoBaselineError(
            f"{name} has no step with the memory of its phases and an update of the weights. Short steps are recorded in"
            " light detail: record with a larger --budget, or for longer"
        )
    process, source, chosen, first, last, step_peak = max(
        found, key=lambda one: max(one.first.backward_peak, one.last.backward_peak)
    )
    key = gpus[source]
    measured = (measure_times(recording, one.process, one.chosen) for one in found)
    times = [each for each in measured if each is not None]
    rows = chosen.rows[-1]
    work = _describe_work(engine, rows)
    nodes = max(1, len(at.nodes))
    ranks_on_gpu = max(Counter({source.rank: key for source, key in gpus.items()}.values()).values())
    devices = [device for device in engine.devices or [] if device.total_bytes]
    host = max(int(one.chosen.rows["host_rss_bytes"].max()) for one in found)
    reserved = max(int(one.chosen.rows["reserved_peak_bytes"].max()) for one in found)
    peak = max(first.backward_peak, last.backward_peak, first.forward_peak, step_peak)
    gpu_bytes = _find_gpu_bytes(recording, key) or (devices[0].total_bytes if devices else None)
    return Baseline(
        name=name,
        setup=setup,
        work=work,
        shape=_build_shape(engine),
        gpus=max(1, ceil(setup.ranks // nodes / ranks_on_gpu)),
        ranks_on_gpu=ranks_on_gpu,
        nodes=nodes,
        gpu=find_gpu_name(at, key) or "",
        gpu_bytes=gpu_bytes,
        host_bytes=_find_host_bytes(recording, source.host),
        first=first,
        last=last,
        step_peak=step_peak,
        reserved=reserved,
        nvml=_add_outside(recording, found, gpus, reserved),
        host_rss=host if host > 0 else None,
        times=max(times, key=lambda one: one.iteration, default=None),
        computes_in=computes_in,
        highest_peak=_find_highest(at, _HIGHER * peak) if until_step is None else None,
        start_peak=max(
            (one.allocated_bytes for peaks in read_rank_peaks(at) for one in peaks.phases if one.phase == "init"), default=0
        ),
        square=_find_square(at, process, rows),
        rules=_read_rules(at),
        later=chosen.stretch.measure_later(process) if until_step is None else None,
        later_batch=chosen.stretch.read_later(process) if until_step is None else None,
        threads=_read_threads(at),
        model=str(engine.model or ""),
        steps=(int(chosen.rows["step"][0]), int(chosen.rows["step"][-1])),
        timed_steps=(int(chosen.timed["step"][0]), int(chosen.timed["step"][-1])) if len(chosen.timed) else None,
        batches_differ=chosen.batches_differ,
        pace_change=chosen.pace_change,
        limit_bytes=_find_limit(at, ranks, gpu_bytes),
        failure=_find_failure(at) if until_step is None else None,
        leak=_find_leak(at, allocators, ranks) if until_step is None else None,
        mean_s=max((mean for one in found if isfinite(mean := one.chosen.stretch.measure_mean(one.process))), default=None),
    )


def _add_outside(
    recording: Recording, found: Sequence[RankMoments], gpus: Mapping[Source, GpuKey], reserved: int
) -> int | None:
    """Return what a process holds beyond its reserved memory too, as the memory screen does; None if that is unknown."""
    most = 0
    for one in found:
        if (key := gpus[one.source]) is None:
            continue
        at = recording.at(int(one.chosen.rows["end_unix_ns"][-1]))
        sharing = [source for source, other in gpus.items() if other == key]
        device = read_device_memory(at, key, find_pids(at, key[0]), sharing)
        if device is not None and device.job_bytes and device.outside_bytes:
            own = device.outside_bytes - sum(size for _, size in device.by_other_ranks)
            most = max(most, own // len(sharing))
    return reserved + most if most > 0 else None


def _find_highest(at: At, least: float) -> PhasePeak | None:
    """Return the highest peak of a rank since its first step, if it is more than ``least``."""
    peaks = (peak for one in read_rank_peaks(at) for peak in one.phases if peak.is_in_step)
    highest = max(peaks, key=lambda peak: peak.allocated_bytes, default=None)
    return highest if highest is not None and highest.allocated_bytes > least else None


def _find_square(at: At, process: RankSteps, last: Any) -> SquareBlocks | None:
    """Return the blocks of rows x rows elements that made the peak rise to that of the step ``last``; None without any."""
    steps = process.recorded_steps
    steps = steps[(steps["step"] <= last["step"]) & (steps["allocated_peak_bytes"] > 0) & (steps["rows"] > 0)]
    lower = np.flatnonzero(steps["allocated_peak_bytes"] < _LOWER * last["allocated_peak_bytes"])
    if not len(lower) or lower[-1] + 1 == len(steps):
        return None
    before, after = steps[lower[-1]], steps[lower[-1] + 1]
    grown = float(last["allocated_peak_bytes"]) - float(before["allocated_peak_bytes"])
    records = RankRecords(at, identify_process(process.source))
    found = find_square_blocks(records, int(before["end_unix_ns"]), after, grown)
    is_of_last = found is not None and found.rows == int(last["rows"]) // max(1, int(last["micro_steps"]))
    return found if is_of_last else None


def _find_limit(at: At, ranks: Sequence[RankSteps], gpu_bytes: int | None) -> int | None:
    """Return the least that PyTorch may use on a rank's GPU; None where no process is limited."""
    processes = [identify_process(one.source) for one in ranks]
    engines = [next(reversed(at.process_events(Engine, process)), None) for process in processes]
    limits = (
        find_limit(gpu_bytes or 0, engine, at.process_events(OutOfMemory, process))
        for engine, process in zip(engines, processes, strict=True)
    )
    return min((limit for limit in limits if limit is not None), default=None)


def _find_failure(at: At) -> PostMortem | None:
    found = find_post_mortem(at)
    return found if found is not None and found.survived is False else None


def _find_leak(at: At, allocators: Mapping[RankProcess, Source], ranks: Sequence[RankSteps]) -> Leak | None:
    """Return the largest leak of a rank, unless its batches grew meanwhile, whose outputs a script may hold."""
    found = [
        leak
        for process in (identify_process(one.source) for one in ranks)
        if process in allocators
        and (leak := find_leak(allocators[process], at.cursor_ns)) is not None
        and leak.is_going_on
        and not have_batches_grown(at, process, leak.since_step)
    ]
    return max(found, key=lambda leak: leak.bytes, default=None)


def _read_rules(at: At) -> AllocatorRules:
    """Return the rules of the allocator of the first rank that has reported."""
    settings = read_settings(next(iter(at.events_of(Hello)), None))
    divisions, size = settings.values.get("roundup_power2_divisions", ""), settings.values.get("max_split_size_mb", "")
    return AllocatorRules(
        max_split_size=int(size) * MIB if size.strip().isdecimal() else None,
        roundup_power2_divisions=int(divisions) if divisions.strip().isdecimal() else 0,
        expandable_segments=settings.has_expandable_segments,
    )


def _read_threads(at: At) -> int | None:
    hello = next(iter(at.events_of(Hello)), None)
    threads = (hello.environment or {}).get("OMP_NUM_THREADS", "") if hello is not None else ""
    return max(1, int(threads)) if threads.isdecimal() else None


def _describe_work(engine: EngineFacts, step: Any) -> Workload:
    micro_steps = int(step["micro_steps"])
    rows = int(step["rows"]) // micro_steps if step["rows"] > 0 else int(engine.micro_batch or 1)
    tokens = int(step["tokens"]) // micro_steps if step["tokens"] > 0 else 0
    zero = (engine.config or {}).get("zero_optimization") or {}
    bucket = zero.get("reduce_bucket_size") if isinstance(zero, dict) else None
    return Workload(
        micro_batch=max(1, rows),
        sequence=tokens // max(1, rows),
        accumulation=micro_steps,
        checkpointing="full" if engine.activation_checkpointing else "none",
        foreach=is_foreach(engine),
        overlap_comm=isinstance(zero, dict) and zero.get("overlap_comm") is True,
        bucket=int(bucket) if isinstance(bucket, (int, float)) and bucket > 0 else DEFAULT_BUCKET,
    )


# Families by a part of the model's class name; the first match counts.
_KINDS: tuple[tuple[str, str], ...] = (
    *((kind, kind) for kind in ("qwen3", "qwen2", "gpt2", "mixtral", "mistral", "llama", "phi3", "gemma2", "gemma", "opt")),
    ("gptneox", "gpt_neox"),
)


def _build_shape(engine: EngineFacts) -> ModelShape | None:
    """Return the shape of the model by its recorded dimensions and the name of its class."""
    sizes = engine.dimensions or {}
    kind = next((kind for name, kind in _KINDS if name in str(engine.model or "").lower()), "")
    config: dict[str, Any] = {DIMENSIONS[name]: size for name, size in sizes.items() if name in DIMENSIONS}
    return parse_shape(config | {"model_type": kind})


def _find_gpu_bytes(recording: Recording, key: tuple[str, int] | None) -> int | None:
    if key is None:
        return None
    for source in recording.sources["gpus"]:
        rows = source.array
        own = rows[rows["gpu"] == key[1]] if source.host == key[0] else rows[:0]
        if len(own) and own["total_bytes"][-1] > 0:
            return int(own["total_bytes"][-1])
    return None


def _find_host_bytes(recording: Recording, host: str) -> int | None:
    for source in recording.host_sources("hosts", host):
        if len(source.array):
            row = source.array[-1]
            sizes = [int(row[name]) for name in ("memory_total_bytes", "cgroup_limit_bytes") if row[name] > 0]
            return min(sizes, default=None)
    return None
