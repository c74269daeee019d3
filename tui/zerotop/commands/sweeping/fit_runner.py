"""``zerotop fit``: for each series the largest sequence length or micro-batch that fits, with few real runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.zero_model import compute_expected
from zerotop.analysis.sweeps.estimates import Hardware, TrainedModel, build_setup
from zerotop.analysis.sweeps.search import LargestSearch
from zerotop.analysis.sweeps.settings import CHECKPOINTING, GPUS, MICRO_BATCH, OFFLOAD, SEQ_LENGTH, STAGE
from zerotop.commands.sweeping.point_run import Interrupted, run_point
from zerotop.session.sweeps import OK, OUT_OF_MEMORY, Point, Result, Sweep, Value, write_sweep

# What a process takes besides PyTorch's memory, until one has been measured: CUDA's context and libraries.
_OTHER_BYTES = 1 << 30
# Of the demo's training script, where they are not given.
_DEFAULTS = {SEQ_LENGTH: 256, MICRO_BATCH: 4}


@dataclass(frozen=True, slots=True)
class LargestResult:
    """The largest value of one series."""

    settings: Mapping[str, Value]  # of the series
    largest: int | None  # that is known to fit
    failing: int | None  # smallest that is known not to fit
    is_final: bool  # no value between the two is left
    predicted: float | None  # before anything was measured
    allocated_bytes: int | None  # at the largest
    runs: int
    problem: str = ""  # why the search ended early


class FitRunner:
    """Searches the series one after another. Points are added to the sweep as they are tried."""

    def __init__(
        self,
        sweep: Sweep,
        searched: str,
        *,
        most_runs: int,
        gpu_bytes: int | None,
        shape: ModelShape | None,
        on_result: Callable[[Point], None],
    ) -> None:
        """``searched``: the setting to maximize; ``gpu_bytes``: memory of one GPU, None without one."""
        self.sweep = sweep
        self.runs = 0
        self.was_interrupted = False
        self._searched = searched
        self._most_runs = most_runs
        self._gpu_bytes = gpu_bytes
        self._other_bytes = _OTHER_BYTES
        self._shape = shape
        self._on_result = on_result
        self._slope: float | None = None  # bytes for each unit of the searched setting, of the series before
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stop the job that runs now, and the search."""
        self._stopping.set()

    def find_largest(self, settings: Mapping[str, Value]) -> LargestResult:
        """Search one series. Raises OSError if nothing can be written."""
        values = sorted({int(value) for value in self.sweep.plan.settings[self._searched]})
        limit = None if self._gpu_bytes is None else float(self._gpu_bytes - self._other_bytes)
        search = LargestSearch(values, limit, self._predict(settings, limit))
        predicted, before = search.predicted, self.runs
        sizes: dict[int, int | None] = {}
        problem = ""
        while not problem and (value := search.choose_next()) is not None:
            if self.runs >= self._most_runs:
                problem = f"the limit of {self._most_runs} runs is reached"
                break
            try:
                result = self._run({**settings, self._searched: value})
            except Interrupted:
                self.was_interrupted = True
                problem = "interrupted"
                break
            if result.outcome == OUT_OF_MEMORY:
                search.note_failing(value)
            elif result.outcome == OK:
                sizes[value] = result.allocated_peak_bytes
                search.note_fitting(value, result.allocated_peak_bytes)
                if self._gpu_bytes is not None and result.nvml_peak_bytes and result.reserved_peak_bytes:
                    self._other_bytes = max(0, result.nvml_peak_bytes - result.reserved_peak_bytes)
                    search.limit_bytes = float(self._gpu_bytes - self._other_bytes)
            else:
                problem = f"{self._searched.replace('_', '-')} {value} {result.outcome}: {result.reason}"
        fit = search.fit
        self._slope = fit.slope if fit is not None and fit.slope > 0 else self._slope
        largest = values[search.largest_fitting] if search.largest_fitting >= 0 else None
        failing = values[search.smallest_failing] if search.smallest_failing >= 0 else None
        size = sizes.get(largest) if largest is not None else None
        return LargestResult(settings, largest, failing, search.is_over, predicted, size, self.runs - before, problem)

    def _run(self, settings: Mapping[str, Value]) -> Result:
        """Run one value; its attempts count as runs."""
        ordered = {name: settings[name] for name in self.sweep.plan.settings}
        point = Point(len(self.sweep.points), ordered)
        left = self._most_runs - self.runs
        plan = replace(self.sweep.plan, retries=min(self.sweep.plan.retries, left - 1))
        result = run_point(self.sweep.path, plan, point, is_stopping=self._stopping.is_set)
        self.runs += result.attempts
        self.sweep = replace(self.sweep, points=(*self.sweep.points, replace(point, result=result)))
        write_sweep(self.sweep)
        self._on_result(self.sweep.points[-1])
        return result

    def _predict(self, settings: Mapping[str, Value], limit: float | None) -> float | None:
        """Return the value at which a GPU should be full: by the series before, else by the rule of thumb."""
        shape = self._shape
        if limit is None or shape is None or shape.parameters is None:
            return None
        model = TrainedModel(shape.parameters, shape.parameters, shape.largest_layer)
        hardware = Hardware(gpus=int(settings.get(GPUS, 1)))
        setup = build_setup(model, hardware, int(settings.get(STAGE, 2)), str(settings.get(OFFLOAD, "none")))
        room = limit - sum(compute_expected(setup).gpu.values())
        slope = self._slope
        if slope is None:
            other = MICRO_BATCH if self._searched == SEQ_LENGTH else SEQ_LENGTH
            each = shape.estimate_activations(0, recompute=settings.get(CHECKPOINTING) == "on")
            slope = each * int(settings.get(other, _DEFAULTS[other]))
        return max(0.0, room / slope)
