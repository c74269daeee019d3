"""A job alone and under zerotop: what it notices, against the table in ``docs/conformance.md``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from conformance.experiment import Experiment, Row, read_subject
from conformance.table import format_page, format_row, parse_page, read_behaviour

from . import (
    background,
    deliveries,
    endings,
    environments,
    inputs,
    interruptions,
    limits,
    outputs,
    pythons,
    readers,
    surroundings,
    terminal_keys,
    wrappers,
)
from .intended import REASONS

PAGE = Path(__file__).parents[3] / "docs" / "conformance.md"
MODULES = (
    endings,
    deliveries,
    interruptions,
    terminal_keys,
    inputs,
    outputs,
    readers,
    limits,
    surroundings,
    wrappers,
    background,
    pythons,
    environments,
)
SUBJECTS = [read_subject(module) for module in MODULES]
EXPERIMENTS = [experiment for subject in SUBJECTS for experiment in subject.experiments]
TOOLS = ("bash", "chrt", "flock", "nohup", "script", "setsid", "stdbuf", "taskset", "timeout", "xargs")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {' '.join(MISSING)}")
# As many as make two cores busy: most of them wait.
TOGETHER = 3
# A behaviour differs if it does in so many observations: where others use the machine, a signal may come late in one.
OBSERVATIONS = 3


class Comparisons:
    """Makes each experiment once; those that may run beside others run ahead of the test that asks for them."""

    def __init__(self, folder: Path, ahead: list[Experiment]) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(TOGETHER)
        self._futures: dict[Experiment, Future[list[Row]]] = {}
        for experiment in ahead:
            self._submit_experiment(experiment)

    def _submit_experiment(self, experiment: Experiment) -> Future[list[Row]]:
        if experiment not in self._futures:
            folder = self._folder / experiment.name
            self._futures[experiment] = self._pool.submit(experiment.compare, folder)
        return self._futures[experiment]

    def compare(self, experiment: Experiment) -> list[Row]:
        """Return the rows of an experiment."""
        return self._submit_experiment(experiment).result()

    def compare_again(self, experiment: Experiment) -> list[Row]:
        """Return the rows of another run of an experiment."""
        del self._futures[experiment]
        shutil.rmtree(self._folder / experiment.name, ignore_errors=True)
        return self.compare(experiment)

    def close(self) -> None:
        """Wait for what still runs; start nothing more."""
        self._pool.shutdown(cancel_futures=True)


def get_parameters() -> list[object]:
    """Those that measure time come last, when nothing runs beside them."""
    ordered = sorted(EXPERIMENTS, key=lambda experiment: experiment.alone)
    return [
        pytest.param(experiment, id=experiment.name, marks=[pytest.mark.alone] if experiment.alone else [])
        for experiment in ordered
    ]


@pytest.fixture(scope="session")
def comparisons(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comparisons]:
    # Workers of pytest-xdist each see all tests, and run some of them.
    several = hasattr(request.config, "workerinput")
    asked = [item.callspec.params.get("experiment") for item in request.session.items if hasattr(item, "callspec")]
    ahead = [] if several else [wanted for wanted in asked if isinstance(wanted, Experiment) and not wanted.alone]
    made = Comparisons(tmp_path_factory.mktemp("conformance"), ahead)
    yield made
    made.close()


@pytest.mark.parametrize("experiment", get_parameters())
def test_a_job_behaves_as_alone(experiment: Experiment, comparisons: Comparisons, request: pytest.FixtureRequest) -> None:
    known = {line for _, lines in parse_page(PAGE.read_text()) for line in lines}
    rows = comparisons.compare(experiment)
    for _ in range(1, OBSERVATIONS):
        if all(format_row(row, REASONS) in known for row in rows):
            break
        rows = comparisons.compare_again(experiment)
    unlisted = [row for row in rows if row.alone != row.under and row.behaviour not in REASONS]
    assert not unlisted, "\n".join(f"{row.behaviour}\n  alone: {row.alone}\n  under: {row.under}" for row in unlisted)
    assert not [row for row in rows if row.alone == row.under and row.behaviour in REASONS], "listed, and yet the same"
    if not request.config.getoption("update_snapshots"):
        assert [row for row in rows if format_row(row, REASONS) not in known] == []


def test_the_page_has_these_behaviours_and_no_others(comparisons: Comparisons, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("update_snapshots"):
        sections = [
            (subject.title, [format_row(row, REASONS) for each in subject.experiments for row in comparisons.compare(each)])
            for subject in SUBJECTS
        ]
        PAGE.write_text(format_page(sections))
    page = PAGE.read_text()
    assert format_page(parse_page(page)) == page
    behaviours = [[behaviour for each in subject.experiments for behaviour in each.behaviours] for subject in SUBJECTS]
    assert [[read_behaviour(line) for line in lines] for _, lines in parse_page(page)] == behaviours


def test_each_behaviour_and_each_reason_is_used_once() -> None:
    behaviours = [behaviour for experiment in EXPERIMENTS for behaviour in experiment.behaviours]
    assert len(set(behaviours)) == len(behaviours) >= 60
    assert set(REASONS) <= set(behaviours)
