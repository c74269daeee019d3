"""Experiments: observations of a job in both places, put side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from conformance.places import Place

Observe = Callable[[Place], Iterable[str]]


class Row(NamedTuple):
    """One behaviour, as a short text for each place."""

    behaviour: str
    alone: str
    under: str


@dataclass(frozen=True)
class Experiment:
    """Behaviours that are observed together because they need the same runs."""

    name: str
    behaviours: tuple[str, ...]
    observe: Observe
    # Nothing else may run meanwhile: it measures time.
    alone: bool

    def compare(self, folder: Path) -> list[Row]:
        """Observe in both places, in folders below ``folder``. Raises ValueError if an observation is missing."""
        both = []
        for recorded in (False, True):
            place = Place(folder / ("under" if recorded else "alone"), recorded=recorded)
            try:
                both.append(list(self.observe(place)))
            finally:
                place.end_everything()
        return [Row(*row) for row in zip(self.behaviours, *both, strict=True)]


def make_experiment(*behaviours: str, alone: bool = False) -> Callable[[Observe], Experiment]:
    """Make an Experiment of a function that yields an observation for each of ``behaviours``."""
    return lambda observe: Experiment(getattr(observe, "__name__", ""), behaviours, observe, alone)


class Subject(NamedTuple):
    """The experiments of one module, which become one section of the table."""

    title: str
    experiments: list[Experiment]


def read_subject(module: ModuleType) -> Subject:
    """Collect the experiments of a module; the first line of its docstring is the title."""
    title = (module.__doc__ or "").splitlines()[0].rstrip(".")
    return Subject(title, [value for value in vars(module).values() if isinstance(value, Experiment)])
