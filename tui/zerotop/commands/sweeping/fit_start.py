"""Where ``fit`` starts: memory over the searched value, by the formulas or by what-if from a run that was recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zerotop.analysis.memory.expected.beyond_allocated import JobMemory
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import TrainedModel
from zerotop.analysis.sweeps.asked_setting import Changes, answer_changes
from zerotop.analysis.sweeps.baseline import Baseline, NoBaselineError
from zerotop.analysis.sweeps.estimates import Hardware, estimate_option
from zerotop.analysis.sweeps.search import Line
from zerotop.analysis.sweeps.settings import (
    ACCUMULATION,
    CHECKPOINTING,
    GPUS,
    MICRO_BATCH,
    OFFLOAD,
    OFFLOAD_DEVICES,
    SEQ_LENGTH,
    STAGE,
)
from zerotop.commands.sweeping.point_job import DEFAULTS
from zerotop.recording.sweeps import Value

Predict = Callable[[Mapping[str, Value]], JobMemory]


class SearchStart(NamedTuple):
    """Allocated memory near the value at which a GPU is full, and what is expected in blocks too small to use."""

    line: Line
    unusable_slope: float  # bytes for each unit of the searched value


class Knowledge(NamedTuple):
    """What is known of a training before a value is tried."""

    shape: ModelShape | None  # of the demo's model
    base: Baseline | None  # of a run: the last one, or another recording

    @property
    def predict(self) -> Predict | None:
        """The prediction of a setting's memory: what-if from a run, else the formulas; None without either."""
        if self.base is not None:
            return predict_from(self.base)
        return predict_by_formulas(self.shape) if self.shape is not None and self.shape.parameters is not None else None


def find_start(
    predict: Predict, settings: Mapping[str, Value], searched: str, values: Sequence[int], limit_bytes: float | None
) -> SearchStart | None:
    """Return where a search of ascending values starts; None where nothing can be predicted."""
    full = values[-1]
    try:
        if limit_bytes is not None:
            sizes = ((value, predict({**settings, searched: value}).allocated.likely) for value in values)
            full = next((value for value, size in sizes if size > limit_bytes), full)
        # Near full memory one moment decides, and it is linear.
        low = max(1, full // 2)
        near, far = (predict({**settings, searched: value}) for value in (low, full))
    except NoBaselineError:
        return None
    slope = (far.allocated.likely - near.allocated.likely) / max(1, full - low)
    if slope <= 0:
        return None
    # The optimizer's state, which the first step allocates, splits the blocks that the logits need in the next step.
    on_gpu = OFFLOAD_DEVICES[str(settings.get(OFFLOAD, "none"))][0] == "none"
    return SearchStart(Line(slope, far.allocated.likely - slope * full), far.stuck.bytes / full if on_gpu else 0.0)


def predict_from(base: Baseline) -> Predict:
    """Return what-if from a recording."""

    def predict(settings: Mapping[str, Value]) -> JobMemory:
        def find_number(name: str) -> int | None:
            return int(settings[name]) if name in settings else None

        has_zero = not base.setup.is_loop
        changes = Changes(
            stage=find_number(STAGE) if has_zero else None,
            offload=str(settings[OFFLOAD]) if OFFLOAD in settings and has_zero else None,
            micro_batch=find_number(MICRO_BATCH),
            seq_length=find_number(SEQ_LENGTH),
            accumulation=find_number(ACCUMULATION),
            gpus=find_number(GPUS),
            checkpointing=str(settings[CHECKPOINTING]) if CHECKPOINTING in settings else None,
        )
        return answer_changes(base, changes).memory

    return predict


def predict_by_formulas(shape: ModelShape) -> Predict:
    """Return the estimate of the demo's training, whose parameters are known."""
    model = TrainedModel(shape.parameters or 0, shape.parameters or 0, shape.largest_layer)

    def predict(settings: Mapping[str, Value]) -> JobMemory:
        known = DEFAULTS | dict(settings)
        work = Workload(
            micro_batch=int(known[MICRO_BATCH]),
            sequence=int(known[SEQ_LENGTH]),
            accumulation=int(known.get(ACCUMULATION, 1)),
            checkpointing="full" if known.get(CHECKPOINTING) == "on" else "none",
        )
        mode = int(known.get(STAGE, 2)), str(known.get(OFFLOAD, "none"))
        return estimate_option(model, Hardware(gpus=int(known[GPUS])), shape, work, mode, ()).memory

    return predict
