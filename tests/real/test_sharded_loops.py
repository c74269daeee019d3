"""FSDP1 and FSDP2 on two ranks: what was recorded against what the loops counted themselves."""

from __future__ import annotations

import numpy as np
import pytest

from loop_runs import Counted, run_loop_variants
from zerotop.analysis.engine import EngineSummary, parse_engine
from zerotop.analysis.memory.expected.zero_model import compute_expected, parse_setup
from zerotop_probe.recording.events import EngineFacts
from zerotop_probe.recording.tables import BOUNDARY, FAILED

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NAMES = {1: "FSDP", 2: "FSDP2"}
MODULES = ("torch._dynamo", "torch.distributed.fsdp")


VARIANTS = {str(version): (str(version),) for version in NAMES}


@pytest.fixture(scope="module")
def recorded_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counted]:
    return run_loop_variants("sharded", tmp_path_factory.mktemp("fsdp"), VARIANTS, MODULES)


@pytest.fixture(scope="module")
def blind_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counted]:
    return run_loop_variants("sharded", tmp_path_factory.mktemp("blind"), VARIANTS, MODULES, bootstrap=False)


@pytest.fixture(scope="module", params=NAMES)
def sharded_run(request: pytest.FixtureRequest, recorded_runs: dict[str, Counted]) -> tuple[int, Counted]:
    return request.param, recorded_runs[str(request.param)]


def test_losses_are_the_same_to_the_bit_without_the_probe(
    sharded_run: tuple[int, Counted], blind_runs: dict[str, Counted]
) -> None:
    version, counted = sharded_run
    blind = blind_runs[str(version)]
    assert not any(blind.recording.iterdir())
    for number, own in blind.by_rank.items():
        assert own | {"pid": 0} == counted.by_rank[number] | {"pid": 0}


@pytest.mark.parametrize("number", [0, 1])
def test_phases_and_steps(sharded_run: tuple[int, Counted], number: int) -> None:
    rank, own = sharded_run[1].read_rank(number)
    assert not rank.find_events("probe_error")
    assert rank.select_phases("step")[["step", "micro_step", "flags"]].tolist() == [
        (n, 1, BOUNDARY) for n in range(own["steps"])
    ]
    assert rank.select_phases("backward")[["step", "micro_step"]].tolist() == [
        (n, m) for n in range(own["steps"]) for m in (0, 1)
    ]
    assert [list(row) for row in rank.select_phases("forward")[["rows", "sequence"]].tolist()] == own["forwards"]
    assert np.all(rank.spans["flags"] & FAILED == 0)


def test_how_it_is_sharded(sharded_run: tuple[int, Counted]) -> None:
    version, counted = sharded_run
    rank, own = counted.read_rank(0)
    (engine,) = rank.find_events("engine")
    assert engine["unread"] == {}
    assert engine["sharding"] == {
        "ranks": 2,
        "groups": 3,
        "largest_group": 544,  # words and head
        "reshards": version == 1,  # the script tells FSDP2 not to
        "dtype": "bf16",
    }
    assert [engine[name] for name in ("parameters", "trainable_parameters")] == [own["parameters"]] * 2
    assert engine["rank_parameters"] == own["local_parameters"] == own["parameters"] / 2
    shown = EngineSummary(**parse_engine(EngineFacts(engine)))
    assert shown.setup_text == f"{NAMES[version]} x 2, bf16, AdamW"
    assert "fp32, computes in bf16" in shown.describe_engine()


def test_shards_and_what_is_gathered(sharded_run: tuple[int, Counted]) -> None:
    version, counted = sharded_run
    rank, own = counted.read_rank(0)
    hosts = {event["when"]: event["host"] for event in rank.find_events("tensors")}
    shard = 4 * own["local_parameters"]
    assert hosts["init"] == {"parameters": shard}
    # In bf16: with resharding only what the outermost module gathers is kept for the backward.
    gathered = 2 * (544 if version == 1 else own["parameters"])
    assert hosts["before_backward"] == {"parameters": shard, "unsharded_parameters": gathered}
    assert hosts["before_update"] == {"parameters": shard, "gradients": shard}
    setup = parse_setup(EngineFacts(rank.find_events("engine")[0]))
    assert setup is not None
    expected = compute_expected(setup).host
    for category in ("parameters", "gradients", "optimizer_state"):
        # A step count of 4 bytes for each tensor is not expected of FSDP1's flat parameters.
        assert hosts["after_update"][category] == pytest.approx(expected[category], abs=4 * 16 if version == 1 else 0)
