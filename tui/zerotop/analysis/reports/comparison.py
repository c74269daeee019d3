"""Recordings side by side: how they were set up, how fast each phase was, what they held, what was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zerotop.analysis.annotations import Annotation
from zerotop.analysis.annotations import find_annotations as find
from zerotop.analysis.live_view import Floats, LiveView, State
from zerotop.analysis.memory.allocator_settings import read_settings
from zerotop.analysis.reports.measures import Comparison, Measure, Unit, Value
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.session.reader import Session
from zerotop_probe.recording import events

_MAX_GPUS = 8
_ZERO_PREFIX = "zero_optimization."


class _Side:
    """One recording at its end."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.source = RecordingSource(session, memory=True)
        self.view: LiveView = self.source.view_at(None)
        self.findings: tuple[Annotation, ...] = find(session, self.source.end_ns)
        self.hello = _find_first(session, events.HELLO)
        self.engine = _find_first(session, events.ENGINE)

    @property
    def flat_config(self) -> dict[str, str]:
        """DeepSpeed's effective configuration, a line for each leaf."""
        config = self.engine.get("config")
        return dict(_iter_leaves(config)) if isinstance(config, dict) else {}


def _find_first(session: Session, name: str) -> Mapping[str, Any]:
    """What the lowest rank said first in an event of that name."""
    found = [event for event in session.events if event.name == name]
    return min(found, key=lambda event: event.rank).facts if found else {}


def _iter_leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _iter_leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + str(key), str(value)


def compare_sessions(sessions: Sequence[Session], names: Sequence[str] = ()) -> Comparison:
    """Compares recordings, each up to its end. ``names``: what to call them, by default what they call themselves."""
    sides = [_Side(session) for session in sessions]
    sections = (
        _compare_setup,
        _compare_arguments,
        _compare_settings,
        _compare_versions,
        _compare_times,
        _compare_memory,
        _compare_findings,
    )
    measures = [measure for section in sections for measure in section(sides)]
    told = [measure for measure in measures if any(value is not None for value in measure.values)]
    return Comparison(tuple(names) or tuple(session.name for session in sessions), tuple(told))


Sides = Sequence[_Side]
ReadValue = Callable[[_Side], Value]


def _build_measures(section: str, unit: Unit, sides: Sides, readers: Iterable[tuple[str, ReadValue]]) -> Iterator[Measure]:
    for name, look in readers:
        yield Measure(section, name, unit, tuple(_drop_empty(look(side)) for side in sides))


def _drop_empty(value: Value) -> Value:
    return None if value == "" or (isinstance(value, float) and not math.isfinite(value)) else value


def _compare_setup(sides: Sides) -> Iterator[Measure]:
    texts: tuple[tuple[str, ReadValue], ...] = (
        ("model", lambda side: side.view.job.model),
        ("ZeRO stage", lambda side: _format_value(side.view.job.zero_stage)),
        ("optimizer offload", lambda side: side.view.job.offload_optimizer),
        ("parameter offload", lambda side: side.view.job.offload_parameters),
        ("data type", lambda side: side.view.job.dtype),
        ("micro-batch", lambda side: _format_value(side.view.job.micro_batch)),
        ("accumulation", lambda side: _format_value(side.view.job.gradient_accumulation)),
        ("ranks", lambda side: _format_value(side.view.job.ranks)),
        ("checkpointing", lambda side: _format_value(side.engine.get("activation_checkpointing"))),
        ("optimizer", lambda side: _format_value(side.engine.get("inner_optimizer") or side.engine.get("optimizer"))),
        ("allocator", _describe_allocator),
        ("GPUs", _describe_gpus),
    )
    yield from _build_measures("Setup", Unit.TEXT, sides, texts[:1])
    yield from _build_measures("Setup", Unit.COUNT, sides, (("parameters", lambda side: side.view.job.parameters),))
    yield from _build_measures("Setup", Unit.TEXT, sides, texts[1:])


def _compare_arguments(sides: Sides) -> Iterator[Measure]:
    """The script's own options, those that differ."""
    found = [_parse_options(side) for side in sides]
    for name in dict.fromkeys(name for options in found for name in options):
        measure = Measure("Arguments", name, Unit.TEXT, tuple(options.get(name) for options in found))
        if measure.is_different:
            yield measure


def _parse_options(side: _Side) -> dict[str, str]:
    """Each with its value, "yes" where it has none; what stands alone has its place for a name."""
    options: dict[str, str] = {}
    last = ""
    for place, word in enumerate(map(str, side.hello.get("arguments") or ())):
        if word.startswith("-"):
            name, _, value = word.partition("=")
            options[name], last = value or "yes", "" if value else name
        elif last:
            options[last], last = word, ""
        else:
            options[f"argument {place}" if place else "script"] = word
    return options


def _format_value(value: object) -> str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return None if value is None else str(value)


def _describe_allocator(side: _Side) -> str | None:
    """What PyTorch's CUDA allocator was told; nothing where there is no GPU."""
    if not side.view.gpus:
        return None
    return read_settings(side.hello).text or "default"


def _describe_gpus(side: _Side) -> str | None:
    kinds: dict[str, int] = {}
    for gpu in side.view.gpus:
        kinds[gpu.name] = kinds.get(gpu.name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in kinds.items()) or "none"


