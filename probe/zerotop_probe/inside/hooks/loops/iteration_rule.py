"""Decide which steps of optimizers end an iteration.

With one optimizer every step does. With several, an iteration is a round: it ends when each of them has stepped since the
last one, however often. An optimizer that lags behind the others does not count until it steps without them. Nor does one
that steps only after backwards which another one uses too, but not after all of these. Until the first iteration ends all
steps are remembered: if an optimizer turns out not to count, the iterations so far are found without it.

If an optimizer has stepped before another one was created, the rule does not wait for it until it steps again: its loop may
have ended while it is still alive, as in a notebook. Nor does it wait for one that was created after the first iteration
until it steps. Several steps of one optimizer without a backward in between are one update.
"""

from __future__ import annotations

# Updates of others that an optimizer may miss. Critics of Wasserstein GANs take 5 to each of the generator; whoever takes
# turns at longer intervals is part of the iterations of the others.
_PATIENCE = 8
_OLDER_PATIENCE = 1  # for one that has stepped before another was made


class IterationRule:
    """The optimizers of a loop by number, and whose turn it is."""

    def __init__(self) -> None:
        self.step_counts: dict[int, int] = {}
        self.counting: set[int] = set()
        self._stepped: set[int] = set()
        self._idle: set[int] = set()  # have not stepped since another one was created, and count once they do
        self._missed: dict[int, int] = {}
        self._patience: dict[int, int] = {}
        self._last_backward: dict[int, int] = {}
        self._newest_backward = -1
        # The (optimizer, backwards) of all steps before the first iteration has ended; None afterwards.
        self._early: list[tuple[int, int]] | None = []
        self.early_ends: list[int] = []
        """The backwards before each of the first iterations' ends, as soon as one is known."""

    def add(self, number: int) -> None:
        """Add an optimizer, which counts from now on, or from its first step if iterations have ended."""
        if not self._early and any(self.step_counts.values()):
            self._early = None
        for other, steps in self.step_counts.items():
            if steps:
                self._missed[other], self._patience[other] = 0, _OLDER_PATIENCE
                self._idle.add(other)
        (self.counting if self._early is not None else self._idle).add(number)
        self.step_counts[number] = self._missed[number] = 0
        self._patience[number] = _PATIENCE

    def remove(self, number: int) -> None:
        """Forget an optimizer that is gone."""
        self.counting.discard(number)
        self._stepped.discard(number)
        self._idle.discard(number)
        for table in (self.step_counts, self._missed, self._patience, self._last_backward):
            table.pop(number, None)

    def finish_step(self, number: int, backwards: int) -> bool:
        """Count a step of an optimizer after this number of ``backwards``; return whether it ends an iteration."""
        is_only = len(self.step_counts) == 1 and not self._early
        if backwards and self._last_backward.get(number) == backwards:
            self.step_counts[number] += 1
            return False
        # Without calls: after each of them a signal handler of the job may raise.
        self.step_counts[number] += 1
        self._last_backward[number] = backwards
        if is_only:
            self.counting = {number}
            return True
        if number in self._idle:
            self._idle.discard(number)
            self.counting.add(number)
            self._patience[number] = _PATIENCE
        self._patience[number] = max(self._patience[number], 2 * self._missed[number])
        if not backwards or backwards != self._newest_backward:
            for other in self._missed:
                self._missed[other] += 1
        self._newest_backward = backwards
        self._missed[number] = 0
        self._choose_counting(number)
        if self._early is not None:
            self._early.append((number, backwards))
            return self._end_early(self._early)
        return number in self.counting and self._ends_round(number)

    def expect_update(self, number: int) -> None:
        """Take the next step of an optimizer for another update, although no backward was seen since its last one."""
        self._last_backward.pop(number, None)

    def _ends_round(self, number: int) -> bool:
        self._stepped.add(number)
        if not self.counting <= self._stepped:
            return False
        self._stepped.clear()
        return True

    def _end_early(self, steps: list[tuple[int, int]]) -> bool:
        """Find the ends of the first iterations, if any; return whether the last of these steps is one."""
        if not self._find_ends(steps):
            return False
        used = {number: {backwards for other, backwards in steps if other == number} for number in self.counting}
        self.counting -= {number for number, own in used.items() if any(own < others for others in used.values())}
        ends = self._find_ends(steps)
        self.early_ends, self._early = [steps[place][1] for place in ends], None
        return ends[-1] == len(steps) - 1 or steps[ends[-1]][1] == steps[-1][1]

    def _find_ends(self, steps: list[tuple[int, int]]) -> list[int]:
        """Return the places of the steps that end a round."""
        self._stepped.clear()
        return [place for place, (number, _) in enumerate(steps) if number in self.counting and self._ends_round(number)]

    def end_early(self) -> None:
        """Find the ends of the first iterations without the optimizers that have not stepped: no further steps follow."""
        if self._early:
            self.counting = {number for number, _ in self._early}
            self._end_early(self._early)

    def replace(self, number: int, other: int, backwards: int) -> None:
        """Let an optimizer count for another one, of the same parameters, unless that has used the same backward."""
        if self._early is None and self._last_backward.get(other) != backwards:
            self.counting.discard(other)
            self.counting.add(number)

    def add_steps(self, number: int, steps: int, backwards: int) -> None:
        """Add earlier steps of the only optimizer, each of which ended an iteration.

        ``backwards``: the number of backwards before the last of these steps.
        """
        self.step_counts[number] += steps
        self._last_backward[number] = backwards

    def _choose_counting(self, number: int) -> None:
        """Stop waiting for optimizers that lag behind; follow the one that steps if no other does."""
        self.counting -= {other for other in self.counting if self._missed[other] >= self._patience[other]}
        if not self.counting:
            self.counting = {number}
