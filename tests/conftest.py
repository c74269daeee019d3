"""What every room of tests shares."""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

# Before anything loads NumPy: see there.
with suppress(ImportError):
    import zerotop.recording  # noqa: F401

# Machines with GPUs run tests/gpu, which draws no examples, often without this.
with suppress(ImportError):
    from hypothesis import settings

    # How long an example takes says more of the machine than of the code. The same examples each time: what fails on a
    # commit fails on it everywhere. New ones are looked for with pytest --hypothesis-profile=searching.
    settings.register_profile("same", deadline=None, derandomize=True)
    settings.register_profile("searching", deadline=None, max_examples=1500)
    settings.load_profile("same")


# For each file of snapshots syrupy describes all tests anew, four times: a run ended seconds later.
with suppress(ImportError):
    from syrupy import report

    report.PyTestLocation = cache(report.PyTestLocation)  # type: ignore[attr-defined, assignment]


# Tests and the libraries that they import are objects that stay: looking for garbage among them takes time again and again.
gc.set_threshold(100_000, 5, 5)


def pytest_collection_finish() -> None:
    """Leave what was imported to find the tests out of later searches for garbage."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Collect garbage among all objects once; pytest itself would go through them five times."""
    gc.collect()
    gc.freeze()


ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def usual_units() -> Iterator[None]:
    """What one test chose for the screens is not the next one's choice."""
    yield
    units = sys.modules.get("zerotop.ui.drawing.units")
    if units is not None:
        units.set_units(units.DEFAULT_UNITS)


@pytest.fixture
def memory_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Shared memory for rings of one test: in that of the user, every sampler adopts rings whose sampler is gone."""
    from zerotop_probe.recording.rings import shared_memory

    with tempfile.TemporaryDirectory(prefix="zerotop-test-", dir=shared_memory.MEMORY_ROOT) as path:
        monkeypatch.setattr(shared_memory, "MEMORY_ROOT", path)
        yield path


@pytest.fixture(scope="session")
def checkout_root() -> Path:
    """The top of the checkout."""
    return ROOT
