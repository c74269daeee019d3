"""What is shipped: built the way a release is, through the sdist to the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def shipped_files(root: Path) -> set[str]:
    """All files of the two packages, and the configs, by their place in the wheel."""
    found = set()
    for source in (root / "tui" / "zerotop", root / "probe" / "zerotop_probe"):
        files = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        found |= {str(path.relative_to(source.parent)) for path in files}
    configs = (root / "ds_configs").iterdir()
    return found | {f"zerotop/demo/ds_configs/{path.name}" for path in configs}


@pytest.fixture(scope="module")
def built_wheel(checkout_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(checkout_root)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_both_packages_whole_and_nothing_else(built_wheel: Path, checkout_root: Path) -> None:
    names = set(zipfile.ZipFile(built_wheel).namelist())
    shipped = {name for name in names if ".dist-info/" not in name}
    version = next(name.partition(".dist-info/")[0] for name in names if ".dist-info/" in name)
    assert shipped == shipped_files(checkout_root) | {f"{version}.data/scripts/zerotop"}
    assert {
        "zerotop/py.typed",
        "zerotop/demo/finetune.py",
        "zerotop/demo/story.zerotop",
        "zerotop/demo/ds_configs/zero2_offload_optimizer_bf16.json",
        "zerotop_probe/py.typed",
        "zerotop_probe/bootstrap/sitecustomize.py",
    } <= shipped


def test_training_stack_is_an_extra(built_wheel: Path) -> None:
    archive = zipfile.ZipFile(built_wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = archive.read(metadata).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    names = {line.split()[1].split(">")[0].split("<")[0] for line in needed}
    assert {"textual", "numpy"} <= names
    assert not names & {"torch", "deepspeed", "transformers", "accelerate"}


def test_installed_package_finds_its_configs(built_wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(built_wheel).extractall(tmp_path)
    code = "from zerotop import demo; print(demo.find_config('zero3_bf16')); print(demo.SCRIPT_PATH)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    config, script = run.stdout.splitlines()
    assert Path(config) == tmp_path / "zerotop" / "demo" / "ds_configs" / "zero3_bf16.json"
    assert Path(script).is_file()
