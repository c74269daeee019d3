"""The usual durations of a rank's phases and of the gaps between them, learned from the last ones now and then."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from zerotop_probe.inside.span import Span
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, PHASE_CODE

GAP = -1
"""The kind of place that is no phase."""
UNSEEN = -2
"""The kind of a place in a counted step, whose phases are unknown."""
DATA = PHASE_CODE["data"]
COMPUTING = tuple(PHASE_CODE[name] for name in ("forward", "backward", "step"))
"""The kinds of places that compute."""

# A place is slow once it lasts this many times as long as usual, and longer by this time (ns).
_SLOW_FACTOR = 1.5
SLOW_NS = 20_000_000
# A notable part of an iteration: a share, and nanoseconds.
_NOTABLE_SHARE = 0.03
_NOTABLE_NS = 2_000_000
# Number of durations that show the usual one; fewer iterations than the second number show nothing yet.
_REMEMBERED = 31
_FEWEST = 3
_FEWEST_ITERATIONS = 5


class PlaceKey(NamedTuple):
    """A phase, by its code, or the gap (``GAP``) after the phase ``after``."""

    kind: int
    after: int = GAP


class UsualTimes:
    """Medians of the last durations, in nanoseconds."""

    def __init__(self) -> None:
        self._durations: dict[PlaceKey, deque[int]] = {}
        self._iterations: deque[int] = deque(maxlen=_REMEMBERED)
        # What the last iterations have spent between phases, in data loading, and in each phase that computes.
        self._parts: dict[int, deque[int]] = {kind: deque(maxlen=_REMEMBERED) for kind in (GAP, DATA, *COMPUTING)}
        self._previous: Span | None = None
        # When the iteration in progress began; 0 while that is unknown, as after spans that were missed.
        self._iteration_begin_ns = 0
        self._spent = dict.fromkeys(self._parts, 0)
        self._limits: dict[PlaceKey, float] = {}
        self.iteration_ns: float | None = None
        """The usual duration of an iteration; None until enough are known."""
        self.notable: dict[int, float] = {}
        """The median time of the last recorded iterations in ``GAP``, ``DATA`` and each phase (ns); only notable ones."""

    def learn(self, ended: Sequence[Span], *, is_complete: bool) -> None:
        """Add the outermost phases that ended since the last call; ``is_complete``: there are none missing before them."""
        if not is_complete:
            self._previous, self._iteration_begin_ns = None, 0
        for span in ended:
            if span.flags & COUNTED:
                self._follow_counted(span)
                continue
            self._add_duration(PlaceKey(span.phase), span.end_ns - span.begin_ns)
            if self._previous is not None:
                gap_ns = span.begin_ns - self._previous.end_ns
                self._add_duration(PlaceKey(GAP, self._previous.phase), gap_ns)
                self._spent[GAP] += gap_ns
            if span.phase in self._spent:
                self._spent[span.phase] += span.end_ns - span.begin_ns
            self._previous = span
            if span.flags & BOUNDARY and span.engine == 0:
                self._end_iteration(span.end_ns)
        if len(self._iterations) >= _FEWEST_ITERATIONS:
            self.iteration_ns = _compute_median(self._iterations)
            self._limits = {
                key: SLOW_NS + _SLOW_FACTOR * _compute_median(durations)
                for key, durations in self._durations.items()
                if len(durations) >= _FEWEST
            }
            seen = {kind: list(parts)[-_FEWEST_ITERATIONS:] for kind, parts in self._parts.items() if parts}
            last = {kind: _compute_median(parts) for kind, parts in seen.items()}
            least_ns = max(_NOTABLE_NS, _NOTABLE_SHARE * self.iteration_ns)
            self.notable = {kind: part for kind, part in last.items() if part >= least_ns}

    def learn_counted(self, passed_ns: int, steps: int) -> None:
        """Add steps by their total duration, which is known although most of their phases are not."""
        if steps > 0:
            self._iterations.extend([passed_ns // steps] * min(steps, _REMEMBERED))

    def _follow_counted(self, span: Span) -> None:
        """Begin an iteration after a counted step, of which only the end is known."""
        self._previous = span
        if span.engine == 0:
            self._iteration_begin_ns = span.end_ns
            self._spent = dict.fromkeys(self._parts, 0)

    def _add_duration(self, key: PlaceKey, duration_ns: int) -> None:
        self._durations.setdefault(key, deque(maxlen=_REMEMBERED)).append(duration_ns)

    def _end_iteration(self, end_ns: int) -> None:
        if self._iteration_begin_ns:
            duration_ns = max(1, end_ns - self._iteration_begin_ns)
            self._iterations.append(duration_ns)
            for kind, parts in self._parts.items():
                parts.append(self._spent[kind])
        self._iteration_begin_ns = end_ns
        self._spent = dict.fromkeys(self._parts, 0)

    def find_limit(self, key: PlaceKey) -> float | None:
        """Return the duration above which a place counts as slow; None while it is unknown."""
        if self.iteration_ns is None:
            return None
        return self._limits.get(key, SLOW_NS + self.iteration_ns)


def _compute_median(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 2]
