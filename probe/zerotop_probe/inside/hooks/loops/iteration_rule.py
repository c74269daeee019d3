"""Decide which steps of optimizers end an iteration.

With one optimizer every step does. With several, an iteration is a round: it ends when each of them has stepped since the
last one, however often. An optimizer that lags behind the others does not count until it steps without them; otherwise one
that a script creates and never uses would keep the first iteration open forever. If an optimizer has stepped before another
one was created, the rule does not wait for it until it steps again: its loop may have ended while it is still alive, as in a
notebook. Several steps of one optimizer without a backward in between are one update.
"""

from __future__ import annotations

# Steps of others that an optimizer may miss. Critics of Wasserstein GANs take 5 to each of the generator; whoever takes
# turns at longer intervals is followed after the first of them.
_PATIENCE = 12
_OLDER_PATIENCE = 1  # for one that has stepped before another was made


class IterationRule:
    """The optimizers of a loop by number, and whose turn it is."""

    def __init__(self) -> None:
        self.step_counts: dict[int, int] = {}
        self.counting: set[int] = set()
        self._stepped: set[int] = set()
        self._older: set[int] = set()  # optimizers that have not stepped since another one was created
        self._missed: dict[int, int] = {}
        self._patience: dict[int, int] = {}
        self._last_backward: dict[int, int] = {}

    def add(self, number: int) -> None:
        """Add an optimizer, which counts from now on."""
        for other, steps in self.step_counts.items():
            if steps:
                self._missed[other], self._patience[other] = 0, _OLDER_PATIENCE
                self._older.add(other)
        self.counting.add(number)
        self.step_counts[number] = self._missed[number] = 0
        self._patience[number] = _PATIENCE

    def remove(self, number: int) -> None:
        """Forget an optimizer that is gone."""
        self.counting.discard(number)
        self._stepped.discard(number)
        self._older.discard(number)
        for table in (self.step_counts, self._missed, self._patience, self._last_backward):
            table.pop(number, None)

    def finish_step(self, number: int, backwards: int) -> bool:
        """Count a step of an optimizer after this number of ``backwards``; return whether it ends an iteration."""
        is_only = len(self.step_counts) == 1
        if backwards and self._last_backward.get(number) == backwards:
            self.step_counts[number] += 1
            return False
        # Without calls: after each of them a signal handler of the job may raise.
        self.step_counts[number] += 1
        self._last_backward[number] = backwards
        if is_only:
            self.counting = {number}
            return True
        if number in self._older:
            self._older.discard(number)
            self.counting.add(number)
            self._patience[number] = _PATIENCE
        self._patience[number] = max(self._patience[number], 2 * self._missed[number])
        for other in self._missed:
            self._missed[other] += 1
        self._missed[number] = 0
        self._choose_counting(number)
        if number not in self.counting:
            return False
        self._stepped.add(number)
        if not self.counting <= self._stepped:
            return False
        self._stepped.clear()
        return True

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
