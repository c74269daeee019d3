"""Each room imported in a bare interpreter: what came along, and what must not have."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from zerotop import demo

LIST = "import json, sys; print(json.dumps(sorted(sys.modules)))"
# ``inside`` wakes torch and DeepSpeed only when the job has imported them.
HEAVY = {"torch", "deepspeed", "transformers", "datasets", "accelerate"}


def list_imported(module: str, *paths: Path, options: tuple[str, ...] = ()) -> set[str]:
    """Top-level names of all modules that importing ``module`` loads."""
    run = subprocess.run(
        [sys.executable, *options, "-c", f"import {module}; {LIST}"],
        env={"PYTHONPATH": ":".join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return {name.partition(".")[0] for name in json.loads(run.stdout)}


def modules_below(folder: Path, package: str) -> list[str]:
    """Import names of all modules in ``folder``, which is the package ``package``."""
    found = [path.relative_to(folder).with_suffix("").parts for path in sorted(folder.rglob("*.py"))]
    return [".".join((package, *(part for part in parts if part != "__init__"))) for parts in found]


@pytest.mark.parametrize("room", ["recording", "inside"])
def test_code_that_runs_in_a_rank_needs_the_standard_library_only(room: str, checkout_root: Path) -> None:
    folder = checkout_root / "probe" / "zerotop_probe" / room
    modules = modules_below(folder, f"zerotop_probe.{room}")
    assert modules
    # Without site (-S) no installed package can be found at all.
    names = list_imported(", ".join(modules), checkout_root / "probe", options=("-S",))
    assert names - set(sys.stdlib_module_names) <= {"zerotop_probe", "__main__"}


def test_bootstrap_folder_holds_one_name(checkout_root: Path) -> None:
    """Everything in it becomes a top-level import in the user's process."""
    folder = checkout_root / "probe" / "zerotop_probe" / "bootstrap"
    assert [path.name for path in folder.glob("*.py")] == ["sitecustomize.py"]


def test_sampler_knows_neither_the_program_nor_torch(checkout_root: Path) -> None:
    modules = modules_below(checkout_root / "probe" / "zerotop_probe" / "outside", "zerotop_probe.outside")
    assert not list_imported(", ".join(modules)) & (HEAVY | {"zerotop", "textual", "rich", "numpy", "polars"})


def test_reading_a_recording_needs_no_screen_and_no_torch(checkout_root: Path) -> None:
    modules = modules_below(checkout_root / "tui" / "zerotop" / "recording", "zerotop.recording")
    assert not list_imported(", ".join(modules)) & (HEAVY | {"textual", "rich"})


def test_analysis_needs_no_screen_and_no_torch(checkout_root: Path) -> None:
    modules = modules_below(checkout_root / "tui" / "zerotop" / "analysis", "zerotop.analysis")
    assert not list_imported(", ".join(modules)) & (HEAVY | {"textual", "rich"})


def test_command_line_starts_without_what_is_heavy() -> None:
    assert not list_imported("zerotop.cli") & (HEAVY | {"numpy", "polars", "textual"})


def test_screen_needs_no_torch(checkout_root: Path) -> None:
    modules = modules_below(checkout_root / "tui" / "zerotop" / "ui", "zerotop.ui")
    assert not list_imported(", ".join(modules)) & HEAVY


def test_users_script_imports_nothing_of_zerotop() -> None:
    tree = ast.parse(demo.SCRIPT_PATH.read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "transformers" in names
    assert not [name for name in names if name.startswith("zerotop")]
