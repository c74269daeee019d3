"""What formulas say of optimizers' state beside the state that real optimizers of PyTorch and transformers make."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from zerotop.analysis.memory.expected.optimizer_states import StateBytes, compute_state_bytes
from zerotop.analysis.memory.expected.zero_model import compute_expected, parse_setup
from zerotop_probe.inside.device.tensor_inventory import build_loop_inventory
from zerotop_probe.inside.facts.loop_facts import _FACT_READERS, LoopParts
from zerotop_probe.inside.inspection.training_library import TrainingLibrary
from zerotop_probe.recording.events import EngineFacts, EngineOptimizer

torch = pytest.importorskip("torch")

SHAPES = ((7, 5), (5,), (2, 3, 4), (3, 2, 2, 2), (), (1, 6), (7, 5))
MATRICES = ((7, 5), (1, 6))


# A class of which nothing is known.
OWN = type("OwnSGD", (torch.optim.SGD,), {})


def make_model(shapes: tuple[tuple[int, ...], ...], dtype: Any, *, frozen: bool) -> Any:
    model = torch.nn.Module()
    model.weights = torch.nn.ParameterList([torch.rand(shape, dtype=dtype) for shape in shapes])
    if frozen:
        model.frozen = torch.nn.Parameter(torch.rand(11, dtype=dtype), requires_grad=False)
    return model


def find_class(name: str) -> Any:
    if name == "transformers.Adafactor":
        return pytest.importorskip("transformers.optimization").Adafactor
    return getattr(torch.optim, name, None)


def measure(
    name: str, settings: dict[str, Any], dtype: Any, *, frozen: bool = True, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> tuple[int | None, int]:
    """Return the bytes of state that are expected, and those that two steps of an optimizer make."""
    kind = find_class(name)
    if kind is None or not set(settings) <= set(inspect.signature(kind).parameters):
        pytest.skip(f"this PyTorch has no {name} with {settings}")
    model = make_model(shapes, dtype, frozen=frozen)
    optimizer = kind(model.parameters(), **settings)
    parts = LoopParts([model], [optimizer], TrainingLibrary())
    (described,) = _FACT_READERS["optimizers"](parts)
    facts = {"kind": "loop", "dtype": "fp32", "device": "cpu", "optimizer": name, "optimizers": [described]}
    setup = parse_setup(EngineFacts(facts | {"parallelism": "", **_FACT_READERS["parameters"](parts)}))
    assert setup is not None
    for _ in range(2):
        for parameter in model.weights:
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
    measured = build_loop_inventory([model], [optimizer]).sum_host_bytes()
    return compute_expected(setup).host.get("optimizer_state"), measured.get("optimizer_state", 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
        ("Adam", {}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("AdamW", {"amsgrad": True, "foreach": True}),
        ("AdamW", {"fused": True}),
        ("Adamax", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Adadelta", {}),
        ("Rprop", {}),
        ("ASGD", {}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Adafactor", {}),
        ("transformers.Adafactor", {}),
        ("transformers.Adafactor", {"beta1": 0.9}),
        ("transformers.Adafactor", {"scale_parameter": False, "relative_step": False, "lr": 1e-3}),
    ],
)
def test_state_is_expected_to_the_byte(name: str, settings: dict[str, Any], dtype: str) -> None:
    expected, measured = measure(name, settings, getattr(torch, dtype))
    assert expected == measured


def test_adagrad_has_its_state_from_the_begin() -> None:
    expected, measured = measure("Adagrad", {}, torch.float32, frozen=False)  # it makes some of frozen parameters too
    assert expected == measured > 0


def test_muon_updates_matrices() -> None:
    expected, measured = measure("Muon", {}, torch.float32, frozen=False, shapes=MATRICES)
    assert expected == measured == 4 * (35 + 6)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, OWN])
def test_nothing_is_expected_of_an_optimizer_without_a_formula(kind: Any) -> None:
    optimizer = kind([torch.nn.Parameter(torch.rand(3))], lr=0.1)
    described = _FACT_READERS["optimizers"](LoopParts([], [optimizer], TrainingLibrary()))
    assert described[0]["tensors"] == [{"shape": [3], "dtype": "fp32", "count": 1, "state_bits": None}]
    assert compute_state_bytes([EngineOptimizer(one) for one in described], 4) is None


# Bytes that bitsandbytes 0.50.2 and torchao 0.18.0 kept on a CPU for an embedding of 100 x 64, a layer of 100 x 64 with a
# bias, and one of 63 x 64 with a bias, in fp32.
QUANTIZED = [
    ("bitsandbytes", "AdamW", 8, 61608),  # as the Trainer makes it for adamw_bnb_8bit, but for its embeddings
    ("bitsandbytes", "AdamW8bit", 8, 61608),
    ("bitsandbytes", "Adam", 32, 135960),
    ("bitsandbytes", "Lion8bit", 8, 30804),
    ("bitsandbytes", "RMSprop8bit", 8, 30804),
    ("bitsandbytes", "SGD8bit", 8, 30804),
    ("bitsandbytes", "AdEMAMix8bit", 8, 91388),
    ("bitsandbytes", "AdEMAMix", 32, 203940),
    ("bitsandbytes", "LAMB8bit", 8, None),
    ("torchao", "AdamW8bit", None, 63676),
]


def describe_quantized(package: str, name: str, bits: int | None, **settings: Any) -> list[dict[str, Any]]:
    shapes = {(100, 64): 2, (63, 64): 1, (100,): 1, (63,): 1}
    kinds = [{"shape": list(shape), "dtype": "fp32", "count": n, "state_bits": bits} for shape, n in shapes.items()]
    return [{"class": name, "package": package, "parameters": 16995, "tensors": kinds, "settings": settings}]


@pytest.mark.parametrize(("package", "name", "bits", "measured"), QUANTIZED)
def test_quantized_state_beside_real_figures(package: str, name: str, bits: int | None, measured: int | None) -> None:
    found = compute_state_bytes([EngineOptimizer(one) for one in describe_quantized(package, name, bits)], 4)
    assert (found and found.moments + found.scalars + found.host_scalars) == measured


def test_paged_state_is_not_in_the_allocator() -> None:
    assert (
        compute_state_bytes(
            [EngineOptimizer(one) for one in describe_quantized("bitsandbytes", "PagedAdamW8bit", 8, is_paged=True)], 4
        )
        is None
    )


def test_layers_that_bitsandbytes_does_not_quantize() -> None:
    """The Trainer registers embeddings as such; until the first step the optimizer itself does not know it."""
    layer = torch.nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.Adam([*layer.parameters(), torch.nn.Parameter(torch.rand(4))])
    optimizer.args = SimpleNamespace(optim_bits=8)
    optimizer.mng = SimpleNamespace(module_weight_config_triple=[(layer, "weight", {"optim_bits": 32})])
    (described,) = _FACT_READERS["optimizers"](LoopParts([], [optimizer], TrainingLibrary()))
    assert {tuple(kind["shape"]): kind["state_bits"] for kind in described["tensors"]} == {(3, 4): 32, (4,): 8}


def test_a_model_that_is_frozen_at_the_moment_is_updated_later() -> None:
    """As of a GAN whose generator takes the first step."""
    layer = torch.nn.Linear(4, 3).requires_grad_(False)
    (described,) = _FACT_READERS["optimizers"](LoopParts([layer], [torch.optim.Adam(layer.parameters())], TrainingLibrary()))
    assert described["parameters"] == 15


@pytest.mark.parametrize(
    ("settings", "places"), [({}, (80, 4)), ({"fused": True}, (84, 0)), ({"capturable": True}, (84, 0))]
)
def test_step_counts_are_in_host_memory_unless_the_gpu_needs_them(settings: dict[str, Any], places: tuple[int, int]) -> None:
    kind = {"shape": [10], "dtype": "fp32", "count": 1, "state_bits": None}
    optimizer = {"class": "Adam", "package": "torch", "parameters": 10, "tensors": [kind], "settings": settings}
    setup = parse_setup(
        EngineFacts({"kind": "loop", "parameters": 10, "optimizer": "Adam", "optimizers": [optimizer], "dtype": "fp32"})
    )
    assert setup is not None
    found = compute_expected(setup)
    assert (found.gpu["optimizer_state"], found.host["optimizer_state"]) == places


def test_factors_of_shards_are_not_known() -> None:
    kind = {"shape": [10, 10], "dtype": "fp32", "count": 1, "state_bits": None}
    optimizers = [{"class": "Adafactor", "package": "torch", "parameters": 100, "tensors": [kind], "settings": {}}]
    assert compute_state_bytes([EngineOptimizer(one) for one in optimizers], 4) == StateBytes(80, 0, 4)
    assert compute_state_bytes([EngineOptimizer(one) for one in optimizers], 4, is_sharded=True) is None
