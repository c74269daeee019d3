"""Names of what keeps device memory: here of tensors on the host, whose blocks stand for those of a GPU."""

from __future__ import annotations

import functools
import sys
from typing import Any, ClassVar

import pytest
import torch

from zerotop_probe.inside.changes import held_tensors
from zerotop_probe.inside.changes.held_tensors import describe_held
from zerotop_probe.inside.growing_containers import reachable_values
from zerotop_probe.inside.stacks import code_positions


@pytest.fixture(autouse=True)
def _leave_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a search end on a busy machine, too: it is given 20 ms in a job."""
    monkeypatch.setattr(held_tensors, "_MOST_NS", 10 * 10**9)
    monkeypatch.setattr(reachable_values, "_MOST_NS", 10 * 10**9)


class Trainer:
    tails: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        self.features: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

    def keep_views(self) -> list[dict[str, Any]]:
        for _ in range(5):
            output = torch.randn(8, 16, 100)
            self.tails.append(output[:, -1])
        return describe_held(list_blocks(*self.tails), sys._getframe())

    def keep_pairs(self) -> list[dict[str, Any]]:
        for step in range(5):
            self.features[step % 10 + 2] = (torch.randn(50), torch.randn(50))
        return describe_held(list_blocks(*[one for pair in self.features.values() for one in pair]), sys._getframe())

    def keep_by_hook(self) -> list[dict[str, Any]]:
        seen: list[torch.Tensor] = []

        def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
            seen.append(output)

        handle = self.model[0].register_forward_hook(note)
        for _ in range(3):
            self.model(torch.randn(4, 8))
        blocks = list_blocks(*seen)
        del seen[3:]
        found = find_from_hook(self.model, blocks)
        handle.remove()
        return found


def find_from_hook(model: torch.nn.Module, blocks: dict[int, int]) -> list[dict[str, Any]]:
    """Search where only the hook's own variable leads to the list."""
    frame = sys._getframe()
    return describe_held(blocks, frame)


def list_blocks(*tensors: torch.Tensor) -> dict[int, int]:
    storages = [one.untyped_storage() for one in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_a_list_of_views_that_is_an_attribute_of_a_class_is_named_with_its_line() -> None:
    (held,) = [one for one in Trainer().keep_views() if one["kind"] == "list"]
    assert (held["name"], held["scope"], held["owner"], held["count"]) == ("tails", "attribute", "Trainer", 5)
    assert held["view_of"] == [8, 16, 100]
    assert held["bytes"] == 5 * 4 * 8 * 16 * 100
    assert held["added_function"] == "Trainer.keep_views"


def test_tensors_in_pairs_of_a_dict_are_counted_together_and_its_subscript_is_the_line() -> None:
    held = Trainer().keep_pairs()[0]
    assert (held["name"], held["kind"], held["count"], held["bytes"]) == ("features", "dict", 10, 10 * 200)
    assert held["added_function"] == "Trainer.keep_pairs"


def test_a_list_of_a_hook_is_found_through_its_function() -> None:
    held = Trainer().keep_by_hook()[0]
    assert (held["name"], held["kind"], held["count"]) == ("seen", "list", 3)
    assert held["added_function"] == "Trainer.keep_by_hook.<locals>.note"


@pytest.mark.parametrize("is_freed", [False, True])
def test_blocks_of_a_graph_count_for_the_list_of_losses_until_a_backward_frees_them(is_freed: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(50, 50))
    losses = []
    blocks: dict[int, int] = {}
    for _ in range(4):
        hidden = torch.tanh(torch.randn(30, 50) @ weight)
        blocks |= list_blocks(hidden)
        losses.append(hidden.square().mean())
        del hidden
        if is_freed:
            losses[-1].backward()
    blocks |= list_blocks(*losses)
    held = next(one for one in describe_held(blocks, sys._getframe()) if one["name"] == "losses")
    assert held["keeps_graph"] == (not is_freed)
    assert held["bytes"] == 4 * 4 + (0 if is_freed else 4 * 30 * 50 * 4)
    assert held["count"] == 4


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_graph_that_saves_lists_is_followed_though_freed(is_freed: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(50, 50))
    hidden = torch.tanh(weight)
    blocks = list_blocks(hidden)
    kept = hidden[torch.tensor([1, 2])]  # its node saves the list of indices, as that of an LSTM saves its weights
    del hidden
    if is_freed:
        kept.sum().backward()
    blocks |= list_blocks(kept)
    held = next(one for one in describe_held(blocks, sys._getframe()) if one["name"] == "kept")
    assert held["keeps_graph"] == (not is_freed)
    assert held["bytes"] == 4 * 2 * 50 + (0 if is_freed else 4 * 50 * 50)


class Slots:
    __slots__ = ("kept_in_slot",)

    def __init__(self) -> None:
        self.kept_in_slot: list[torch.Tensor] = []


def keep(store: list[torch.Tensor], module: Any, inputs: Any, output: torch.Tensor) -> None:
    store.append(output.detach())


def remember(tensor: torch.Tensor, memory: list[torch.Tensor] = []) -> list[torch.Tensor]:  # noqa: B006
    memory.append(tensor)
    return memory


def keep_in_slots() -> list[dict[str, Any]]:
    slots = Slots()
    for _ in range(3):
        slots.kept_in_slot.append(torch.randn(100))
    return describe_held(list_blocks(*slots.kept_in_slot), sys._getframe())


def keep_by_partial() -> list[dict[str, Any]]:
    layer = torch.nn.Linear(8, 8)
    layer.register_forward_hook(functools.partial(keep, []))
    for _ in range(3):
        layer(torch.randn(4, 8))
    (hook,) = layer._forward_hooks.values()
    blocks = list_blocks(*hook.args[0])
    return describe_held(blocks, sys._getframe())


def keep_by_default() -> list[dict[str, Any]]:
    for _ in range(3):
        remember(torch.randn(100))
    return describe_held(list_blocks(*remember.__defaults__[0]), sys._getframe())  # type: ignore[index]


def keep_by_key() -> list[dict[str, Any]]:
    history: dict[str, list[torch.Tensor]] = {"loss": []}
    for _ in range(3):
        history["loss"].append(torch.randn(100))
    return describe_held(list_blocks(*history["loss"]), sys._getframe())


@pytest.mark.parametrize(
    ("run", "name", "owner", "added"),
    [
        (keep_in_slots, "kept_in_slot", "Slots", "keep_in_slots"),
        (keep_by_partial, "store", "keep", "keep"),
        (keep_by_default, "memory", "remember", "remember"),
        (keep_by_key, "history", "keep_by_key", "keep_by_key"),
    ],
)
def test_lists_in_slots_arguments_defaults_and_dicts(
    run: Any, name: str, owner: str, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test's process has more modules than a job's, and may be busy.
    monkeypatch.setattr(reachable_values, "_MOST_NS", 10 * 10**9)
    monkeypatch.setattr(reachable_values, "_MOST_VALUES", 10**7)
    monkeypatch.setattr(code_positions, "_MOST_CODES", 10**6)
    held = run()[0]
    assert (held["name"], held["owner"], held["count"]) == (name, owner, 3)
    assert held["added_function"] == added
