"""Compile zerotop's C code while it is built or installed.

Without a C compiler the probe does the same in Python, and the command ``zerotop`` is a script, which isolates itself later.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("probe/zerotop_probe/inside/native")
_SOURCE, _LIBRARY = "counted_steps.c", "_counted_steps.abi3.so"
# The limited API of the oldest Python that the probe runs in: one binary for it and all later ones.
_LIBRARY_OPTIONS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-DPy_LIMITED_API=0x03090000")

_LAUNCHER_FOLDER = Path("tui/launcher")
_LAUNCHER_SOURCE, _LAUNCHER, _SCRIPT = "launcher.c", "launcher.bin", "zerotop"
_LAUNCHER_OPTIONS = ("-std=gnu11", "-O2", "-s")


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled library to wheels and editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; ``version`` and ``build_data`` are hatchling's."""
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / _LAUNCHER_FOLDER
        has_launcher = compile_launcher(folder)
        build_data["shared_scripts"][str(folder / (_LAUNCHER if has_launcher else _SCRIPT))] = "zerotop"
        has_library = compile_library(Path(self.root) / _FOLDER)
        if not has_launcher and not has_library:
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp310-abi3-{platform}"
        if has_library:
            build_data["artifacts"].append(f"/{_FOLDER}/{_LIBRARY}")


def compile_library(folder: Path) -> bool:
    """Compile the probe's source in ``folder``; return whether that worked."""
    why = _compile(folder / _SOURCE, folder / _LIBRARY, *_LIBRARY_OPTIONS, f"-I{sysconfig.get_path('include')}")
    if why:
        sys.stderr.write(f"zerotop: no C code in the probe, which does the same in Python: {why[-500:]}\n")
    return not why


def compile_launcher(folder: Path) -> bool:
    """Compile the command ``zerotop`` in ``folder``; return whether that worked."""
    why = _compile(folder / _LAUNCHER_SOURCE, folder / _LAUNCHER, *_LAUNCHER_OPTIONS)
    if why:
        sys.stderr.write(f"zerotop: the command is a script, as it cannot be compiled: {why[-500:]}\n")
    return not why


def _compile(source: Path, result: Path, *options: str) -> str:
    """Compile ``source``; the result replaces an older one. Return why that failed."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    new = result.with_name(f"{result.name}.{os.getpid()}")
    command = [*shlex.split(compiler), *options, str(source), "-o", str(new)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            new.replace(result)
            return ""
        why = done.stderr.strip() or f"{compiler} failed"
    except OSError as error:
        why = str(error)
    new.unlink(missing_ok=True)
    result.unlink(missing_ok=True)
    return why


if __name__ == "__main__":
    sys.exit(not compile_library(Path(__file__).parent / _FOLDER))
