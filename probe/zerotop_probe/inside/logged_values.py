"""Record the loss, gradient norm and learning rate of a training, where they are numbers on the host.

A tensor on a device is never read: that would wait for the device.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zerotop_probe.inside.guard import CostMeter, Guard
from zerotop_probe.recording.logged_names import find_column, put_usual_first
from zerotop_probe.recording.rings.ring_files import RankFiles, TableWriter
from zerotop_probe.recording.tables import LOGGED, LOGGED_BITS, NO_RATE, OPTIMIZER_RATE, RATES_ARE_0

# Rates that stay 0 are recorded again after this part more of the steps.
_MORE = 16
_MODE_COUNTS = ("_len_torch_dispatch_stack", "_len_torch_function_stack")


class LoggedValues:
    """Writes the table LOGGED, which exists from the first value on."""

    def __init__(self, files: RankFiles) -> None:
        self._files = files
        self._writer: TableWriter | None = None

    def write(self, time_ns: int, logged: Mapping[Any, Any], marks: int = 0) -> None:
        """Record those values whose names are known, and which are on the host; the first of several with one meaning.

        ``marks``: further bits of LOGGED's ``known``.
        """
        values: dict[str, float] = {}
        for name, value in put_usual_first((name, value) for name, value in logged.items() if isinstance(name, str)):
            column = find_column(name)
            number = read_number(value) if column is not None and column not in values else None
            if column is not None and number is not None:
                values[column] = number
        if values:
            if self._writer is None:
                self._writer = self._files.open_table(LOGGED)
            known = sum(LOGGED_BITS[column] for column in values)
            self._writer.write(time_ns, *(values.get(column, float("nan")) for column in LOGGED_BITS), known | marks, 0)


class _RateMark:
    """Marks readings at which no group of parameters has a learning rate: these are recorded again as steps go on."""

    def __init__(self) -> None:
        self._next_step = 0

    def find(self, rate: float | None, groups: Iterable[Mapping[str, Any]], step: int) -> int:
        """Return RATES_ARE_0 if ``rate`` and those of all groups are as good as 0 and that is to be recorded, else 0."""
        if (
            rate is None
            or not abs(rate) <= NO_RATE
            or step < self._next_step
            or not all(_has_no_rate(group) for group in groups)
        ):
            return 0
        self._next_step = step + 1 + step // _MORE
        return RATES_ARE_0


class EngineValues:
    """Records what a DeepSpeed engine has on the host, at some steps: a :class:`.recorder.StepFollower`."""

    def __init__(self, engine: Any, logged: LoggedValues, meter: CostMeter) -> None:
        self._engine = weakref.ref(engine)
        self._logged = logged
        self._guard = Guard("values of the engine", meter)
        self._last: dict[str, float] = {}
        self._mark = _RateMark()

    def is_due(self, time_ns: int) -> bool:
        """Whether the engine still exists."""
        return self._engine() is not None

    def end_step(self, time_ns: int, step: int) -> None:
        """Record the values if they have changed."""
        self._guard.run(self._record_changes, time_ns, step)

    def _record_changes(self, time_ns: int, step: int) -> None:
        engine = self._engine()
        groups = getattr(getattr(engine, "optimizer", None), "param_groups", None)
        values = {
            "grad_norm": read_number(getattr(engine, "_global_grad_norm", None)),
            "learning_rate": read_number(groups[0].get("lr")) if groups else None,
        }
        # Some versions have -1 for a norm that is infinite or NaN.
        known = {name: value for name, value in values.items() if value is not None and not value < 0}
        mark = self._mark.find(known.get("learning_rate"), groups or (), step)
        if known != self._last:
            self._last = known
            self._logged.write(time_ns, known, mark)
        elif mark:
            self._logged.write(time_ns, {"learning_rate": known["learning_rate"]}, mark)


class OptimizerRate:
    """Records the learning rate in a loop's optimizer, at some steps: a :class:`.recorder.StepFollower`."""

    def __init__(self, list_optimizers: Callable[[], Mapping[int, Any]], logged: LoggedValues, meter: CostMeter) -> None:
        """``list_optimizers``: returns those that are alive, by number; the first of them counts."""
        self._list_optimizers = list_optimizers
        self._logged = logged
        self._guard = Guard("learning rate", meter)
        self._last: float | None = None
        self._mark = _RateMark()

    def is_due(self, time_ns: int) -> bool:
        """Whether it is on."""
        return self._guard.is_on

    def end_step(self, time_ns: int, step: int) -> None:
        """Record the rate if it has changed."""
        self._guard.run(self._record_change, time_ns, step)

    def _record_change(self, time_ns: int, step: int) -> None:
        optimizers = list(self._list_optimizers().values())
        rate = read_number(optimizers[0].param_groups[0].get("lr")) if optimizers else None
        mark = self._mark.find(rate, (group for one in optimizers for group in one.param_groups), step)
        if rate is not None and (rate != self._last or mark):
            self._last = rate
            self._logged.write(time_ns, {"learning_rate": rate}, OPTIMIZER_RATE | mark)


def _has_no_rate(group: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a group of parameters is as good as 0, and the optimizer does not make its own."""
    rate = group.get("lr")
    return isinstance(rate, (float, int)) and abs(rate) <= NO_RATE and not group.get("relative_step")


def read_number(value: Any) -> float | None:
    """Return a number of Python or NumPy, or that in a tensor on the host; None for anything else."""
    if isinstance(value, (float, int)):
        return None if isinstance(value, bool) else float(value)
    kind = type(value)
    if kind.__module__ == "numpy":
        return float(value) if getattr(value, "ndim", 1) == 0 and value.dtype.kind == "f" else None
    torch = sys.modules.get("torch")
    if torch is None or kind is not torch.Tensor or value.device.type != "cpu" or value.numel() != 1:
        return None
    # A mode of the job would see the reading as an operation of the job.
    has_modes = any(getattr(torch._C, name, int)() for name in _MODE_COUNTS)
    return None if has_modes else float(value.detach().item())
