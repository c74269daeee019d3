"""What a recording measured of a training at one setting: the moments of a step, its times, its hosts.

The setting is that of the last steps whose phases were recorded; a rank that used the most memory stands for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.engine import read_first_engine
from zerotop.analysis.memory.allocator_settings import read_settings
from zerotop.analysis.memory.caching_allocator import DEFAULT_RULES, MIB, AllocatorRules
from zerotop.analysis.memory.expected.model_shape import ModelShape, parse_shape
from zerotop.analysis.memory.expected.peak_moments import DEFAULT_BUCKET, Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup, compute_expected, parse_setup
from zerotop.analysis.memory.tensor_inventory import GRADIENTS
from zerotop.analysis.sweeps.phase_times import PhaseTimes, measure_times
from zerotop.analysis.sweeps.recorded_steps import ChosenSteps, choose_steps, list_steady_steps
from zerotop.recording.keys import identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import find_gpu_name, locate_allocators
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Rows
from zerotop.recording.steps.step_table import StepTable
from zerotop_probe.recording.event_values import DIMENSIONS
from zerotop_probe.recording.events import EngineFacts, Hello
from zerotop_probe.recording.tables import BEGIN, END, PHASE_CODE, TICK

_STATES_SHARE = 0.98  # of the states by formula, or of what a backward leaves, that counts as all of it
_UPDATES = frozenset(
    PHASE_CODE[name] for name in ("step", "optimizer", "cpu_optimizer", "grads_to_cpu", "params_to_gpu", "allgather")
)


class NoBaselineError(Exception):
    """A recording does not hold what a prediction starts from; the message says what, and what would be possible."""


@dataclass(frozen=True, slots=True)
class MicroStep:
    """A GPU's allocated bytes around one micro-batch."""

    kept: int  # before the forward
    forward_end: int
    forward_peak: int
    backward_peak: int
    backward_end: int


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
    evaluation_peak: int | None  # allocated outside of training steps, where it was higher
    rules: AllocatorRules = DEFAULT_RULES
    model: str = ""  # its class
    steps: tuple[int, int] | None = None  # the first and the last of those whose memory counts
    timed_steps: tuple[int, int] | None = None  # likewise of the times: more, where only the memory changed
    pace_change: int | None = None  # the step at which the pace changed before them, else the next one after them
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
        raise NoBaselineError(f"{name} has no DeepSpeed engine or loop, so the size of its model is unknown")
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
    # The rank whose pace changed last tells it for all.
    stretches = max((list_steady_steps(process) for process in ranks), key=lambda one: one[-1].begin)
    steps_of = {process: choose_steps(process, stretches, until_step) for process in ranks}
    latest = max(steps_of.values(), key=lambda one: one.stretch.begin if len(one.rows) else -1)
    engine = _read_engine(recording, latest)
    setup = parse_setup(engine)
    if setup is None:
        raise NoBaselineError(f"{name} does not tell the size of its model before its pace changed")
    if engine.pipeline is not None:
        raise NoBaselineError(f"{name} trains in a pipeline, whose stages differ: there is no formula for it")
    computes_in = str(engine.autocast or (engine.sharding and engine.sharding.dtype) or engine.dtype or "")
    # FSDP and adapters may compute in fewer bits than the dtype of what they train.
    is_plain = setup.stage != 3 and setup.trainable == setup.parameters
    setup = replace(setup, computes_wide=computes_in == "fp32" and setup.bytes_each == 4 and is_plain)
    found = []
    for process, chosen in steps_of.items():
        source = allocators.get(identify_process(process.source))
        if source is None or chosen.stretch != latest.stretch:
            continue
        if (moments := _read_moments(source, chosen.rows, setup)) is not None:
            found.append((process, source, chosen, *moments))
    if not found:
        raise NoBaselineError(
            f"{name} has no step with the memory of its phases and an update of the weights. Short steps are recorded in"
            " light detail: record with a larger --budget, or for longer"
        )
    _, source, chosen, first, last, step_peak = max(found, key=lambda one: max(one[3].backward_peak, one[4].backward_peak))
    key = gpus[source]
    times = [one_time for one in found if (one_time := measure_times(recording, one[0], one[2].timed)) is not None]
    rows = chosen.rows[-1]
    work = _describe_work(engine, rows)
    nodes = max(1, len(at.nodes))
    devices = [device for device in engine.devices or [] if device.total_bytes]
    nvml = max((int(one[2].rows["nvml_process_bytes"].max()) for one in found), default=0)
    host = max(int(one[2].rows["host_rss_bytes"].max()) for one in found)
    reserved = max(int(one[2].rows["reserved_peak_bytes"].max()) for one in found)
    outside = max((int(process.step_rows["allocated_peak_bytes"].max()) for process in ranks), default=0)
    peak = max(first.backward_peak, last.backward_peak, first.forward_peak, step_peak)
    return Baseline(
        name=name,
        setup=setup,
        work=work,
        shape=_build_shape(engine),
        gpus=max(1, setup.ranks // nodes),
        nodes=nodes,
        gpu=find_gpu_name(at, key) or "",
        gpu_bytes=_find_gpu_bytes(recording, key) or (devices[0].total_bytes if devices else None),
        host_bytes=_find_host_bytes(recording, source.host),
        first=first,
        last=last,
        step_peak=step_peak,
        reserved=reserved,
        nvml=nvml if nvml > reserved else None,
        host_rss=host if host > 0 else None,
        times=max(times, key=lambda one: one.iteration, default=None),
        computes_in=computes_in,
        evaluation_peak=outside if until_step is None and outside > 1.02 * peak else None,
        rules=_read_rules(at),
        threads=_read_threads(at),
        model=str(engine.model or ""),
        steps=(int(chosen.rows["step"][0]), int(chosen.rows["step"][-1])),
        timed_steps=(int(chosen.timed["step"][0]), int(chosen.timed["step"][-1])) if len(chosen.timed) else None,
        pace_change=chosen.pace_change,
    )


def _read_engine(recording: Recording, chosen: ChosenSteps) -> EngineFacts:
    """Return the facts that were known at the steps: a loop's are written again when the training has changed."""
    is_last = not len(chosen.rows) or chosen.stretch.end == inf
    return read_first_engine(recording.at(None if is_last else int(chosen.rows["end_unix_ns"][-1])))


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


def _read_moments(source: Source, steps: Rows, setup: EngineSetup) -> tuple[MicroStep, MicroStep, int] | None:
    """Return the highest of each moment in the steps that stand for the setting; None if they lack an edge."""
    if not len(steps):
        return None
    readings = source.array[np.isin(source.array["step"], steps["step"])]
    last = int(steps[-1]["micro_steps"]) - 1
    micros = [_read_micro_step(readings, number) for number in (0, last)]
    if micros[0] is None or micros[1] is None:
        return None
    first = micros[0]
    gradients = setup.bytes_each * setup.trainable // (setup.ranks if setup.stage == 3 else 1)
    states = sum(size for name, size in compute_expected(setup).gpu.items() if name != GRADIENTS)
    is_with_gradients = (
        min(first.kept / _STATES_SHARE - first.backward_end, first.kept - gradients - _STATES_SHARE * states) >= 0
    )
    if setup.is_loop and last == 0 and is_with_gradients:
        # The script frees the gradients between the last reading of a step and the next forward.
        first = replace(first, kept=first.kept - gradients)
    updates = readings[np.isin(readings["phase"], list(_UPDATES)) & (readings["edge"] != BEGIN)]
    peak = int(updates["allocated_peak_bytes"].max(initial=0))
    return first, micros[1] if last else first, peak


def _read_micro_step(readings: NDArray[Any], number: int) -> MicroStep | None:
    """Return the highest of each moment over the micro-batches of that number; None if they lack an edge."""
    is_own = readings["micro_step"] == number

    def select(*phases: str, edge: int | None = None) -> NDArray[np.bool_]:
        selected: NDArray[np.bool_] = is_own & np.isin(readings["phase"], [PHASE_CODE[phase] for phase in phases])
        selected &= readings["edge"] == edge if edge is not None else readings["edge"] != BEGIN
        return selected

    forward_ends, backward_ends = select("forward", edge=END), select("backward", edge=END)
    if not forward_ends.any() or not backward_ends.any():
        return None
    kept = readings["allocated_bytes"][select("forward", edge=BEGIN)]
    if not len(kept):  # an edge soon after another is not read again
        edges = np.flatnonzero(readings["edge"] != TICK)
        places = np.searchsorted(edges, np.flatnonzero(forward_ends)) - 1
        kept = readings["allocated_bytes"][edges[places[places >= 0]]]
    if not len(kept) and number == 0:  # nor one after a step without readings: it leaves what this one leaves
        kept = readings["allocated_bytes"][readings["edge"] == END][-1:]
    if not len(kept):
        return None
    return MicroStep(
        kept=int(np.median(kept)),
        forward_end=int(readings["allocated_bytes"][forward_ends].max()),
        forward_peak=int(readings["allocated_peak_bytes"][select("forward")].max()),
        backward_peak=int(readings["allocated_peak_bytes"][select("backward", "reduce")].max()),
        backward_end=int(readings["allocated_bytes"][backward_ends].max()),
    )


def _describe_work(engine: EngineFacts, step: Any) -> Workload:
    micro_steps = int(step["micro_steps"])
    rows = int(step["rows"]) // micro_steps if step["rows"] > 0 else int(engine.micro_batch or 1)
    tokens = int(step["tokens"]) // micro_steps if step["tokens"] > 0 else 0
    zero = (engine.config or {}).get("zero_optimization") or {}
    bucket = zero.get("reduce_bucket_size") if isinstance(zero, dict) else None
    inner = str(engine.inner_optimizer or "").lower()
    # Of its config DeepSpeed makes DeepSpeedCPUAdam on the CPU, and FusedAdam on the GPU (``_configure_basic_optimizer``).
    is_made = inner == "deepspeedcpuadam" and "optimizer" in (engine.config or {})
    return Workload(
        micro_batch=max(1, rows),
        sequence=tokens // max(1, rows),
        accumulation=micro_steps,
        checkpointing="full" if engine.activation_checkpointing else "none",
        foreach="fused" not in inner and not is_made,
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
