"""The ready DeepSpeed configs: what their names say is what DeepSpeed's own parser reads in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from config_runs import RUNS
from real_jobs import make_environment
from zerotop import demo

FILES = sorted(demo.find_config_folder().glob("*.json"))
NAMES = [path.stem for path in FILES]


@pytest.fixture(scope="module")
def parsed_configs(checkout_root: Path) -> dict[str, dict[str, Any]]:
    script = checkout_root / "tests" / "support" / "parse_configs.py"
    environment = make_environment()
    run = subprocess.run([sys.executable, script, *FILES], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    result: dict[str, dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_config_matches_its_settings(name: str, parsed_configs: dict[str, dict[str, Any]]) -> None:
    words = name.split("_")
    config = parsed_configs[name]
    device = "nvme" if "nvme" in words else "cpu" if "offload" in words else "none"
    assert config["stage"] == int(words[0].removeprefix("zero"))
    assert config["params"] == (device if "params" in words else "none")
    # Weights on NVMe with the optimizer on the GPU would waste the memory that was freed.
    beside = "cpu" if name.startswith("zero3_nvme_params") else "none"
    assert config["optimizer"] == (device if "optimizer" in words else beside)
    assert (config["bf16"], config["fp16"]) == ("bf16" in words, "fp16" in words)


@pytest.mark.parametrize("name", NAMES)
def test_trainer_fills_in_auto(name: str, parsed_configs: dict[str, dict[str, Any]]) -> None:
    assert parsed_configs[name]["autos"] == 0
    assert (parsed_configs[name]["micro_batch"], parsed_configs[name]["accumulation"]) == (3, 5)


def test_every_stage_has_each_offload_it_allows() -> None:
    bf16 = {name.removesuffix("_bf16") for name in NAMES if name.endswith("_bf16")}
    assert bf16 == {
        *(f"zero{stage}" for stage in range(4)),
        *(f"zero{stage}_offload_optimizer" for stage in (1, 2, 3)),
        *(f"zero3_offload_{what}" for what in ("params", "optimizer_params")),
        *(f"zero3_nvme_{what}" for what in ("optimizer", "params", "optimizer_params")),
    }
    assert {f"zero{stage}_fp16" for stage in range(4)} <= set(NAMES)


@pytest.mark.parametrize("path", [path for path in FILES if "fp16" in path.stem], ids=lambda path: path.stem)
def test_fp16_says_where_its_loss_scale_begins(path: Path) -> None:
    fp16 = json.loads(path.read_text())["fp16"]
    assert fp16["loss_scale"] == 0, "0 is DeepSpeed's word for dynamic"
    assert fp16["initial_scale_power"] == 16


def test_each_is_run_for_real_and_listed_in_the_readme() -> None:
    assert set(RUNS) == set(NAMES)
    readme = (demo.find_config_folder() / "README.md").read_text()
    for name in NAMES:
        listed = name if not name.endswith("_fp16") or "offload" in name else "`zero0_fp16` to `zero3_fp16`"
        assert listed in readme, f"{name} is not in the table"


def test_config_is_found_by_name() -> None:
    path = demo.find_config("zero2_offload_optimizer_bf16")
    assert path == demo.find_config("zero2_offload_optimizer_bf16.json")
    assert path.is_file()
    with pytest.raises(FileNotFoundError, match=r"unknown DeepSpeed config zero9. Choose one of: zero0_bf16,"):
        demo.find_config("zero9")
