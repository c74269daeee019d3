"""Fetches of data from another iterator than the one that is trained with are marked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from zerotop_probe.inside.hooks.dataloader import DataLoaderHooks
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
