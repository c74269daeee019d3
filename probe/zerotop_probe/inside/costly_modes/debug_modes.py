"""Note modes for debugging that slow down each iteration while they are on: autograd's anomaly mode, PyTorch's profiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from zerotop_probe.inside.guard import CostMeter, Guard, wrap_method
from zerotop_probe.inside.stacks.own_lines import OwnLines, OwnPlace
from zerotop_probe.recording import events
from zerotop_probe.recording.event_values import ANOMALY, PROFILER

_ANOMALY_MODULE, _PROFILER_MODULE = "torch.autograd.anomaly_mode", "torch.autograd.profiler"
# The methods of its classes that switch anomaly mode on or off.
_SWITCHES = (("detect_anomaly", "__enter__"), ("set_detect_anomaly", "__init__"), ("set_detect_anomaly", "__exit__"))
# A script may switch a mode in each step.
_MOST_CHANGES = 20


# Called with the time, the name of the event, and its fields.
WriteEvent = Callable[..., None]


class ModeChange(NamedTuple):
    """A mode is on, or off, since ``begin_ns`` (CLOCK_MONOTONIC); ``place``: where it was switched, if that is known."""

    mode: str
    is_on: bool
    begin_ns: int
    place: OwnPlace | None


class DebugModes:
    """Reads PyTorch's mode flags, which takes a tenth of a microsecond, and notes the line that switches anomaly mode.

    A mode that a script switches on for part of each step counts as on.
    """

    def __init__(self, meter: CostMeter) -> None:
        self._write_event: WriteEvent = _write_nothing
        self._names_lines = False
        self._meter = meter
        self._guard = Guard("debug modes", meter)
        self._is_on = {ANOMALY: False, PROFILER: False}
        self._looked_ns = 0
        # When anomaly mode was first on since the last look, 0 if not; when it was switched last; and where.
        self._seen_ns = self._switched_ns = 0
        self._place: OwnPlace | None = None
        self._own_lines = OwnLines()
        self._changes_left = _MOST_CHANGES

    def begin_recording(self, write_event: WriteEvent, *, names_lines: bool) -> None:
        """Take changes for another recording from now on; ``names_lines``: with lines of the job's code."""
        self._write_event, self._names_lines = write_event, names_lines
        self._is_on = {ANOMALY: False, PROFILER: False}
        self._looked_ns = 0
        self._changes_left = _MOST_CHANGES

    def install_hooks(self) -> None:
        """Note from now on where anomaly mode is switched. Without effect before PyTorch is loaded."""
        module = sys.modules.get(_ANOMALY_MODULE)
        for owner, method in _SWITCHES:
            if (found := getattr(module, owner, None)) is not None:
                wrap_method(found, method, _read_state, self._note_switch, self._meter)

    def _note_switch(self, was_on: tuple[int, bool], time_ns: int, flags: int, result: Any) -> None:
        is_on = _is_anomaly_on()
        if is_on == was_on[1] or not self._changes_left or _is_called_by_torch(sys._getframe()):
            return
        self._switched_ns = time_ns
        if is_on:
            self._seen_ns = self._seen_ns or time_ns
            if not self._is_on[ANOMALY]:
                self._place = self._own_lines.find_place(sys._getframe())

    def write_changes(self, time_ns: int, step: int) -> None:
        """Record the changes since the last look; ``step`` is the last finished one. Never raises."""
        self._guard.run(self._write_new, time_ns, step)

    def _write_new(self, time_ns: int, step: int) -> None:
        for change in self.take_changes(time_ns):
            place = change.place._asdict() if change.place is not None else {}
            facts = {"mode": change.mode, "on": change.is_on, "begin_ns": change.begin_ns}
            self._write_event(time_ns, events.DebugMode, step=step, **facts, **place)

    def take_changes(self, time_ns: int) -> Iterator[ModeChange]:
        """Yield the modes that are on or off other than at the last look."""
        looked_ns, self._looked_ns = self._looked_ns or time_ns, time_ns
        seen_ns, self._seen_ns = self._seen_ns, 0
        if (bool(seen_ns) or _is_anomaly_on()) != self._is_on[ANOMALY] and self._changes_left:
            is_on = not self._is_on[ANOMALY]
            begin_ns = (seen_ns if is_on else self._switched_ns) or looked_ns
            yield self._change(ModeChange(ANOMALY, is_on, begin_ns, self._place if self._names_lines else None))
        if _is_profiler_on() != self._is_on[PROFILER] and self._changes_left:
            yield self._change(ModeChange(PROFILER, not self._is_on[PROFILER], looked_ns, None))

    def _change(self, change: ModeChange) -> ModeChange:
        self._is_on[change.mode] = change.is_on
        self._changes_left -= 1
        return change


def _write_nothing(time_ns: int, event: type[events.Event], **facts: Any) -> None:
    pass


def _is_called_by_torch(frame: FrameType | None) -> bool:
    """Whether PyTorch itself switches the mode, as torch.compile does while it traces a model."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("zerotop_probe", _ANOMALY_MODULE)):
            return module.startswith("torch.")
        frame = frame.f_back
    return False


def _read_state(time_ns: int, owner: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[int, bool]:
    return time_ns, _is_anomaly_on()


def _is_anomaly_on() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.is_anomaly_enabled())


def _is_profiler_on() -> bool:
    """Whether torch.profiler or the older torch.autograd.profiler records now, in any thread."""
    return bool(getattr(sys.modules.get(_PROFILER_MODULE), "_is_profiler_enabled", False))
