"""What a script calls its model, optimizer and scheduler: found in the functions that call, and used in fixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerotop.analysis.script_terms import read_terms, use_names
from zerotop_probe.inside.facts.script_names import find_names
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording.events import EngineFacts

PATHS = PathNames.for_this_process()


def test_the_outermost_function_with_them_names_them() -> None:
    net = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(net.parameters())
    plan = torch.optim.lr_scheduler.StepLR(adam, 10)

    def train(model: Any, optimizer: Any) -> dict[str, str]:
        return find_names([model], [optimizer], PATHS)

    assert train(net, adam) == {"model": "net", "optimizer": "adam", "scheduler": "plan"}
    del plan
    assert train(net, adam) == {"model": "net", "optimizer": "adam"}


def test_attributes_of_the_object_whose_method_trains_are_named() -> None:
    class Fit:
        def __init__(self) -> None:
            self.encoder = torch.nn.Linear(2, 2)
            self.sgd = torch.optim.SGD(self.encoder.parameters())

        def step(self) -> dict[str, str]:
            return find_names([self.encoder], [self.sgd], PATHS)

    assert Fit().step() == {"model": "self.encoder", "optimizer": "self.sgd"}


def test_a_method_may_call_its_object_otherwise() -> None:
    class Fit:
        def __init__(this) -> None:
            this.net = torch.nn.Linear(2, 2)

        def step(this) -> dict[str, str]:
            return find_names([this.net], [], PATHS)

    assert Fit().step() == {"model": "this.net"}


def test_several_have_no_name_and_values_are_not_kept() -> None:
    nets = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    first, second = nets
    adam = torch.optim.Adam(first.parameters())
    assert find_names([first, second], [adam], PATHS) == {"optimizer": "adam"}


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("with model.no_sync():", "with self.net.no_sync():"),
        ("model = torch.compile(model)", "self.net = torch.compile(self.net)"),
        ('optimizer.add_param_group({"params": new})', 'opt.add_param_group({"params": new})'),
        *[(other, other) for other in ('"optimizer": {"type": "Adam"}', "self.model", "offload_optimizer", "model_fn")],
        ("print(scheduler.get_last_lr())", "print(scheduler.get_last_lr())"),
    ],
)
def test_code_gets_the_names_of_the_script(code: str, named: str) -> None:
    engine = EngineFacts({"kind": "loop", "names": {"model": "self.net", "optimizer": "opt"}})
    assert use_names(code, engine) == named
    assert use_names(code, EngineFacts({"kind": "loop"})) == code
    assert read_terms(engine)["recompute_fix"] == "self.net.gradient_checkpointing_enable()"
