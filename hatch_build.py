"""Compile the probe's C code while zerotop is built or installed. Without a C compiler the probe does the same in Python."""

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
_OPTIONS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-DPy_LIMITED_API=0x03090000")


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled library to wheels and editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; ``version`` and ``build_data`` are hatchling's."""
        if self.target_name != "wheel" or not compile_library(Path(self.root) / _FOLDER):
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp310-abi3-{platform}"
        build_data["artifacts"].append(f"/{_FOLDER}/{_LIBRARY}")


def compile_library(folder: Path) -> bool:
    """Compile the source in ``folder``, where the library replaces an older one; return whether that worked."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    new = folder / f"{_LIBRARY}.{os.getpid()}"
    include = f"-I{sysconfig.get_path('include')}"
    command = [*shlex.split(compiler), *_OPTIONS, include, str(folder / _SOURCE), "-o", str(new)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            new.replace(folder / _LIBRARY)
            return True
        why = done.stderr.strip()
    except OSError as error:
        why = str(error)
    new.unlink(missing_ok=True)
    (folder / _LIBRARY).unlink(missing_ok=True)
    sys.stderr.write(f"zerotop: no C code in the probe, which does the same in Python: {why[-500:]}\n")
    return False


if __name__ == "__main__":
    sys.exit(not compile_library(Path(__file__).parent / _FOLDER))
