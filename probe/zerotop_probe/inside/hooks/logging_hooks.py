"""The values that training libraries log: the Trainer's, those of DeepSpeed's monitor, and Lightning's."""

from __future__ import annotations

import functools
from typing import Any

from zerotop_probe.inside.guard import is_wrapped, on_removal, wrap_method, wrap_plain_function
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.recording.tables import OF_NEXT_STEP

# Lightning's function that makes numbers of tensors for its loggers, in different versions.
_CONVERTERS = ("convert_tensors_to_scalars", "metrics_to_scalars")


class LoggingHooks:
    """Hooks on the functions that get logged values as numbers, in one process."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._first_rates: tuple[int, dict[str, Any]] | None = None  # read before anything was recorded

    def install_trainer(self, trainer_class: Any) -> None:
        """Wrap the logging of ``transformers.Trainer``."""
        wrap_method(trainer_class, "log", self._read_logs, self._end_nothing, self._probe.meter)

    def install_monitor(self, monitor_class: Any) -> None:
        """Wrap DeepSpeed's ``MonitorMaster``, which is called only if the job has switched on a monitor."""
        wrap_method(monitor_class, "write_events", self._read_events, self._end_nothing, self._probe.meter)

    def install_lightning(self, module: Any) -> None:
        """Wrap the converter of Lightning's logger connector, the ``module``."""
        for name in _CONVERTERS:
            original = getattr(module, name, None)
            if original is not None and not is_wrapped(original):
                where, meter = f"{module.__name__}.{name}", self._probe.meter
                wrapper = wrap_plain_function(original, where, self._begin_conversion, self._end_conversion, meter)
                setattr(module, name, wrapper)
                on_removal(functools.partial(_restore_function, module, name, wrapper, original))

    def install_rate_monitor(self, monitor_class: Any) -> None:
        """Wrap the method of Lightning's ``LearningRateMonitor`` that reads the rates: it gives them to loggers directly."""
        wrap_method(monitor_class, "_extract_stats", lambda *_: self, self._end_rates, self._probe.meter)

    def _read_logs(self, time_ns: int, trainer: Any, args: Any, kwargs: Any) -> None:
        recorder, logs = self._probe.recorder, kwargs.get("logs", args[0] if args else None)
        # At the end of the training it logs the mean loss of all steps.
        if recorder is not None and isinstance(logs, dict) and not {"train_loss", "train_runtime"}.issubset(logs):
            recorder.logged.write(time_ns, logs)

    def _read_events(self, time_ns: int, monitor: Any, args: Any, kwargs: Any) -> None:
        recorder, logged = self._probe.recorder, kwargs.get("event_list", args[0] if args else None)
        if recorder is not None and isinstance(logged, (list, tuple)):
            recorder.logged.write(time_ns, {event[0]: event[1] for event in logged})

    def _end_nothing(self, token: Any, time_ns: int, flags: int, result: Any) -> None:
        """Do nothing: it is never called, as no call has a token."""

    def _begin_conversion(self, time_ns: int, subject: Any, args: Any, kwargs: Any) -> Recorder | None:
        recorder = self._find_recorder()
        return recorder if recorder is not None and recorder.find_phase("eval") is None else None

    def _end_conversion(self, recorder: Recorder, time_ns: int, flags: int, result: Any) -> None:
        if isinstance(result, dict):
            recorder.logged.write(time_ns, result)

    def _end_rates(self, token: Any, time_ns: int, flags: int, result: Any) -> None:
        """Record the rates of the step or epoch that begins; the first ones once there is a recorder."""
        recorder = self._find_recorder()
        if isinstance(result, dict) and recorder is not None:
            recorder.logged.write(time_ns, result, OF_NEXT_STEP)
        elif isinstance(result, dict) and result:
            self._first_rates = time_ns, result

    def _find_recorder(self) -> Recorder | None:
        recorder = self._probe.recorder
        if recorder is not None and self._first_rates is not None:
            rates, self._first_rates = self._first_rates, None
            recorder.logged.write(*rates, OF_NEXT_STEP)
        return recorder


def _restore_function(module: Any, name: str, wrapper: Any, original: Any) -> None:
    if getattr(module, name, None) is wrapper:
        setattr(module, name, original)
