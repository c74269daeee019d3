"""Every combination of number of GPUs, stage, offload mode and micro-batch: those that fit, and the fastest of those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import TrainedModel
from zerotop.analysis.sweeps.asked_setting import Changes, WhatIfAnswer, answer_changes
from zerotop.analysis.sweeps.baseline import Baseline, NoBaselineError
from zerotop.analysis.sweeps.estimates import Hardware, OptionEstimate, build_option, estimate_option, list_options
from zerotop.analysis.sweeps.settings import OFFLOAD_DEVICES
from zerotop.analysis.sweeps.what_if_verdict import describe_growth

_MOST_GROWTH = 16  # times the recorded rows: farther away nothing was compared with runs
_MOST_ROWS = 1024

Predict = Callable[[int, int, str, int], OptionEstimate]
"""The estimate of a number of GPUs for each node, a stage, an offload mode and rows of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Space:
    """The values that are combined."""

    gpus: Sequence[int]  # of a node
    modes: Sequence[tuple[int, str]]  # stage and offload
    rows: Sequence[int]  # ascending


def list_powers(most: int, *others: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``most``, and the others, in order."""
    return sorted({*(1 << place for place in range(most.bit_length())), *others})


def find_combinations(space: Space, predict: Predict, hardware: Hardware) -> Iterator[OptionEstimate]:
    """Yield each combination up to the first micro-batch that does not fit; without those that have no formula."""
    for gpus in space.gpus:
        for stage, offload in space.modes:
            for rows in space.rows:
                try:
                    option = predict(gpus, stage, offload, rows)
                except NoBaselineError:
                    break
                yield option
                if option.fits(hardware) is False:
                    break


def list_recorded(base: Baseline, changes: Changes, gpu_bytes: int | None, own: Sequence[Estimate]) -> list[OptionEstimate]:
    """Return every stage and offload mode of a recorded training. Raises NoBaselineError."""
    modes = list_options(is_loop=base.setup.is_loop, loop_stage=base.setup.stage)
    return [
        build_recorded(answer_changes(base, _choose_mode(base, changes, *mode), gpu_bytes), mode[1], own) for mode in modes
    ]


def _choose_mode(base: Baseline, changes: Changes, stage: int, offload: str) -> Changes:
    return changes if base.setup.is_loop else replace(changes, stage=stage, offload=offload)


def rank_recorded(base: Baseline, changes: Changes, gpu_bytes: int | None, *, all_gpus: bool) -> list[OptionEstimate]:
    """Return the combinations of a recorded training, the best first; what is asked for is not varied.

    Numbers of GPUs are varied within the recorded node. Raises NoBaselineError where nothing can be predicted.
    """
    answer = answer_changes(base, changes, gpu_bytes)
    gpus, work = answer.setting.gpus, answer.setting.work
    is_varied = all_gpus and changes.gpus is None and answer.setting.nodes == 1 and base.gpus == base.setup.ranks
    modes = [
        (stage, offload)
        for stage, offload in list_options(is_loop=base.setup.is_loop, loop_stage=base.setup.stage)
        if base.setup.is_loop or (changes.stage in (None, stage) and changes.offload in (None, offload))
    ]
    is_open = changes.micro_batch is None and answer.gpu_bytes is not None
    space = Space(
        gpus=list_powers(gpus, gpus) if is_varied else [gpus],
        modes=modes,
        rows=list_powers(_MOST_GROWTH * work.micro_batch, work.micro_batch) if is_open else [work.micro_batch],
    )

    def predict(gpus: int, stage: int, offload: str, rows: int) -> OptionEstimate:
        asked = replace(_choose_mode(base, changes, stage, offload), gpus=gpus, micro_batch=rows)
        return build_recorded(answer_changes(base, asked, gpu_bytes), offload)

    return rank_options(find_combinations(space, predict, find_hardware(answer)), find_hardware(answer))


def rank_model(
    model: TrainedModel, hardware: Hardware, shape: ModelShape, work: Workload, *, is_batch_fixed: bool
) -> list[OptionEstimate]:
    """Return the combinations of a model that was not run, up to these GPUs of a node, the best first."""
    is_varied = hardware.nodes == 1
    is_fixed = is_batch_fixed or hardware.gpu_bytes is None
    space = Space(
        gpus=list_powers(hardware.gpus, hardware.gpus) if is_varied else [hardware.gpus],
        modes=list_options(is_loop=model.is_loop, loop_stage=3 if model.is_sharded else 0),
        rows=[work.micro_batch] if is_fixed else list_powers(_MOST_ROWS, work.micro_batch),
    )

    def predict(gpus: int, stage: int, offload: str, rows: int) -> OptionEstimate:
        # Of hundreds, and what is needed at most does not depend on cached segments.
        asked = replace(work, micro_batch=rows)
        return estimate_option(model, replace(hardware, gpus=gpus), shape, asked, (stage, offload), (), rules=None)

    return rank_options(find_combinations(space, predict, hardware), hardware)


def find_hardware(answer: WhatIfAnswer) -> Hardware:
    """Return where the asked setting would run."""
    setting, base = answer.setting, answer.base
    return Hardware(setting.gpus, setting.nodes, answer.gpu_bytes, base.gpu, base.host_bytes, limit_bytes=answer.limit_bytes)


def build_recorded(answer: WhatIfAnswer, offload: str, own: Sequence[Estimate] = ()) -> OptionEstimate:
    """Return the option that an answer is."""
    setting, time = answer.setting, answer.time
    seconds = time.seconds[1] if time.rows else None
    option = build_option(setting.setup, offload, answer.memory, find_hardware(answer), own, setting.work, seconds)
    failure = answer.failure
    has_failed = failure is not None and not failure.is_on_host
    fits_host = False if failure is not None and failure.is_on_host else option.fits_host
    most, left_out = answer.measured_most, answer.left_out or (failure if has_failed else None)
    return replace(
        option,
        measured_most=most,
        has_failed=has_failed,
        growth=describe_growth(answer),
        left_out=left_out,
        fits_host=fits_host,
    )


def rank_options(options: Iterator[OptionEstimate] | Sequence[OptionEstimate], hardware: Hardware) -> list[OptionEstimate]:
    """Return those that fit, the fastest first; then the others, the smallest first."""
    return sorted(
        options,
        key=lambda option: (
            (0, *_order_speed(option)) if option.is_usable(hardware) else (1, option.measure_needed(hardware))
        ),
    )


def choose_option(options: Sequence[OptionEstimate], hardware: Hardware) -> OptionEstimate | None:
    """Return the fastest option that fits."""
    return min((option for option in options if option.is_usable(hardware)), key=_order_speed, default=None)


_OFFLOADS = list(OFFLOAD_DEVICES)


def _order_speed(option: OptionEstimate) -> tuple[float, ...]:
    """Return the order: by speed where a run tells it; others without offload first, then by GPUs, and by partitions."""
    group = 1 if option.stage == 2 and not option.is_loop else option.stage
    rate = option.rate or 0.0
    return -rate, _OFFLOADS.index(option.offload), -option.gpus, group, -option.micro_batch, option.stage
