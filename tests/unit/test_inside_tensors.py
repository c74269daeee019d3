"""Whose the bytes are: each storage once, by where its tensor hangs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerotop_probe.inside.device.tensor_inventory import Inventory, build_facts, build_inventory, build_loop_inventory
from zerotop_probe.inside.facts.engine_facts import read_facts
from zerotop_probe.inside.facts.loop_facts import _FACT_READERS, LoopParts
from zerotop_probe.inside.inspection.training_library import TrainingLibrary

torch = pytest.importorskip("torch")


class Bucket:
    """Stands for an object of DeepSpeed's own, which may hold tensors in its attributes."""

    __module__ = "deepspeed.runtime.zero.stage_1_and_2"

    def __init__(self, tensor: Any) -> None:
        self.buffer = [tensor]


def make_trained_model(**attributes: Any) -> Any:
    """A model of 24 bf16 parameters, with gradients, whose optimizer keeps a flat fp32 copy and two moments."""
    module = torch.nn.Linear(5, 4).to(torch.bfloat16)
    module.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    flat = torch.zeros(24)
    state = {flat: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(24), "exp_avg_sq": torch.zeros(24)}}
    inner = SimpleNamespace(state=state, param_groups=[{"params": [flat]}])
    optimizer = SimpleNamespace(optimizer=inner, single_partition_of_fp32_groups=[flat], **attributes)
    return SimpleNamespace(module=module, optimizer=optimizer)


EXPECTED = {"parameters": 24 * 2 + 8, "gradients": 24 * 2, "optimizer_state": 2 * 24 * 4 + 4, "master_weights": 24 * 4}


def test_each_has_its_category() -> None:
    assert build_inventory(make_trained_model()).sum_host_bytes() == EXPECTED


def test_views_and_second_finders_count_nothing() -> None:
    engine = make_trained_model()
    engine.optimizer.bit16_groups = [[parameter.data.view(-1) for parameter in engine.module.parameters()]]
    engine.optimizer.anything = engine.optimizer.single_partition_of_fp32_groups[0][3:9]
    assert build_inventory(engine).sum_host_bytes() == EXPECTED


def test_deepspeeds_own_by_name_and_wherever_they_hang() -> None:
    engine = make_trained_model(
        averaged_gradients={0: [torch.zeros(10)]},
        temp_grad_buffer_for_gpu_offload=torch.zeros(100),
        ipg_buckets={"bf16": Bucket(torch.zeros(1000))},
        param_buffer_of_bit16_for_cpu_offload_groups=[torch.zeros(7, dtype=torch.bfloat16)],
        module=torch.nn.Linear(99, 99),
        others=SimpleNamespace(hidden=torch.zeros(5)),
    )
    found = build_inventory(engine).sum_host_bytes()
    assert found.pop("buffers") == 4400
    expected = {**EXPECTED, "gradients": EXPECTED["gradients"] + 40, "parameters": EXPECTED["parameters"] + 14}
    assert found == expected


def test_an_engine_without_optimizer_and_things_without_storage() -> None:
    engine = make_trained_model()
    engine.optimizer = None
    engine.module.register_buffer("nothing", torch.zeros(0))
    engine.module.register_buffer("somewhere", torch.zeros(5, device="meta"))
    inventory = build_inventory(engine)
    assert inventory.sum_host_bytes() == {name: EXPECTED[name] for name in ("parameters", "gradients")}
    assert inventory.unread_count == 0


def test_a_tensor_that_does_not_tell_where_it_is_is_counted() -> None:
    engine = make_trained_model()
    engine.module.register_buffer("sparse", torch.zeros(5).to_sparse())
    inventory = build_inventory(engine)
    assert inventory.sum_host_bytes() == EXPECTED
    assert inventory.unread_count == 1


def test_tensors_in_a_reference_cycle_are_counted_once() -> None:
    ring: list[Any] = [torch.zeros(3)]
    ring.append(ring)
    assert build_inventory(make_trained_model(ring=ring)).sum_host_bytes()["buffers"] == 12


def test_blocks_on_the_device_that_belong_to_no_part() -> None:
    inventory = Inventory()
    for address, category in ((512, "parameters"), (1024, "gradients")):
        storage = SimpleNamespace(nbytes=lambda: 100, data_ptr=lambda address=address: address)
        inventory.add(SimpleNamespace(device=torch.device("cuda"), untyped_storage=lambda s=storage: s), category)
    sizes, unclaimed = inventory.match_blocks({512: 512, 1024: 1536, 4096: 2048, 9000: 4096})
    assert sizes == {"parameters": 512, "gradients": 1536}
    assert list(unclaimed.items()) == [(9000, 4096), (4096, 2048)], "the largest first"


def test_a_version_of_fsdp_that_keeps_its_parameters_elsewhere() -> None:
    """All that does not depend on it is read; which fact is missing is recorded."""
    module = torch.nn.Linear(5, 4)
    groups = SimpleNamespace(_fsdp_param_groups=[SimpleNamespace(parameters_of_tomorrow=[])])
    module.__class__ = type("FSDPLinear", (torch.nn.Linear,), {"_get_fsdp_state": lambda self: groups})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    facts = read_facts(LoopParts([module], [optimizer], TrainingLibrary()), _FACT_READERS)
    assert (facts["parallelism"], facts["parameters"], facts["optimizers"][0]["parameters"]) == ("FSDP2", 24, 24)
    assert facts["sharding"] is None
    assert list(facts["unread"]) == ["sharding"]
    assert build_loop_inventory([module], [optimizer]).sum_host_bytes() == {"parameters": 24 * 4}


def test_the_state_of_several_optimizers_is_distinguished() -> None:
    generator, critic = torch.nn.Linear(3, 5), torch.nn.Linear(5, 1)
    optimizers = [torch.optim.Adam(generator.parameters()), torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)]
    critic(generator(torch.ones(2, 3))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    facts = build_facts(lambda: build_loop_inventory([generator, critic], optimizers), None)
    # Adam: two moments of 20 parameters, and a step count for weight and bias. SGD: the momentum of 6 parameters.
    states = [{"class": "Adam", "device": 0, "host": 2 * 20 * 4 + 2 * 4}, {"class": "SGD", "device": 0, "host": 6 * 4}]
    assert facts["optimizer_states"] == states
    assert facts["host"]["optimizer_state"] == 168 + 24
    alone = build_facts(lambda: build_loop_inventory([generator], optimizers[:1]), None)
    assert "optimizer_states" not in alone


def test_blocks_of_the_state_of_several_optimizers() -> None:
    inventory = Inventory()
    inventory.optimizers = ["AdamW", "SGD"]
    for address, owner in ((512, 0), (1024, 1), (4096, 0)):
        storage = SimpleNamespace(nbytes=lambda: 100, data_ptr=lambda address=address: address)
        tensor = SimpleNamespace(device=torch.device("cuda"), untyped_storage=lambda s=storage: s)
        inventory.add(tensor, "optimizer_state", owner)
    by_blocks = inventory.sum_by_optimizer({512: 512, 1024: 1536, 4096: 2048})
    assert [state["device"] for state in by_blocks] == [2560, 1536]
    assert [state["device"] for state in inventory.sum_by_optimizer(None)] == [200, 100]
