"""Sample the training thread's stack while the rank is slow, waits for data, or is silent.

Otherwise the sampler only looks, a few times a second at most, at the phase in progress and the durations of the last ones.
It samples if

- the current phase, or gap between phases, has lasted clearly longer than usual (``slow``);

- the gaps, the data loading or a phase usually take a notable share of each iteration (``share``): some samples, more after
  that has grown, then rarely more;

- the rank has been silent for long, or only read data (``silent``): the stacks of all threads, with growing pauses.

One more stack, of a phase that computes, shows through which lines the loop runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

from zerotop_probe.inside.budget import read_budget
from zerotop_probe.inside.guard import CostMeter, now
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.stacks.frames import UNKNOWN_STACK, Stack, StackReader
from zerotop_probe.inside.stacks.lock_wait import LockWait
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.inside.stacks.silence import SILENT_NS, SilenceRecorder
from zerotop_probe.inside.stacks.tally import Tally, format_stacks
from zerotop_probe.inside.stacks.usual_times import COMPUTING, DATA, GAP, SLOW_NS, UNSEEN, PlaceKey, UsualTimes
from zerotop_probe.recording import events
from zerotop_probe.recording.event_values import BETWEEN_PHASES, SHARE, SLOW, UNKNOWN_PHASE
from zerotop_probe.recording.tables import BOUNDARY, PHASES

NAME = "stacks"
"""The sampler's name in the probe's cost and errors."""

# Seconds between looks while all is well: a share of an iteration, within these limits.
_LOOK_SHARE = 1 / 8
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.2, 1.0
# How often phases that ended are looked at once the usual durations are known (ns).
_LEARN_EVERY_NS = 1_000_000_000
# Seconds between samples, at first and in places that last for long.
_SAMPLE_S, _LATER_SAMPLE_S, _SILENT_SAMPLE_S = 0.02, 0.1, 1.0
_LATER_NS = 2_000_000_000
# For this time (ns) after a slow place the sampler looks more often: the next step may be slow in the same way, and a few
# samples that all fall late in it would name the line after the slow one.
_LATELY_NS = 1_000_000_000

# Samples of a place that takes a notable share of iterations: at first, again when its share grows by this factor, and some
# more after each interval (ns).
_SHARE_SAMPLES, _MORE_SAMPLES = 100, 20
# Of phases fewer at first: they are what later samples are compared with.
_GROWN = 1.5
_FIRST_PHASE_SAMPLES, _PHASE_GROWN, _MOST_TIMES_GROWN = 40, 1.15, 6
_MORE_EVERY_NS = 600_000_000_000

# A rank is silent if nothing begins or ends for SILENT_NS, and for this many iterations.
_SILENT_ITERATIONS = 5.0
# While the usual duration is unknown, as in the first step.
_FIRST_SILENT_NS = 10_000_000_000

# Limits of events: the time between two events of one place, the number that may be written in a row, and the time after
# which one more may be (ns).
_WRITE_EVERY_NS = 2_000_000_000
_MOST_EVENTS = 30
_ONE_MORE_EVERY_NS = 30_000_000_000
# The sampler may take this part of the budget, less while the probe has overspent, and save up at most the budget of the
# first of these times (ns). Places that are usual leave it the second for unusual ones; at the start it has the third.
_BUDGET_PART = 0.5
_SAVED_NS, _RESERVED_NS, _ADVANCE_NS = 20_000_000_000, 5_000_000_000, 7_000_000_000
# Up to the budget of so long (ns) may be owed for places that take longer than at first, and for slow ones.
_GROWN_OWED_NS, _SLOW_OWED_NS = 5_000_000_000, 10_000_000_000
# A look takes less than a millisecond. One that took longer than this (ns), and this many times the usual time, was
# interrupted, for example by a garbage collection: paying for that would stop the sampler for minutes.
_LONGEST_LOOK_COST_NS, _INTERRUPTED_TIMES = 2_500_000, 4.0
_WEIGHT = 0.125


class Place(NamedTuple):
    """A phase in progress, a gap between phases, or a step with unknown phases, identified by ``begin_ns``."""

    key: PlaceKey
    begin_ns: int
    step: int

    @property
    def name(self) -> str:
        """Its name in events."""
        kind = self.key.kind
        return PHASES[kind] if kind >= 0 else BETWEEN_PHASES if kind == GAP else UNKNOWN_PHASE


class StackSampler:
    """The sampler of one process; :meth:`look` is the task of a ticker."""

    def __init__(
        self,
        recorder: Recorder,
        find_thread: Callable[[], int],
        meter: CostMeter,
        may_be_busy: Callable[[], bool] = lambda: True,
    ) -> None:
        """``find_thread`` returns the ident of the thread that trains; ``may_be_busy``: whether others compute in Python."""
        self._recorder = recorder
        self._find_thread, self._may_be_busy = find_thread, may_be_busy
        self._meter = meter
        self._usual = UsualTimes()
        paths = PathNames.for_this_process()
        self._reader = StackReader(paths)
        self._silence = SilenceRecorder(recorder, find_thread, self._reader, paths)
        self._learned_ns = self._seen_end_ns = 0
        self._counted: tuple[int, int] | None = None  # begin and number of a counted step
        self._last_look_ns = self._saved_up_ns = self._refilled_ns = now()
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._written_ns: dict[tuple[str, str], int] = {}
        self._events_left: float = _MOST_EVENTS
        self._samples_left = dict.fromkeys((GAP, DATA, UNSEEN, *COMPUTING), 0)
        self._sampled_parts = dict.fromkeys(self._samples_left, 0.0)  # their time in an iteration when they were sampled
        self._times_grown = dict.fromkeys(self._samples_left, 0)
        self._slow_ns = self._trained_ns = 0  # when something was last slow, and when it last did other than read data
        self._share = _BUDGET_PART * read_budget()
        self._credit_ns = self._share * _ADVANCE_NS
        self._spent_ns = 0
        self._usual_cost_ns = 0.0  # of a look
        self._spread = 0.0
        self._is_loop_known = False
        self._samples_next = False
        self._lock_wait = LockWait()

    def look(self, step: int = 0, micro_step: int = 0, phase: int = 0) -> float:
        """Look at the rank, sample it if something is unusual, and return the seconds until the next look."""
        time_ns = now()
        elapsed_ns, self._last_look_ns = time_ns - self._last_look_ns, time_ns
        place = self._find_place()
        if place is None or sys.is_finalizing():
            return _LONGEST_LOOK_S
        age_ns = time_ns - place.begin_ns
        is_learning = self._usual.iteration_ns is None or time_ns - self._learned_ns >= _LEARN_EVERY_NS
        if age_ns < SLOW_NS and not (is_learning or self._tallies or self._wants_shares()):
            return self._choose_pause()  # as nearly always while steps are short
        if is_learning:
            self._learn(time_ns)
            if not self._is_loop_known and place.key.kind in COMPUTING:
                self._record_loop(place, time_ns)
        self._save_up(time_ns)
        why = self._judge(place, age_ns)
        if why:
            # An unusual place accounts for no more than its own time; of what is usual each sample counts as much.
            self._sample(place, why, time_ns, elapsed_ns if why == SHARE else min(age_ns, elapsed_ns))
        self._write_due(place, time_ns)
        begin_ns = self._find_silence(place)
        if self._is_silent(time_ns - begin_ns):
            self._silence.record(place.name, begin_ns, place.step, time_ns)
            return _SILENT_SAMPLE_S
        if why == SLOW:
            self._slow_ns, self._samples_next = time_ns, True
            return _SAMPLE_S if age_ns < _LATER_NS else _LATER_SAMPLE_S
        return self._choose_pause()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for the next look. If that samples, it comes where the training thread is then, see ``wait_promptly``."""
        return self._lock_wait.wait(event, seconds, is_prompt=self._samples_next and not self._may_be_busy())

    def finish(self) -> None:
        """Write the samples that are not written yet. Called when the recording ends."""
        for key in list(self._tallies):
            self._write(key, now())

    # --- unusual durations ----------------------------------------------------------------------------------

    def _find_place(self) -> Place | None:
        """Return where the training thread is; None before the first phase."""
        try:
            span = self._recorder.stack[0]
            return Place(PlaceKey(span.phase), span.begin_ns, span.step)
        except IndexError:
            pass
        counted = self._recorder.counted.unrecorded_step
        if counted is not None:
            return Place(PlaceKey(UNSEEN), *counted)
        try:
            last = self._recorder.ended[-1]
        except IndexError:
            return None
        return Place(PlaceKey(GAP, last.phase), last.end_ns, last.step + bool(last.flags & BOUNDARY))

    def _learn(self, time_ns: int) -> None:
        self._learned_ns = time_ns
        counted, self._counted = self._counted, self._recorder.counted.unrecorded_step
        if counted is not None and self._counted is not None:
            self._usual.learn_counted(self._counted[0] - counted[0], self._counted[1] - counted[1])
        ended = self._recorder.ended.copy()
        fresh = [span for span in ended if span.end_ns > self._seen_end_ns]
        if ended:
            self._usual.learn(fresh, is_complete=len(fresh) < len(ended))
            self._seen_end_ns = ended[-1].end_ns
        for kind, part_ns in self._usual.notable.items():
            if kind in COMPUTING:
                self._follow_growth(kind, part_ns)
            elif part_ns > _GROWN * self._sampled_parts[kind]:
                self._sampled_parts[kind] = part_ns
                # In a counted step the stack itself tells whether it is in a phase.
                self._samples_left[kind] = self._samples_left[UNSEEN] = _SHARE_SAMPLES
        if self._counted is not None and self._usual.iteration_ns is not None:
            self._follow_growth(UNSEEN, self._usual.iteration_ns)

    def _follow_growth(self, kind: int, part_ns: float) -> None:
        """Want samples of a phase, or of counted steps, at first, and each time when it takes longer than it did then."""
        known_ns, times = self._sampled_parts[kind], self._times_grown[kind]
        if part_ns > _PHASE_GROWN * known_ns and times < _MOST_TIMES_GROWN:
            self._times_grown[kind], self._sampled_parts[kind] = times + 1, part_ns
            wanted = _SHARE_SAMPLES if times else _FIRST_PHASE_SAMPLES
            self._samples_left[kind] = max(wanted, self._samples_left[kind])
        else:
            self._sampled_parts[kind] = min(part_ns, known_ns)

    def _judge(self, place: Place, age_ns: int) -> str:
        """Return why the present place is worth a sample; empty if it is not."""
        limit_ns = self._usual.find_limit(place.key)
        if limit_ns is None or not self._may_owe(_SLOW_OWED_NS):
            return ""
        if age_ns > limit_ns:
            if place.key.kind == UNSEEN:
                self._recorder.counted.resume_phases()  # what follows may be worth seeing
            return SLOW
        kind = place.key.kind
        is_notable = kind == UNSEEN or kind in self._usual.notable
        return SHARE if is_notable and self._samples_left.get(kind) and self._wants_shares() else ""

    def _find_silence(self, place: Place) -> int:
        """Return since when the rank has done nothing, or nothing but reading data once it has trained."""
        if self._usual.iteration_ns is None or DATA not in place.key:
            self._trained_ns = place.begin_ns
        else:
            trained_ns = (span.end_ns for span in reversed(self._recorder.ended.copy()) if span.phase != DATA)
            self._trained_ns = next(trained_ns, self._trained_ns)
        return min(place.begin_ns, self._trained_ns)

    def _is_silent(self, age_ns: int) -> bool:
        iteration_ns = self._usual.iteration_ns
        return age_ns >= (_FIRST_SILENT_NS if iteration_ns is None else max(SILENT_NS, _SILENT_ITERATIONS * iteration_ns))

    def _choose_pause(self) -> float:
        """Return the seconds until the next look while nothing is slow."""
        if self._usual.iteration_ns is None:
            self._samples_next = False
            return _SHORTEST_LOOK_S
        pause_s = min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, _LOOK_SHARE * self._usual.iteration_ns / 1e9))
        was_slow = self._may_owe(_SLOW_OWED_NS) and self._last_look_ns - self._slow_ns < _LATELY_NS
        self._samples_next = was_slow or self._wants_shares()
        if self._samples_next:
            pause_s = min(pause_s, 2 * _SAMPLE_S)
        # Looks at equal distances could always meet an iteration at the same point.
        self._spread = (self._spread + 0.618) % 1
        return pause_s * (0.5 + self._spread)

    def _wants_shares(self) -> bool:
        """Whether to sample places that usually take a notable share; some of the savings are kept for unusual ones."""
        kinds = self._usual.notable if self._recorder.counted.unrecorded_step is None else (UNSEEN,)
        times = [self._times_grown[kind] for kind in kinds if self._samples_left[kind]]
        has_grown = max(times, default=0) > 1
        return bool(times) and self._may_owe(_GROWN_OWED_NS if has_grown else -_RESERVED_NS)

    def _may_owe(self, time_ns: int) -> bool:
        """Whether the savings exceed a debt of the budget of some time; what is negative is left over."""
        return self._credit_ns > -self._share * time_ns

    def _save_up(self, time_ns: int) -> None:
        """Add the budget of the time that has passed to the savings, minus the sampler's cost in it."""
        elapsed_ns, self._saved_up_ns = time_ns - self._saved_up_ns, time_ns
        spent_ns = self._meter.thread_ns.get(NAME, 0)
        longest_ns = max(_LONGEST_LOOK_COST_NS, _INTERRUPTED_TIMES * self._usual_cost_ns)
        cost_ns = min(spent_ns - self._spent_ns, longest_ns)
        self._spent_ns = spent_ns
        self._usual_cost_ns += (cost_ns - self._usual_cost_ns) * _WEIGHT
        saved_ns = self._recorder.budget.threads_part * self._share * elapsed_ns - cost_ns
        self._credit_ns = min(self._share * _SAVED_NS, self._credit_ns + saved_ns)
        self._events_left = min(_MOST_EVENTS, self._events_left + elapsed_ns / _ONE_MORE_EVERY_NS)
        if time_ns - self._refilled_ns > _MORE_EVERY_NS:
            self._refilled_ns = time_ns
            self._samples_left = {kind: max(left, _MORE_SAMPLES) for kind, left in self._samples_left.items()}

    # --- samples --------------------------------------------------------------------------------------------

    def _sample(self, place: Place, why: str, time_ns: int, seen_ns: int) -> None:
        stack = self._read_stack(place)
        if stack is None:
            return
        if why == SHARE:
            self._samples_left[place.key.kind] -= 1
        tally = self._tallies.get((place.name, why))
        if tally is None:
            tally = self._tallies[place.name, why] = Tally(place.begin_ns, place.step)
        tally.add(stack, time_ns, place.step, seen_ns)

    def _read_stack(self, place: Place) -> Stack | None:
        """Return the stack of the training thread; None if that has left the place, because it ran in between."""
        frame = sys._current_frames().get(self._find_thread())
        if frame is None:
            return None
        is_misleading, is_late = self._lock_wait.is_misleading, self._lock_wait.is_late
        stack = UNKNOWN_STACK if is_misleading else self._reader.read_stack(frame, is_late=is_late)
        del frame
        return stack if self._find_place() == place else None

    def _record_loop(self, place: Place, time_ns: int) -> None:
        stack = self._read_stack(place)
        if stack is not None and any(frame.own for frame in stack.frames):
            self._is_loop_known = True
            self._recorder.write_event(time_ns, events.TrainingStack, **format_stacks([(stack, {"count": 1})]))

    # --- events ---------------------------------------------------------------------------------------------

    def _write_due(self, place: Place, time_ns: int) -> None:
        """Write the samples of places that are over, and from time to time those of places that last.

        The first event of a place is written without waiting for others; after that each place waits equally long.
        Otherwise, if all computing is slow because others use the cores, no event would be left for the place that really
        changes.
        """
        for key in sorted(self._tallies, key=lambda key: self._written_ns.get(key, 0)):
            tally, (where, why) = self._tallies[key], key
            pause_ns = _WRITE_EVERY_NS
            if where == place.name and why == SLOW:
                pause_ns = max(pause_ns, (time_ns - place.begin_ns) // 4)
            since_ns = max(tally.begin_ns, self._written_ns.get(key, 0))
            is_over = why == SLOW and place.begin_ns > tally.end_ns and self._events_left > _MOST_EVENTS / 2
            if (is_over or time_ns - since_ns >= pause_ns) and (self._events_left >= 1 or key not in self._written_ns):
                self._events_left -= 1
                self._write(key, time_ns)

    def _write(self, key: tuple[str, str], time_ns: int) -> None:
        where, why = key
        self._written_ns[key] = time_ns
        facts = self._tallies.pop(key).make_facts()
        self._recorder.write_event(time_ns, events.Stacks, where=where, why=why, **facts)
