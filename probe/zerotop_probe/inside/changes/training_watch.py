"""Look for changes in the training itself where time or memory shifts, and rarely otherwise, and count tensors again.

Between two looks a step costs the comparison of two numbers. Looks take no more than a part of the probe's budget.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from statistics import median
from types import FrameType, MappingProxyType
from typing import Any

from zerotop_probe.inside.budget import read_budget
from zerotop_probe.inside.changes.bypassed_ddp import REDUCES, BypassedDdp
from zerotop_probe.inside.changes.checkpoint_calls import CHECKPOINTING
from zerotop_probe.inside.changes.held_tensors import describe_held
from zerotop_probe.inside.changes.input_shapes import InputShapes
from zerotop_probe.inside.changes.late_no_sync import NoSyncWatch
from zerotop_probe.inside.changes.setting_lines import SettingLines
from zerotop_probe.inside.changes.subnormal_state import holds_subnormal
from zerotop_probe.inside.changes.training_settings import Change, list_changes, list_first_flags, read_settings
from zerotop_probe.inside.guard import CostMeter, Guard, now
from zerotop_probe.inside.stacks.code_positions import find_calls_without, find_uses
from zerotop_probe.inside.stacks.own_lines import OwnPlace
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording import events
from zerotop_probe.recording.event_values import AGAIN, BYPASSED, FAILURE, INPUTS, NO_SYNC, OBJECTS, SUBNORMAL, UNOPTIMIZED

NAME = "training settings"
"""The name in the probe's errors."""

# Memory after a step has shifted if it differs by this share and these bytes from that at the last count, and that of its
# peak from the one before; time, if the last two durations both differ by this share from the median of those before.
_MEMORY_SHARE, _MEMORY_BYTES = 0.02, 32 << 20
_PEAK_SHARE, _PEAK_BYTES = 0.05, 64 << 20
_TIME_SHARE, _USUAL, _LAST = 0.08, 8, 2
# The part of the budget that looks may use, the part that those without a reason may use, and the time for which it is
# advanced (ns).
_PART, _RARE_PART, _ADVANCE_NS = 0.15, 0.05, 60_000_000_000
# The part with which tensors are counted again because memory changes: looks may have used theirs up.
_COUNT_PART = 0.3
# Time between two looks without a reason, and after a shift of the time without a change, which doubles each time (ns).
_RARE_NS, _PAUSE_NS, _LONGEST_PAUSE_NS = 15_000_000_000, 1_000_000_000, 8_000_000_000
_MOST_CHANGES = 100
# Looks after a call that changes the training, whatever the budget.
_MOST_GRANTED = 5
# Bytes in no category whose holders are searched, and the time between two searches, which doubles each time, and where the
# bytes have doubled (ns).
_LEAST_HELD, _HELD_PAUSE_NS, _DOUBLED_PAUSE_NS = 64 << 20, 5_000_000_000, 1_000_000_000
# Time between two counts because of memory, which doubles each time while it keeps changing (ns).
_COUNT_PAUSE_NS = 500_000_000
# Sizes of cuBLAS's workspaces, of which there are a few: other blocks may have the same size.
_WORKSPACES, _MOST_WORKSPACES = (33_554_432, 8_519_680), 4
# Forwards of a step that are asked whether autocast is on, until it is.
_MOST_ASKED = 4
_AUTOCAST, _OTHER_AUTOCAST = "autocast", "other_autocast"
_DTYPE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


