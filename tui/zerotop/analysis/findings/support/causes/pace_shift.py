"""A change of pace: what carries it, what caused it, and whether it is more than the run's own wandering."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zerotop.analysis.findings.support.causes.causes import find_cause
from zerotop.analysis.findings.support.causes.host_causes import find_shortage, is_by_others, waits_longer
from zerotop.analysis.findings.support.causes.step_change import Cause, StepChange
from zerotop.analysis.findings.support.evidence import Floats, Process, Rows
from zerotop.analysis.findings.support.gpu_use import BUSY_SHARE, is_paced_by_host, offloads
from zerotop.analysis.findings.support.lines.line_findings import PLACES
from zerotop.analysis.findings.support.lines.stack_lines import PATIENCE_NS, UNSEEN, Delay
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SETTLED_STEPS
from zerotop.analysis.stats.wander import compute_levels, stands_out

# A cause with less confidence gives way to a line that takes the time.
CERTAIN = 0.85
# A recorded cause with at least this confidence is no coincidence: the change needs no other evidence.
_RECORDED = 0.7
# A second change with the same cause is one of its own from this factor on.
_REPEATED_TIMES = 1.5
# The least share of the iterations that a warning costs.
_LEAST_COST = 0.01
# The part of a change that a phase carries, or the GPU's work.
_CARRIED_SHARE = 0.5
_NAMED_SHARE = 0.25
_MOST_CARRIED = 1.5
# A GPU that is busy for this share of the time has no time to spare.
_BUSY_SHARE = 0.9
# If the GPU's work grew by less than this part, the GPU did not cause the change.
_IDLE_SHARE = 0.3
# How far a level has to be from those before, in their own range, and the least range (as a share of the level).
# Where the optimizer or all computing is on the host, that is larger.
_TIMES, _FLOOR, _FLOOR_ON_HOST = 2.0, 0.02, 0.06
HOST_TIMES = 2.0
"""If the CPU sets the pace, all phases may take this many times as long, in turns and for seconds."""
# Where the CPU sets the pace, a change has lasted LEVEL_STEPS or this long (seconds).
_SETTLED_S = 1.0
# A slowdown is put down to a shortage of cores if it is at most this many times what the shortage explains.
_SHORT_TIMES = 1.2
# The run had been at a level before if it was this near to it, as a share of the change.
_SEEN_SHARE = 0.1
# A phase that takes less than this share of the iteration counts as that long.
_LEAST_PART = 0.02
# A smaller change that lasts so long (seconds), in at least as many blocks of steps, is told as well.
_LASTING_S, _LASTING_HOST_S, _LASTING_BLOCKS = 15.0, 60.0, 6
# A change of which nothing is known but the pace has lasted as long as the steps before it, from and to (seconds): a GPU job
# may be slower for some seconds while another one starts on its host.
_UNKNOWN_S = 4.0, 20.0
# The nearest steps before a change, and the last ones after it, in which the use of the training thread is compared.
_WATCHED_STEPS = 400


@dataclass(frozen=True, eq=False)
class PaceShift:
    """A change of level with its cause."""

    change: StepChange
    cause: Cause | None

    @property
    def before_s(self) -> float:
        return self.change.before_s

    @property
    def after_s(self) -> float:
        return self.change.after_s

    @property
    def added_s(self) -> float:
        """The seconds by which iterations became longer; negative if they became shorter."""
        return self.change.added_s

    @property
    def step(self) -> int:
        """The first step that shows the change."""
        return self.change.step

    @property
    def begin_ns(self) -> int:
        """When the first step that shows the change began (unix time)."""
        return int(self.change.after["begin_unix_ns"][0])

    @property
    def cost(self) -> float:
        """The share of each iteration that the change costs, also for a good reason."""
        return 1 - self.before_s / self.after_s if self.is_longer else 0.0

    @property
    def is_longer(self) -> bool:
        """Whether iterations became longer, by more than rounding."""
        return self.added_s > _LEAST_COST * self.after_s

    @property
    def is_worse(self) -> bool:
        """Whether iterations became longer for no good reason."""
        return self.is_longer and not self.is_expected

    @property
    def is_expected(self) -> bool:
        """Whether iterations became longer for a good reason."""
        return self.cause is not None and self.cause.is_expected and self.added_s > 0

    @property
    def is_uncertain(self) -> bool:
        """Whether the cause may be a coincidence, such as load on a shared machine."""
        return self.cause is not None and not self.cause.where and self.cause.confidence < CERTAIN

    @cached_property
    def parts(self) -> dict[str, float]:
        """The change of each phase, in seconds."""
        return self.change.measure_parts()

    @cached_property
    def device_parts(self) -> dict[str, float]:
        """The change of the GPU's own time for the phases that compute, in seconds."""
        return self.change.measure_device_parts()

    @cached_property
    def is_by_gpu(self) -> bool:
        """Whether the GPU's work became longer or shorter by as much, and the host waits for it at some other place."""
        if self.waits_for_ranks or not self.device_parts.keys() <= self.parts.keys():
            return False
        worked = sum(self.device_parts.values())
        unseen = worked - sum(self.parts[name] for name in self.device_parts)
        is_elsewhere = self._host_carrier in ("other_s", "data_s", "")
        if self.device_parts:
            return is_elsewhere and _explains(worked, self.added_s) and _explains(unseen, self.added_s)
        may_be_gpu = self.cause is None or self.cause.is_code
        return may_be_gpu and self._host_carrier in ("other_s", "data_s") and self.is_gpu_busier

    @cached_property
    def gpu_uses(self) -> tuple[float, float]:
        """The share of the time in which the lead's GPU was busy before and after; NaN if unknown."""
        return self.change.measure_gpu_uses(self.change.process)

    @cached_property
    def waits_for_ranks(self) -> bool:
        """Whether another rank's GPU is idle while iterations take longer: a GPU that is busy waits in collectives then."""
        others = [one for one in self.change.group.processes if one is not self.change.process]
        return self.added_s > 0 and any(self.is_idle(one) for one in others)

    def is_idle(self, process: Process) -> bool:
        """Whether a rank's GPU is known to have time to spare, and no more work than before."""
        before, after = self.change.measure_gpu_uses(process)  # a comparison with NaN, for unknown, is false
        return after < BUSY_SHARE and after * self.after_s - before * self.before_s < _IDLE_SHARE * self.added_s

    @property
    def is_gpu_busier(self) -> bool:
        """Whether the GPU, whose times are unknown, became busy all the time: then the host waits for it."""
        before, after = self.gpu_uses  # a comparison with NaN, for unknown, is false
        return self.added_s > 0 and after >= _BUSY_SHARE and after - before >= 1 - _BUSY_SHARE

    @cached_property
    def carrier(self) -> str:
        """The phase that carries the change; empty where the phases are unknown, or none carries a notable part."""
        if not self.is_by_gpu or not self.device_parts:
            return "" if self.is_by_gpu else self._host_carrier
        return max(self.device_parts, key=lambda name: self.device_parts[name] * np.sign(self.added_s))

    @cached_property
    def carried_s(self) -> float:
        """The seconds by which all the GPU's work changed, or of the change in its carrier: at most all of it."""
        if self.is_by_gpu and self.device_parts:
            return abs(sum(self.device_parts.values()))
        return min(abs(self.parts[self.carrier]), abs(self.added_s)) if self.carrier else abs(self.added_s)

    @cached_property
    def _host_carrier(self) -> str:
        if self._own_part:
            return self._own_part
        return self._find_largest(self._measure_excess(), _CARRIED_SHARE) or self._find_largest(self.parts, _NAMED_SHARE)

    def _find_largest(self, parts: dict[str, float], share: float) -> str:
        carrier = max(parts, key=lambda name: parts[name] * np.sign(self.added_s), default="")
        return carrier if carrier and _explains(parts[carrier], self.added_s, share) else ""

    @cached_property
    def _own_part(self) -> str:
        """The phase that changed by more than a slower core explains, and carries most of the change."""
        # Steps with phases that changed by far more than the others do not stand for these.
        most = _MOST_CARRIED * abs(self.added_s)
        if abs(sum(self.parts.values())) > most:
            return ""
        excess = self._measure_excess()
        far = {name: one for name, one in excess.items() if abs(one) <= most and self.is_far(name)}
        return self._find_largest(far, _CARRIED_SHARE)

    def is_far(self, name: str) -> bool:
        """Whether a part became longer by more than a slower core explains; shorter, if iterations did."""
        least = _LEAST_PART * self.before_s
        before, after = (max(level, least) for level in self.change.measure_levels()[name])
        return after >= HOST_TIMES * before if self.added_s > 0 else before >= HOST_TIMES * after

    def _measure_excess(self) -> dict[str, float]:
        """Return the change of each part beyond the factor by which all others changed, as they do on a slower core."""
        levels, excess = self.change.measure_levels(), {}
        for name, (before, after) in levels.items():
            rest = [sum(level[at] for other, level in levels.items() if other != name) for at in (0, 1)]
            factor = rest[1] / rest[0] if rest[0] > 0 else 1.0
            excess[name] = after - before * (max(1.0, factor) if self.added_s > 0 else min(1.0, factor))
        return excess

    @property
    def has_own_part(self) -> bool:
        """Whether one phase, or the GPU, changed by more than a slower core explains, and carries most of the change."""
        return self.is_by_gpu or bool(self._own_part)

    @property
    def is_gpu_idle(self) -> bool:
        """Whether the GPU is known to have no more work than before, so that a call that waits for it waits for itself."""
        before, after = self.gpu_uses  # a comparison with NaN, for unknown, is false
        more_s, least_s = after * self.after_s - before * self.before_s, _IDLE_SHARE * self.added_s
        if not self.device_parts:
            return more_s < least_s
        # Where no backward is seen, a script queues that work outside the phases: it is in the GPU's use only.
        is_busier = "backward_s" not in self.device_parts and more_s >= least_s
        return not is_busier and not _explains(sum(self.device_parts.values()), self.added_s, _IDLE_SHARE)

    def has_recorded_cause(self, earlier: PaceShift | None) -> bool:
        """Whether something was recorded that explains the change, and not just varies what explained an earlier one."""
        if self.cause is None or self.cause.confidence < _RECORDED:
            return False
        is_same = earlier is not None and earlier.cause is not None and earlier.cause.advice == self.cause.advice
        return not is_same or self._times >= _REPEATED_TIMES

    @property
    def _times(self) -> float:
        return self.after_s / self.before_s if self.added_s > 0 else self.before_s / self.after_s

    def is_real(self, steps: Rows, *, known_ns: int, earlier: PaceShift | None = None, is_lasting: bool = False) -> bool:
        """Whether the change has a recorded cause, or is larger than the run's own wandering, and still there.

        ``steps``: the lead's steps since ``earlier``, the last change that was real, up to now. ``is_lasting``: also where
        the change is not much larger but stays.
        """
        if not self._is_beyond_wandering(steps, known_ns, earlier, is_lasting=is_lasting):
            return False
        first = int(np.searchsorted(steps["step"], self.step))
        if self._is_unknown and known_ns - int(self.change.after["begin_unix_ns"][0]) < 1e9 * self._find_patience(
            steps, first
        ):
            return False
        before, after = steps[:first][-_WATCHED_STEPS:], steps[first:][-_WATCHED_STEPS:]
        return self.cause is not None or not waits_longer(self.change.process, before, after, self.added_s, known_ns)

    @property
    def _is_unknown(self) -> bool:
        """Whether a GPU job became slower and nothing is known of it: no cause, and no part that is not just computing."""
        is_computing = not self.is_by_gpu and self.carrier in ("", "forward_s", "backward_s")
        return self.change.process.is_on_gpu and self.is_worse and self.cause is None and is_computing

    def _find_patience(self, steps: Rows, first: int) -> float:
        """Return for how many seconds a change of which nothing is known has to last."""
        shortest, longest = _UNKNOWN_S
        before_s = float(np.nansum(steps[:first]["iteration_s"]))
        return min(max(before_s, shortest), longest)

    def _is_beyond_wandering(self, steps: Rows, known_ns: int, earlier: PaceShift | None, *, is_lasting: bool) -> bool:
        lead = self.change.process
        if lead.is_on_gpu and self._is_by_shortage:
            return False
        first = int(np.searchsorted(steps["step"], self.step))
        is_passing = lead.is_on_gpu and self.cause is not None and self.cause.is_host
        if self.change.found_in or (self.has_recorded_cause(earlier) and not is_passing):
            return True
        before, after = (part["iteration_s"] for part in (steps[:first], steps[first:]))
        floor = self.before_s * (_FLOOR_ON_HOST if offloads(lead) or not lead.is_on_gpu else _FLOOR)
        processes, begin_ns = self.change.group.processes, int(self.change.after["begin_unix_ns"][0])
        is_host = bool(first) and is_paced_by_host(processes, int(steps["begin_unix_ns"][0]), begin_ns)
        # A part that no slower core explains may take most in the first steps, and less in those after them.
        is_own = is_lasting and self.has_own_part and self._own_part not in ("forward_s", "backward_s")
        if is_own and len(after) >= LEVEL_STEPS and stands_out(before, after, times=1.0, floor=floor):
            return True
        if not self._holds(after, is_host=is_host):
            return False
        if self._is_own_alone(is_host=is_host):
            return True
        if is_host and self._times >= HOST_TIMES and stands_out(before, after, times=0.0, floor=0.0):
            return True
        if not is_host and stands_out(before, after, times=_TIMES, floor=floor):
            return True
        lasting_s = _LASTING_HOST_S if is_host else _LASTING_S
        return (
            is_lasting
            and known_ns - begin_ns >= 1e9 * lasting_s
            and min(len(before), len(after)) >= 10 * _LASTING_BLOCKS
            and stands_out(before, after, times=1.0, floor=floor)
        )

    def _holds(self, after: Floats, *, is_host: bool) -> bool:
        """Whether the steps since the change are still beyond its middle; where the CPU sets the pace, after more."""
        last = float(np.nanmedian(after[-LEVEL_STEPS:]))
        is_beyond = (last - (self.before_s + self.after_s) / 2) * self.added_s > 0
        is_long = len(after) >= LEVEL_STEPS or float(np.nansum(after)) >= _SETTLED_S
        return is_beyond and (is_long or not is_host)

    @cached_property
    def _is_by_shortage(self) -> bool:
        """Whether the ranks lack cores, which may explain the change, and nothing else was recorded."""
        shortage = find_shortage(self.change)
        is_explained = self.cause is not None and self.cause.confidence >= _RECORDED and not self.cause.is_host
        return not is_explained and shortage > 1 and self._times <= _SHORT_TIMES * shortage

    def _is_own_alone(self, *, is_host: bool) -> bool:
        """Whether one phase carries the change, at a level that the run never had before.

        Where the CPU sets the pace, forward and backward take longer whenever their thread or its queue of launches does.
        """
        if not self.has_own_part or (is_host and not self.is_by_gpu and self._own_part in ("forward_s", "backward_s")):
            return False
        steps = self.change.process.steps
        earlier = compute_levels(steps[SETTLED_STEPS : np.searchsorted(steps["step"], self.step)]["iteration_s"])
        almost = self.after_s - _SEEN_SHARE * self.added_s
        return not len(earlier) or bool(earlier.max() < almost if self.added_s > 0 else earlier.min() > almost)

    def find_delay(self) -> Delay:
        """Return where the time is lost."""
        rows, cause = self.change.after, self.cause
        process, where = self.change.process, "" if self.is_by_gpu else PLACES[self.carrier] if self.carrier else UNSEEN
        if cause is not None and cause.where:
            process, where = cause.culprit or process, cause.where
        elif not self.is_worse or (cause is not None and not self.is_uncertain):
            where = ""
        end_ns = int(rows["end_unix_ns"][-1])
        callee, known_ns = cause.callee if cause is not None else "", self.change.known_ns
        # The first steps may have passed unsampled.
        slow_until_ns = known_ns + PATIENCE_NS if self.is_worse else 0
        whole, is_lead = (self.before_s, self.after_s), process is self.change.process
        carrier = self.carrier if is_lead else next((name for name, place in PLACES.items() if place == where), "")
        return Delay(
            process,
            where,
            int(rows["begin_unix_ns"][0]),
            end_ns,
            known_ns,
            callee,
            slow_until_ns=slow_until_ns,
            is_gpu_idle=self.is_gpu_idle if is_lead else self.is_idle(process),
            levels=(self.change.measure_levels_of(process).get(carrier, whole), whole),
        )


def _explains(part: float, whole: float, share: float = _CARRIED_SHARE) -> bool:
    """Whether a part has the same sign as the whole, and a share of its size."""
    return bool(part * np.sign(whole) >= share * abs(whole) > 0)


def explain_change(change: StepChange) -> PaceShift | None:
    """Return the change with its cause; None if it has another finding, or may be the load of other processes."""
    cause = find_cause(change)
    if cause.has_own_finding if cause is not None else is_by_others(change):
        return None
    return PaceShift(change, cause)
