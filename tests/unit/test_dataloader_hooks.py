"""Fetches of data from another iterator than the one that is trained with are marked."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from zerotop_probe.inside.guard import CostMeter, remove_hooks
from zerotop_probe.inside.hooks.dataloader import DataLoaderHooks
from zerotop_probe.inside.hooks.loader_starts import LoaderStarts
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.tables import ANOTHER_ITERATOR


class Iterator:
    """That of a data loader."""


class Loop:
    """A training loop as the hooks see it: ``fetch`` and ``train`` are what it does."""

    def __init__(self) -> None:
        self.iterators = {name: Iterator() for name in "ab"}
        self._step = 0
        self._hooks = DataLoaderHooks(cast("Any", SimpleNamespace()))

    def fetch(self, name: str) -> bool:
        span = self._hooks.mark_source(Span(0, 0, 0, (0, self._step, 0), False), self.iterators[name])
        return span.flags == ANOTHER_ITERATOR

    def train(self) -> None:
        self._step += 1


def test_fetches_of_an_evaluation_are_marked() -> None:
    loop = Loop()
    assert not loop.fetch("a")  # nothing is trained with yet
    loop.train()
    assert not loop.fetch("a")
    loop.train()
    assert [loop.fetch("b") for _ in range(3)] == [True] * 3
    assert [loop.fetch("a") for _ in range(3)] == [False] * 3  # batches that are skipped


def test_the_iterator_of_the_next_epoch_is_known_once_it_was_trained_with() -> None:
    loop = Loop()
    loop.fetch("a")
    loop.train()
    del loop.iterators["a"]
    assert loop.fetch("b")
    loop.train()
    assert not loop.fetch("b")


def test_workers_are_recorded_with_the_dataset_within_pytorchs_own() -> None:
    torch_data = pytest.importorskip("torch.utils.data")

    class Store(torch_data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    workers, written = LoaderStarts(), []
    workers.install_hooks(torch_data.dataloader, CostMeter())
    try:
        subset = torch_data.Subset(torch_data.Subset(Store(), range(4)), range(2))
        loader = iter(torch_data.DataLoader(subset, num_workers=2, multiprocessing_context="fork"))
    finally:
        remove_hooks()
    for _ in range(2):  # each once
        workers.record(lambda time_ns, event, **facts: written.append(facts))
    (facts,) = written
    assert set(facts["workers"]) == {child.pid for child in multiprocessing.active_children()}
    assert facts["dataset"].endswith("Store")
    assert facts["function"].endswith("Store.__getitem__")
    assert facts["line"] == Store.__getitem__.__code__.co_firstlineno
    assert [int(batch) for batch in loader] == [0, 1]