class TrainingWatch:
    """The looks of one rank."""

    def __init__(self, meter: CostMeter, lines: SettingLines) -> None:
        self._meter = meter
        self._lines = lines
        self._guard = Guard(NAME, meter)
        self._share = read_budget()
        self.list_parts: Callable[[], tuple[list[Any], list[Any]]] = lambda: ([], [])
        """Returns the models and optimizers that train."""
        self.find_joined: Callable[[], int] = lambda: 0
        """Returns when the last of these models was called for the first time."""
        self.count_tensors: Callable[[str, int], None] = lambda when, step: None
        """Counts the tensors at a moment (``when`` of the event ``tensors``) of a step, and records them."""
        self.record_facts: Callable[[], None] = lambda: None
        """Records the facts of a loop again."""
        self.find_thread: Callable[[], int] = lambda: 0
        """Returns the number of the thread that trains."""
        self.autocast = ""
        """The dtype of autocast as the forwards of the last step show it; empty without autocast."""
        self.other_autocast: str | None = None
        """The same of the first model in a step that is not trained, such as a teacher; None if none was called."""
        self.no_sync: str | None = None
        """Whether the first forward of a step was within DDP's no_sync(), ``on`` or ``off``; or BYPASSED; None: no DDP."""
        self.bypassed = BypassedDdp()
        self._inputs = InputShapes()
        self.begin_recording(lambda time_ns, event, **facts: None, names_lines=False)

    def begin_recording(self, write_event: Callable[..., None], *, names_lines: bool) -> None:
        """Take changes for another recording from now on; ``names_lines``: with lines of the job's code."""
        self._write_event, self._names_lines = write_event, names_lines
        self._settings: dict[str, Any] | None = None
        self._models: list[weakref.ref[Any]] = []  # at the last look
        self._begin_ns = self._looked_ns = self._counted_ns = 0
        self._looked_step = -1
        self._look_ns = self._count_ns = 0  # what one takes
        self._spent_ns = 0
        self._pause_ns = _PAUSE_NS
        self._changes_left, self._granted_looks = _MOST_CHANGES, _MOST_GRANTED
        self._late_no_sync = NoSyncWatch()
        self._has_told_late = False
        self._last: tuple[int, int] | None = None  # time and step of the last call
        self._durations: deque[float] = deque(maxlen=_USUAL)
        self._counted_bytes = -1  # held after the step at the last count
        self._wants_look = self._wants_count = False
        self._has_shifted = False  # the time, since the last look
        self._looked_bytes = -1  # the peak of a step at the last look
        self.read_memory: Callable[[], tuple[int, int]] = lambda: (-1, -1)
        """Returns the bytes held after the last step, and the most in it; -1 if they are unknown."""
        self.wants_autocast = True
        """Whether the next forward of the model should be noted."""
        self._asked, self._is_on = 0, False  # forwards of this step, and whether autocast was on in one of them
        self.wants_other_autocast = True
        """The same of a model that is not trained."""
        self._read_ns: dict[str, int] = {}  # when settings that only forwards show were read last
        self._stood_ns: dict[str, int] = {}  # and last before the present value
        self._loading_line: list[OwnPlace] | None = None
        self._lines.is_on = False
        self._held_bytes = 0  # in no category, when their holders were last searched
        self._held_ns, self._held_pause_ns = -_HELD_PAUSE_NS, _HELD_PAUSE_NS // 2
        self._count_pause_ns = 0
        self._search_ns = 0  # what searches have taken

    def is_due(self, time_ns: int) -> bool:
        """Whether it is on; it judges by itself what to do."""
        return self._guard.is_on

    def end_step(self, time_ns: int, step: int) -> None:
        """Compare time and memory after a step, and look if there is a reason."""
        try:
            self._follow(time_ns, step)
        except BaseException as error:
            self._guard.settle(error)

    def _follow(self, time_ns: int, step: int) -> None:
        self._begin_ns = self._begin_ns or time_ns
        self._end_asking()
        if self.bypassed.is_lasting and self.no_sync != BYPASSED:
            self.no_sync, self._wants_look = BYPASSED, True
        if self._late_no_sync.is_lasting and not self._has_told_late:
            self._has_told_late = True
            self._guard.run_once(self._record_late_no_sync, step)
        self.wants_other_autocast = True
        self._lines.end_step()
        self._has_shifted |= self._follow_time(time_ns, step)
        held, peak = self.read_memory()
        if abs(peak - self._looked_bytes) > max(_PEAK_BYTES, _PEAK_SHARE * peak):
            self._wants_look, self._looked_bytes = True, peak
        if held >= 0 and abs(held - self._counted_bytes) > max(_MEMORY_BYTES, _MEMORY_SHARE * held):
            # What the first steps make is counted by the hooks.
            self._wants_count = self._counted_bytes >= 0
            self._wants_look |= self._wants_count
            self._counted_bytes = self._counted_bytes if self._wants_count else held
        if (
            self._settings is None
            or self._lines.has_noted
            or self._lines.unoptimized.is_due(step)
            or ((self._has_shifted or self._lines.unoptimized.may_be_new) and time_ns - self._looked_ns >= self._pause_ns)
        ):
            self._wants_look = True
        is_old = time_ns - self._looked_ns >= _RARE_NS
        part = _PART if self._wants_look else _RARE_PART
        is_granted = self._lines.has_noted and self._granted_looks > 0
        if (self._wants_look or is_old) and (is_granted or self._fits(self._look_ns, part, time_ns)):
            self._granted_looks -= is_granted
            self._look(time_ns, step)
        since_ns = time_ns - self._counted_ns
        wants_count = self._wants_count and since_ns >= self._count_pause_ns
        part = _COUNT_PART if wants_count else _RARE_PART
        if self._counted_ns == 0:
            self._counted_ns = time_ns
        elif (wants_count or since_ns >= 2 * _RARE_NS) and self._fits(self._count_ns, part, time_ns):
            self._count(step, held)

    def _follow_time(self, time_ns: int, step: int) -> bool:
        """Return whether the last steps take another time than those before."""
        last, self._last = self._last, (time_ns, step)
        if last is None or step <= last[1]:
            return False
        self._durations.append((time_ns - last[0]) / (step - last[1]))
        known = list(self._durations)
        usual, fresh = known[:-_LAST], known[-_LAST:]
        if len(usual) < _LAST:
            return False
        level = median(usual)
        return min(fresh) > (1 + _TIME_SHARE) * level or max(fresh) < (1 - _TIME_SHARE) * level

    def _fits(self, cost_ns: int, part: float, time_ns: int) -> bool:
        granted_ns = part * self._share * (time_ns - self._begin_ns + _ADVANCE_NS)
        return self._spent_ns + cost_ns <= granted_ns or (not self._looked_ns and self._share > 0)

    def _look(self, time_ns: int, step: int) -> None:
        modules, optimizers = self.list_parts()
        if not modules:
            return
        begin_ns, self._wants_look, self._has_shifted = now(), False, False
        self._lines.begin_look()
        before, since_ns, since_step = self._settings, self._looked_ns, self._looked_step
        unoptimized = self._lines.unoptimized
        seen = {
            CHECKPOINTING: self._lines.checkpoints.is_on,
            _OTHER_AUTOCAST: self.other_autocast,
            NO_SYNC: self.no_sync,
            UNOPTIMIZED: unoptimized.count(modules, optimizers, time_ns, step),
            SUBNORMAL: holds_subnormal(optimizers),
            **self._inputs.settings,
        }
        self._stood_ns[UNOPTIMIZED] = unoptimized.held_ns
        settings = read_settings(modules, optimizers, self.autocast) | seen
        known = [one for one in modules if any(model() is one for model in self._models)]
        # A model that was first called since the last look changes no other: what it adds has its own time.
        joined_ns = self.find_joined() if known and len(known) < len(modules) else 0
        without = read_settings(known, optimizers, self.autocast) | seen if joined_ns > since_ns else settings
        self._models = [weakref.ref(one) for one in modules]
        for name in (CHECKPOINTING, _OTHER_AUTOCAST, NO_SYNC):
            if before is not None and before[name] is None:
                before[name] = settings[name]
        self._settings = settings
        self._lines.checkpoints.install_hooks()  # PyTorch may have loaded them since
        self._looked_ns, self._looked_step = time_ns, step
        self._lines.is_on = self._names_lines
        if before is None:
            self._guard.run_once(self._record_flags, step)
        self._look_ns = self._spend(begin_ns)
        changes = [(one, 0) for one in list_changes(before, without)] if before is not None else []
        changes += [(one, joined_ns) for one in list_changes(without, settings)] if without is not settings else []
        if not changes or not self._changes_left:
            self._pause_ns = min(_LONGEST_PAUSE_NS, 2 * self._pause_ns)
            return
        self._changes_left -= 1
        self._pause_ns = _PAUSE_NS
        self._wants_count = True
        begin_ns = now()
        self._guard.run_once(self._record, changes, since_ns, since_step, step)
        self._guard.run_once(self.record_facts)
        self._durations.clear()

    def _record_flags(self, step: int) -> None:
        self._write_event(now(), events.TorchFlags, step=step, **list_first_flags(self._settings or {}))

    def _record(self, changes: list[tuple[Change, int]], since_ns: int, since_step: int, step: int) -> None:
        """Record changes, each with the time of the model that brought it, or 0."""
        frame = sys._getframe() if self._names_lines else None
        described = []
        for change, joined_ns in changes:
            is_bypassed = (change.name, change.after) == (NO_SYNC, BYPASSED)
            finds = self._names_lines and not joined_ns and not is_bypassed
            changed_ns, place = self._lines.find_place(change, since_ns, frame) if finds else (joined_ns or None, None)
            if is_bypassed:  # no line that has no_sync() did that
                changed_ns, self._stood_ns[NO_SYNC] = self.bypassed.first_ns, self.bypassed.last_ns
            facts: dict[str, Any] = {
                "name": change.name,
                "before": _format_value(change.before),
                "after": _format_value(change.after),
            }
            if change.name == OBJECTS:  # addresses say nothing
                facts |= {"before": "", "after": ""}
            facts |= {"changed_ns": changed_ns} if changed_ns is not None else {}
            stood_ns = self._stood_ns.get(change.name, 0)
            is_exact = is_bypassed or change.name.startswith(INPUTS)  # of these a forward has shown when they stood last
            facts |= {"begin_ns": stood_ns} if 0 < stood_ns < since_ns or is_exact else {}
            described.append({**facts, **(place._asdict() if place is not None else {})})
        facts = {"last_step": since_step, "begin_ns": since_ns, "changes": described}
        self._write_event(now(), events.TrainingChanged, step=step, **facts)

    def _count(self, step: int, held: int) -> None:
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized() and cuda.is_current_stream_capturing():
            return  # a graph records what happens now
        begin_ns, searched_ns, self._wants_count = now(), self._search_ns, False
        is_again = begin_ns - self._counted_ns < 2 * _RARE_NS
        self._count_pause_ns = max(_COUNT_PAUSE_NS, 2 * self._count_pause_ns) if is_again else 0
        self._counted_ns, self._counted_bytes = begin_ns, held
        self._guard.run_once(self.count_tensors, AGAIN, step)
        # A search is rare, and a cost of its own.
        self._count_ns = now() - begin_ns - (self._search_ns - searched_ns)
        self._spent_ns += self._count_ns

    def count_at_failure(self, step: int) -> None:
        """Count the tensors while an allocation fails, in whatever thread that is; what holds memory then is searched."""
        self._held_ns = now() - self._held_pause_ns
        self.count_tensors(FAILURE, step)

    def find_held(self, unclaimed: dict[int, int]) -> list[dict[str, Any]] | None:
        """Name the holders of blocks in no category if these hold much more, or less, than at the last search."""
        workspaces = [size for size in unclaimed.values() if size in _WORKSPACES][:_MOST_WORKSPACES]
        held, time_ns = sum(unclaimed.values()) - sum(workspaces), now()
        # A holder that is found early holds little: where the memory has doubled, the search comes sooner.
        pause_ns = _DOUBLED_PAUSE_NS if held >= 2 * self._held_bytes else self._held_pause_ns
        is_due = time_ns - self._held_ns >= pause_ns
        if not self._names_lines or not is_due or abs(held - self._held_bytes) < max(_LEAST_HELD, 0.1 * self._held_bytes):
            return None
        self._held_bytes, self._held_ns = held, time_ns
        self._held_pause_ns *= 2
        try:
            return describe_held(unclaimed, self.find_frame())
        finally:
            self._search_ns += now() - time_ns

    def find_frame(self) -> FrameType | None:
        """Return the innermost frame of the thread that trains."""
        return sys._current_frames().get(self.find_thread())

    def find_loading_line(self) -> OwnPlace | None:
        """Return the only line of the job that loads a file with PyTorch without saying where to; None if unknown."""
        if not self._names_lines:
            return None
        if self._loading_line is None:
            paths = PathNames.for_this_process()
            places = find_calls_without("load", "map_location", self.find_frame(), paths)
            self._loading_line = places if len(places) == 1 else []
        return self._loading_line[0] if self._loading_line else None

    def note_training(self, module: Any, *, is_first: bool) -> None:
        """Note a forward of a model in training; ``is_first``: the first one since the last backward."""
        if self.bypassed.note(module, is_first=is_first) and not self._has_told_late:
            self._late_no_sync.note_forward(module)

    def note_backward(self) -> None:
        """Note that a backward begins."""
        self._late_no_sync.begin_backward()

    def _record_late_no_sync(self, step: int) -> None:
        places = set()
        if self._names_lines:
            uses = find_uses(("no_sync()",), self.find_frame(), PathNames.for_this_process(), ())
            places = {use.place for use in uses}
        place = places.pop()._asdict() if len(places) == 1 else {}
        micro_steps = self._late_no_sync.micro_steps
        self._write_event(now(), events.LateNoSync, step=step, micro_steps=micro_steps, **place)

    def note_forward(self, module: Any, args: Any = (), kwargs: Any = MappingProxyType({})) -> None:
        """Read whether autocast is on in a forward of the model or of a part: an earlier one may be outside of it.

        In the first of a step, also whether DDP reduces the gradients after it.
        """
        if not self._asked and (reduces := vars(module).get(REDUCES)) is not None:
            before, self.no_sync = self.no_sync, "off" if reduces else "on"
            self._note_read(NO_SYNC, self.no_sync != before)
        if (changed := self._guard.run(self._inputs.note, module, args, kwargs, now())) is not None:
            self._stood_ns[changed[0]], self._wants_look = changed[1], True
        found = self._guard.run(_read_autocast) or ""
        self._asked += 1
        self.wants_autocast = not found and self._asked < _MOST_ASKED
        if found or not self.autocast:
            self._set_autocast(found)

    def _set_autocast(self, found: str) -> None:
        before, self.autocast = self.autocast, found
        self._is_on = bool(found)
        self._note_read(_AUTOCAST, found != before)

    def _end_asking(self) -> None:
        """Note that autocast is off if it was on in no forward of the step that was asked."""
        if self._asked and not self._is_on and self.autocast:
            self._set_autocast("")
        self._asked, self._is_on, self.wants_autocast = 0, False, True

    def note_other_autocast(self) -> None:
        """Read the same in a forward of a model that is not trained."""
        if self.wants_other_autocast:
            self.wants_other_autocast = False
            before, self.other_autocast = self.other_autocast, self._guard.run(_read_autocast)
            self._note_read(_OTHER_AUTOCAST, self.other_autocast != before)

    def _note_read(self, name: str, is_other: bool) -> None:
        """Note when a setting is read that only forwards show: these may be rarer than looks."""
        if is_other:
            self._stood_ns[name] = self._read_ns.get(name, 0)
        self._read_ns[name] = now()

    def _spend(self, begin_ns: int) -> int:
        spent_ns = now() - begin_ns
        self._spent_ns += spent_ns
        return spent_ns


def _read_autocast() -> str:
    """Return the dtype of autocast; empty if it is off."""
    torch = sys.modules["torch"]
    kind = "cuda" if torch.cuda.is_initialized() else "cpu"
    if hasattr(torch, "get_autocast_dtype"):
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else ""
    else:
        dtype = torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else ""
    name = str(dtype).replace("torch.", "")
    return _DTYPE_NAMES.get(name, name)


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in sorted(value.items()))
    if isinstance(value, list):
        return " + ".join(map(str, value))
    return "" if value is None else str(value)
