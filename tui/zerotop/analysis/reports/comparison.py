"""Recordings side by side: configuration, time per phase, peak memory and findings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from zerotop.analysis.findings import Finding
from zerotop.analysis.live_view import Floats, Iterations, JobState
from zerotop.analysis.memory.allocator_settings import read_settings
from zerotop.analysis.ranks.delays import list_delays
from zerotop.analysis.reports.measures import Comparison, Measure, Unit, Value
from zerotop.analysis.reports.recorded_run import RecordedRun, read_lowest_rank
from zerotop.analysis.steps.job_pace import (
    find_usual,
    measure_iteration,
    measure_token_rate,
    measure_whole_step,
    measure_whole_token_rate,
)
from zerotop.analysis.sweeps.recorded_moments import SteadySteps, list_steady_steps
from zerotop.recording.moments.process_exits import describe_exit_code
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events

_MAX_GPUS = 8
_ZERO_PREFIX = "zero_optimization."


def compare_paths(recordings: Sequence[Recording], names: Sequence[str] = ()) -> Comparison:
    """Compare recordings, each up to its end. ``names``: the column headings [the recordings' names]."""
    sides = [RecordedRun(recording) for recording in recordings]
    sections = (
        compare_configuration,
        _compare_times,
        _compare_speed,
        _compare_memory,
        _compare_findings,
    )
    measures = [measure for section in sections for measure in section(sides)]
    recorded = [measure for measure in measures if any(value is not None for value in measure.values)]
    return Comparison(tuple(names) or tuple(recording.name for recording in recordings), tuple(recorded))


Sides = Sequence[RecordedRun]
ReadValue = Callable[[RecordedRun], Value]


def compare_configuration(sides: Sides) -> Iterator[Measure]:
    """Compare all that was known before the first step."""
    for section in (compare_setup, _compare_arguments, _compare_settings, compare_versions):
        yield from section(sides)


def _build_measures(section: str, unit: Unit, sides: Sides, readers: Mapping[str, ReadValue]) -> Iterator[Measure]:
    for name, read in readers.items():
        yield Measure(section, name, unit, tuple(_drop_empty(read(side)) for side in sides))


def _drop_empty(value: Value) -> Value:
    return None if value == "" or (isinstance(value, float) and not math.isfinite(value)) else value


def compare_setup(sides: Sides) -> Iterator[Measure]:
    """Compare models, engines and hardware."""
    facts = {
        "ZeRO stage": "zero_stage",
        "parallelism": "parallelism",
        "library": "library",
        "optimizer offload": "offload_optimizer",
        "parameter offload": "offload_parameters",
        "data type": "dtype",
        "data type of the frozen base": "frozen_dtype",
        "autocast": "autocast",
        "ranks": "world_size",
        "checkpointing": "activation_checkpointing",
    }
    yield from _build_measures("Setup", Unit.TEXT, sides, {"model": lambda side: side.engine.model})
    yield from _build_measures("Setup", Unit.COUNT, sides, {"parameters": lambda side: side.engine.parameters})
    for name, fact in facts.items():
        yield Measure("Setup", name, Unit.TEXT, tuple(_format_value(getattr(side.engine, fact)) for side in sides))
    for name in ("micro_batch", "gradient_accumulation"):
        counts = tuple(_format_value(getattr(side.view.job.engine, name)) for side in sides)
        yield Measure("Setup", name.removeprefix("gradient_").replace("_", "-"), Unit.TEXT, counts)
    others: dict[str, ReadValue] = {
        "computes in": lambda side: side.view.job.engine.short_precision if side.view.job.engine.is_loop else None,
        "optimizer": lambda side: _format_value(side.engine.inner_optimizer or side.engine.optimizer),
        "allocator": _describe_allocator,
        "GPUs": _describe_gpus,
    }
    yield from _build_measures("Setup", Unit.TEXT, sides, others)


def _compare_arguments(sides: Sides) -> Iterator[Measure]:
    """Compare the script's own options; yield those that differ."""
    by_side = [side.options for side in sides]
    for name in dict.fromkeys(name for options in by_side for name in options):
        measure = Measure("Arguments", name, Unit.TEXT, tuple(options.get(name) for options in by_side))
        if measure.is_different:
            yield measure


def _format_value(value: object) -> str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return None if value in (None, "") else str(value)


def _describe_allocator(side: RecordedRun) -> str | None:
    """Return the settings of PyTorch's CUDA allocator; None without a GPU."""
    if not side.view.job_gpus:
        return None
    return read_settings(side.hello).text or "default"


def _describe_gpus(side: RecordedRun) -> str:
    counts = Counter(gpu.name for gpu in side.view.job_gpus)
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _compare_settings(sides: Sides) -> Iterator[Measure]:
    """Compare DeepSpeed's settings; yield those that differ, and one row for a section that a recording lacks."""
    configs = [side.flat_config for side in sides]
    if not all(configs):
        return
    sections_by_side = [{name.rpartition(".")[0] for name in config} for config in configs]
    yielded = set()
    for name in sorted({name for config in configs for name in config}):
        section = name.rpartition(".")[0]
        values: tuple[Value, ...] = tuple(config.get(name) for config in configs)
        if any(section not in sections for sections in sections_by_side):
            name, values = section, tuple("set" if section in sections else None for sections in sections_by_side)
        measure = Measure("DeepSpeed settings", name.removeprefix(_ZERO_PREFIX), Unit.TEXT, values)
        if measure.is_different and measure.name not in yielded:
            yielded.add(measure.name)
            yield measure


def compare_versions(sides: Sides) -> Iterator[Measure]:
    """Compare the versions of libraries and the driver."""
    for name in ("python", "torch", "deepspeed", "transformers", "accelerate"):
        yield Measure("Versions", name, Unit.TEXT, tuple(_format_value(getattr(side.hello, name, None)) for side in sides))
    drivers = (getattr(read_lowest_rank(side.recording, events.Node), "driver", None) for side in sides)
    yield Measure("Versions", "driver", Unit.TEXT, tuple(map(_format_value, drivers)))


def _compare_times(sides: Sides) -> Iterator[Measure]:
    section = "Time, median without skipped steps"
    times: dict[str, ReadValue] = {"iteration": _measure_iteration}
    yield from _build_measures(section, Unit.SECONDS, sides, times)
    stretches = [_find_usual_stretch(side) for side in sides]
    if any("unknown" in side.view.iterations.phase_s for side in sides):
        # Phases add up to the time of the steps in which they were recorded.
        totals = (_compute_phased(side, stretch) for side, stretch in zip(sides, stretches, strict=True))
        yield Measure(section, "steps with phases", Unit.SECONDS, tuple(totals))
    names = dict.fromkeys(side.view.job.engine.outside_text for side in sides)
    outside = next(iter(names)) if len(names) == 1 else "outside the phases"
    if any(stretch is not None for stretch in stretches):
        told = tuple(_name_stretch(side, stretch) for side, stretch in zip(sides, stretches, strict=True))
        yield Measure(section, "  phases in steps", Unit.TEXT, told)
    for phase in ("data", "forward", "backward", "step", "other"):
        medians = tuple(
            _drop_empty(_compute_median(side, _keep_stretch(side, _view_one_rank(side).phase_s.get(phase), stretch)))
            for side, stretch in zip(sides, stretches, strict=True)
        )
        yield Measure(section, f"  {outside if phase == 'other' else phase}", Unit.SECONDS, medians)
    yield from _build_measures(section, Unit.SECONDS, sides, {"slowest iteration": _find_slowest})
    yield from _build_measures(section, Unit.RATE, sides, {"tokens, in iterations": _measure_token_rate})
    counts: dict[str, ReadValue] = {
        "steps": lambda side: side.view.progress.finished_steps,
        "skipped": lambda side: side.view.progress.skipped_steps,
        "not recorded": lambda side: int(np.isnan(side.view.iterations.iteration_s).sum()) or None,
    }
    yield from _build_measures(section, Unit.COUNT, sides, counts)


def _view_one_rank(side: RecordedRun) -> Iterations:
    """Return the iterations of the rank that the others wait for, else of the one that is slowest most often.

    Medians of the phases of different ranks do not add up to an iteration.
    """
    ranks = side.source.job_steps["rank"]
    delays = list_delays(side.findings, len({one.source.rank for one in side.source.rank_steps}))
    if not len(ranks):
        return side.view.iterations
    rank = delays[-1].rank if delays else int(np.bincount(np.maximum(ranks, 0)).argmax())
    return side.source.iterations_on(rank, side.view)


def _compute_median(side: RecordedRun, values: Floats | None) -> float | None:
    """Return the median over the usual iterations of one value for each iteration."""
    if values is None:
        return None
    usual = values[find_usual(side.view.iterations.iteration_s, side.view.iterations.skipped)]
    return float(np.nanmedian(usual)) if not np.isnan(usual).all() else None


def _measure_iteration(side: RecordedRun) -> float | None:
    seconds = measure_iteration(side.source.job_steps)
    return None if math.isnan(seconds) else seconds


def _compute_phased(side: RecordedRun, stretch: SteadySteps | None) -> float | None:
    """Return the median over the usual iterations with phases."""
    iterations = side.view.iterations
    seconds = np.where(np.isnan(iterations.phase_s["forward"]), np.nan, iterations.iteration_s)
    return _compute_median(side, _keep_stretch(side, seconds, stretch))


def _find_usual_stretch(side: RecordedRun) -> SteadySteps | None:
    """Return the steps around which the median iteration is, of those with phases; None where the pace never changed."""
    iterations, rows = side.view.iterations, side.source.job_steps
    stretches = list_steady_steps(rows)
    if len(stretches) == 1:
        return None
    usual = measure_iteration(rows)

    def measure_distance(stretch: SteadySteps) -> float:
        is_own = (iterations.step >= stretch.begin) & (iterations.step < stretch.end)
        seconds = iterations.iteration_s[is_own]
        if np.isnan(iterations.phase_s["forward"][is_own]).all() or np.isnan(seconds).all():
            return math.inf
        return abs(math.log(max(float(np.nanmedian(seconds)), 1e-9) / usual))

    return min(stretches, key=measure_distance)


def _keep_stretch(side: RecordedRun, values: Floats | None, stretch: SteadySteps | None) -> Floats | None:
    if values is None or stretch is None:
        return values
    steps = side.view.iterations.step
    kept: Floats = np.where((steps >= stretch.begin) & (steps < stretch.end), values, np.nan)
    return kept


def _name_stretch(side: RecordedRun, stretch: SteadySteps | None) -> str:
    """Return ``47 to 95`` or ``all``."""
    if stretch is None:
        return "all"
    return f"{int(stretch.begin)} to {int(min(stretch.end - 1, side.view.iterations.step.max()))}"


def _find_slowest(side: RecordedRun) -> float | None:
    seconds = side.view.iterations.iteration_s
    return float(np.nanmax(seconds)) if not np.isnan(seconds).all() else None


def _measure_token_rate(side: RecordedRun) -> float | None:
    """Return tokens per second of all ranks over the usual iterations."""
    return measure_token_rate(side.source.job_steps, side.source.job_tokens)


def _compare_speed(sides: Sides) -> Iterator[Measure]:
    """Compare all the time of the training, in which evaluation, checkpoints and pauses count."""
    section = "Over all the time, with evaluation, checkpoints and pauses"
    steps: dict[str, ReadValue] = {"a step": lambda side: measure_whole_step(side.source.job_steps)}
    yield from _build_measures(section, Unit.SECONDS, sides, steps)
    rates: dict[str, ReadValue] = {
        "tokens": lambda side: measure_whole_token_rate(side.source.job_steps, side.source.job_tokens)
    }
    yield from _build_measures(section, Unit.RATE, sides, rates)


def _compare_memory(sides: Sides) -> Iterator[Measure]:
    """Compare the peaks of each GPU of the job, or of the fullest where there are many, and of the processes."""
    section = "Peak memory"
    used = [list(side.view.job_gpus) for side in sides]
    count = max(map(len, used))
    known = [[gpu.index for gpu in gpus] for gpus in used]
    most = max(known, key=len)
    # Runs on different GPUs of a machine are compared by rank.
    names = [f"GPU {index}" for index in most] if all(each == most[: len(each)] for each in known) else None
    if names is None:
        used = [sorted(gpus, key=lambda gpu: gpu.ranks) for gpus in used]
    is_shared = any(len(gpu.ranks) > 1 for gpus in used for gpu in gpus)
    added = ", summed" if is_shared else ""  # over ranks, whose peaks may be of different moments
    for column, label in (("allocated_peak_bytes", f"allocated{added}"), ("reserved_peak_bytes", f"reserved{added}")):
        by_side = [[getattr(gpu, column) for gpu in gpus] for gpus in used]
        if count > _MAX_GPUS:
            highest = tuple(max((size for size in sizes if size is not None), default=None) for sizes in by_side)
            yield Measure(section, f"fullest GPU, {label}", Unit.BYTES, highest)
            continue
        for index in range(count):
            values = tuple(sizes[index] if index < len(sizes) else None for sizes in by_side)
            name = names[index] if names else f"GPU of rank {index}" if count > 1 else "GPU"
            yield Measure(section, f"{name}, {label}", Unit.BYTES, values)
    readers: dict[str, ReadValue] = {
        "process on its GPU, by NVML": _find_highest_by_nvml,
        "host RSS of a rank": lambda side: max((rank.rss_peak_bytes for rank in side.view.ranks), default=None),
        "host RSS of all ranks": lambda side: sum(rank.rss_peak_bytes for rank in side.view.ranks) or None,
    }
    yield from _build_measures(section, Unit.BYTES, sides, readers)


def _find_highest_by_nvml(side: RecordedRun) -> int | None:
    """Return the highest reading of a rank's process, also outside of its steps, as the allocator's peaks are."""
    sizes = [0]
    for process in (one.source for one in side.source.rank_steps):
        for source in side.source.recording.host_sources("gpu_processes", process.host):
            rows = source.array
            sizes.append(int(rows["used_bytes"][rows["pid"] == process.pid].max(initial=0)))
    return max(sizes) or None


def _compare_findings(sides: Sides) -> Iterator[Measure]:
    """Compare how the jobs ended and, for each finding, the step of its first occurrence."""
    section = "What happened"
    yield Measure(section, "end", Unit.TEXT, tuple(map(_describe_end, sides)))
    for name in dict.fromkeys(finding.name for side in sides for finding in side.findings):
        steps = tuple(_describe_occurrences([one for one in side.findings if one.name == name]) for side in sides)
        yield Measure(section, name.replace("_", " "), Unit.TEXT, steps)


def _describe_end(side: RecordedRun) -> str:
    job = side.view.job
    if job.state is JobState.ENDED:
        return "ended" if job.exit_code is None else describe_exit_code(job.exit_code, job.exit_signal)
    return {JobState.LOST: "unknown", JobState.DETACHED: "detached"}.get(job.state, "running")


def _describe_occurrences(findings: Sequence[Finding]) -> str | None:
    if not findings:
        return None
    first = "yes" if findings[0].step is None else f"step {findings[0].step}"
    return first if len(findings) == 1 else f"{first} and {len(findings) - 1} more"