def _compare_settings(sides: Sides) -> Iterator[Measure]:
    """Only what differs: there are a hundred settings. Of a part that one of them does not have, only that."""
    configs = [side.flat_config for side in sides]
    if not all(configs):
        return
    parts = [{name.rpartition(".")[0] for name in config} for config in configs]
    told = set()
    for name in sorted({name for config in configs for name in config}):
        part = name.rpartition(".")[0]
        lacking = any(part not in known for known in parts)
        values = tuple(("set" if part in known else None) for known in parts) if lacking else _read_setting(configs, name)
        measure = Measure("DeepSpeed settings", (part if lacking else name).removeprefix(_ZERO_PREFIX), Unit.TEXT, values)
        if measure.is_different and measure.name not in told:
            told.add(measure.name)
            yield measure


def _read_setting(configs: Iterable[Mapping[str, str]], name: str) -> tuple[Value, ...]:
    return tuple(config.get(name) for config in configs)


def _compare_versions(sides: Sides) -> Iterator[Measure]:
    for name in ("python", "torch", "deepspeed", "transformers", "accelerate"):
        values = tuple(_drop_empty(_format_value(side.hello.get(name))) for side in sides)
        yield Measure("Versions", name, Unit.TEXT, values)
    looks: tuple[tuple[str, ReadValue], ...] = (
        ("driver", lambda side: _format_value(_find_first(side.session, events.NODE).get("driver"))),
    )
    yield from _build_measures("Versions", Unit.TEXT, sides, looks)


def _compare_times(sides: Sides) -> Iterator[Measure]:
    section = "Time, median of all iterations"
    looks: tuple[tuple[str, ReadValue], ...] = (
        ("iteration", lambda side: _compute_median(side.view.iterations.iteration_s)),
    )
    yield from _build_measures(section, Unit.SECONDS, sides, looks)
    for phase in ("data", "forward", "backward", "step", "other"):
        medians = tuple(_drop_empty(_compute_median(side.view.iterations.phase_s.get(phase))) for side in sides)
        yield Measure(section, f"  {phase}", Unit.SECONDS, medians)
    yield from _build_measures(section, Unit.SECONDS, sides, (("slowest iteration", _find_slowest),))
    yield from _build_measures(section, Unit.RATE, sides, (("tokens", _measure_token_rate),))
    counts: tuple[tuple[str, ReadValue], ...] = (
        ("steps", lambda side: side.view.progress.finished_steps),
        ("skipped", lambda side: side.view.progress.skipped_steps),
    )
    yield from _build_measures(section, Unit.COUNT, sides, counts)


def _compute_median(values: Floats | None) -> float | None:
    return float(np.median(values)) if values is not None and len(values) else None


def _find_slowest(side: _Side) -> float | None:
    seconds = side.view.iterations.iteration_s
    return float(seconds.max()) if len(seconds) else None


def _measure_token_rate(side: _Side) -> float | None:
    """Of all ranks, over all iterations."""
    seconds = float(side.view.iterations.iteration_s.sum())
    tokens = sum(int(np.maximum(process.step_rows["tokens"], 0).sum()) for process in side.source.rank_steps)
    return tokens / seconds if tokens and seconds > 0 else None


def _compare_memory(sides: Sides) -> Iterator[Measure]:
    """Peaks of each GPU, or where there are many of the one that held most; then of the processes."""
    section = "Peak memory"
    most = max(len(side.view.gpus) for side in sides)
    for column, word in (("allocated_peak_bytes", "allocated"), ("reserved_peak_bytes", "reserved")):
        by_side = [[getattr(gpu, column) for gpu in side.view.gpus] for side in sides]
        if most > _MAX_GPUS:
            highest = tuple(max((size for size in sizes if size is not None), default=None) for sizes in by_side)
            yield Measure(section, f"fullest GPU, {word}", Unit.BYTES, highest)
            continue
        for place in range(most):
            values = tuple(sizes[place] if place < len(sizes) else None for sizes in by_side)
            yield Measure(section, f"GPU {place}, {word}", Unit.BYTES, values)
    looks: tuple[tuple[str, ReadValue], ...] = (
        ("process on its GPU, by NVML", lambda side: _find_highest(side, "nvml_process_bytes")),
        ("host RSS of a rank", lambda side: max((rank.rss_peak_bytes for rank in side.view.ranks), default=None)),
        ("host RSS of all ranks", lambda side: sum(rank.rss_peak_bytes for rank in side.view.ranks) or None),
    )
    yield from _build_measures(section, Unit.BYTES, sides, looks)


def _find_highest(side: _Side, column: str) -> int | None:
    found = [int(process.step_rows[column].max()) for process in side.source.rank_steps if len(process.step_rows)]
    return max((size for size in found if size > 0), default=None)


def _compare_findings(sides: Sides) -> Iterator[Measure]:
    """How it ended, and for each finding where it was first."""
    yield Measure("What happened", "end", Unit.TEXT, tuple(map(_describe_end, sides)))
    names = dict.fromkeys(finding.name for side in sides for finding in side.findings)
    for name in names:
        yield Measure(
            "What happened", name.replace("_", " "), Unit.TEXT, tuple(_describe_finding(side, name) for side in sides)
        )


def _describe_end(side: _Side) -> str:
    job = side.view.job
    if job.state is State.ENDED:
        return "ended" if job.exit_code is None else f"exit code {job.exit_code}"
    return {State.LOST: "nobody saw it", State.DETACHED: "detached from"}.get(job.state, "it runs")


def _describe_finding(side: _Side, name: str) -> str | None:
    found = [finding for finding in side.findings if finding.name == name]
    if not found:
        return None
    where = "yes" if found[0].step is None else f"step {found[0].step}"
    return where if len(found) == 1 else f"{where} and {len(found) - 1} more"
