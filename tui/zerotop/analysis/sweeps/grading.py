"""Predictions beside what runs measured: those that were kept at a launch, and those that can be made afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from zerotop.analysis.memory.expected.beyond_allocated import JobMemory, estimate_memory
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup
from zerotop.analysis.sweeps.baseline import Baseline, NoBaselineError
from zerotop.analysis.sweeps.what_if import name_offload, predict_memory
from zerotop.analysis.sweeps.what_if_time import predict_time
from zerotop.recording.reader import Recording
from zerotop_probe.recording.directory import EXPECTED

Ends = tuple[float, float, float]
"""The least, likely and most of a figure: bytes, or seconds."""

FIGURES = ("allocated", "reserved", "NVML", "host", "time")
FORMULAS, WHAT_IF, KEPT = "formulas", "what-if", "kept"
_INTS = ("stage", "ranks", "micro_batch", "sequence", "accumulation")


@dataclass(frozen=True, slots=True)
class Expectation:
    """A prediction and the setting that it is of."""

    stage: int
    offload: str  # one of OFFLOAD_DEVICES
    ranks: int
    micro_batch: int
    sequence: int  # 0 where tokens are not counted
    accumulation: int
    figures: Mapping[str, Ends]  # of FIGURES
    question: str = ""  # the command that asked

    def find_difference(self, base: Baseline) -> str:
        """Return how the run's setting differs from the expected one; "" if it does not."""
        setup, work = base.setup, base.work
        ran = Expectation(setup.stage, name_offload(setup), setup.ranks, *_describe_work(work), {})
        skipped = () if self.sequence and ran.sequence else ("sequence",)
        for name in ("stage", "offload", *_INTS[1:]):
            asked, found = getattr(self, name), getattr(ran, name)
            if asked != found and name not in skipped and not (setup.is_loop and name == "stage"):
                return f"asked was {name.replace('_', '-')} {asked}, and it ran with {found}"
        return ""


@dataclass(frozen=True, slots=True)
class Grade:
    """What one prediction said, and what was measured; or why there is none."""

    recording: str
    source: str  # FORMULAS, WHAT_IF or KEPT
    asked: str = ""  # the recording that a what-if started from, or the question that was kept
    figures: Mapping[str, tuple[Ends, float]] = field(default_factory=dict)  # said and measured, by FIGURES
    refusal: str = ""


def build_expectation(setting: EngineSetup, work: Workload, memory: JobMemory, seconds: Ends | None) -> Expectation:
    """Return what a prediction says, to be kept."""
    figures = collect_figures(memory, seconds)
    return Expectation(setting.stage, name_offload(setting), setting.ranks, *_describe_work(work), figures)


def collect_figures(memory: JobMemory, seconds: Ends | None) -> dict[str, Ends]:
    """Return the figures of a prediction."""
    parts = {"allocated": memory.allocated, "reserved": memory.reserved, "NVML": memory.device, "host": memory.host}
    figures = {name: (part.low, part.likely, part.high) for name, part in parts.items() if part.likely}
    return figures | ({"time": seconds} if seconds is not None else {})


def _describe_work(work: Workload) -> tuple[int, int, int]:
    return work.micro_batch, work.sequence, work.accumulation


def read_expectation(recording: Recording) -> Expectation | None:
    """Return what was expected of a recorded run; None without it."""
    return parse_expectation(recording.info.get(EXPECTED))


def parse_expectation(content: Any) -> Expectation | None:
    """Return what a recording file kept; None without one, or of a damaged one."""
    try:
        figures = {name: tuple(map(float, content["figures"][name])) for name in FIGURES if name in content["figures"]}
        numbers = {name: int(content[name]) for name in _INTS}
        if any(len(ends) != 3 for ends in figures.values()):
            return None
        return Expectation(offload=str(content["offload"]), question=str(content["question"]), figures=figures, **numbers)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        return None


def measure_figures(base: Baseline) -> dict[str, float]:
    """Return what a run measured."""
    time = base.times.iteration if base.times is not None else None
    measured = {
        "allocated": base.peak,
        "reserved": base.reserved,
        "NVML": base.nvml,
        "host": base.host_rss,
        "time": time,
    }
    return {name: float(value) for name, value in measured.items() if value}


def grade_formulas(base: Baseline) -> Grade:
    """Return what the formulas say of a recorded run without looking at its measurements."""
    if base.shape is None:
        return Grade(base.name, FORMULAS, refusal="the sizes of its layers were not recorded")
    memory = estimate_memory(base.shape, base.setup, base.work, gpu=base.gpu, gpu_bytes=base.gpu_bytes, rules=base.rules)
    return _grade(base, FORMULAS, "", build_expectation(base.setup, base.work, memory, None))


def grade_kept(base: Baseline, kept: Expectation) -> Grade:
    """Return what was expected at the launch."""
    difference = kept.find_difference(base)
    return Grade(base.name, KEPT, kept.question, refusal=difference) if difference else _grade(base, KEPT, "", kept)


def grade_pairs(bases: Sequence[Baseline]) -> Iterator[Grade]:
    """Yield what each recording says of each other one of the same model on the same type of GPU; settings count once."""
    seen = set()
    for base, target in permutations(bases, 2):
        key = (_describe_setting(base), _describe_setting(target))
        if key[0] == key[1] or key in seen or not is_same_job(base, target):
            continue
        seen.add(key)
        try:
            setup, work = ask_for(base, target)
            memory = predict_memory(base, setup, work)
        except NoBaselineError as error:
            yield Grade(target.name, WHAT_IF, base.name, refusal=str(error))
            continue
        time = predict_time(base, setup, work, target.nodes)
        yield _grade(target, WHAT_IF, base.name, build_expectation(setup, work, memory, time.seconds if time.rows else None))


def ask_for(base: Baseline, target: Baseline) -> tuple[EngineSetup, Workload]:
    """Return the setting of another recording as a change of a recorded one."""
    names = ("stage", "offload_optimizer", "offload_parameters", "ranks")
    setup = replace(base.setup, **{name: getattr(target.setup, name) for name in names})
    return setup, replace(target.work, foreach=base.work.foreach)


def is_same_job(one: Baseline, other: Baseline) -> bool:
    """Return whether two settings are of one model, library and type of GPU."""
    keys = [(b.setup.parameters, b.setup.trainable, b.setup.is_loop, b.setup.bytes_each, b.gpu) for b in (one, other)]
    return keys[0] == keys[1]


def _describe_setting(base: Baseline) -> tuple[object, ...]:
    setup = base.setup
    job = (setup.parameters, setup.trainable, base.gpu)
    return (*job, setup.stage, name_offload(setup), setup.ranks, *_describe_work(base.work), base.work.checkpointing)


def _grade(base: Baseline, source: str, asked: str, said: Expectation) -> Grade:
    measured = measure_figures(base)
    figures = {name: (said.figures[name], measured[name]) for name in FIGURES if name in said.figures and name in measured}
    return Grade(base.name, source, asked or said.question, figures)


def describe_errors(grade: Grade) -> str:
    """Return ``allocated -1.2 %, time +8.0 %``."""
    return ", ".join(f"{name} {ends[1] / truth - 1:+.1%}" for name, (ends, truth) in grade.figures.items())
