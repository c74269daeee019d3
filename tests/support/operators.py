"""DeepSpeed's operators for the jobs of the tests: compiled once for each installed torch, and a copy for each worker.

While a rank loads an operator, torch holds a lock file. A rank that is killed then leaves it, and torch waits for a lock
without end: in a common folder one killed job would stop all others.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

# Each by the class that builds it.
OPERATORS = {
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "fused_adam": "FusedAdamBuilder",
}
BUILD = "from deepspeed.accelerator import get_accelerator; get_accelerator().create_op_builder({builder!r}).load()"
BUILD_TIMEOUT_S = 900.0

_copies: list[Path] = []


def operators_folder() -> Path:
    """Return the folder for DeepSpeed's compiled operators: the copy of this process if it has one."""
    return _copies[0] if _copies else _built_folder()


def build_operators(environment: dict[str, str]) -> None:
    """Compile what is missing, in an environment of real_jobs.make_environment; wait for others that do so already."""
    folder = _built_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "building", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for operator, builder in OPERATORS.items():
            if _is_up_to_date(folder / operator / f"{operator}.so"):
                continue
            shutil.rmtree(folder / operator, ignore_errors=True)
            print(f"compiling DeepSpeed's {operator}", flush=True)
            command = [sys.executable, "-c", BUILD.format(builder=builder)]
            own = environment | {"TORCH_EXTENSIONS_DIR": str(folder)}
            subprocess.run(command, env=own, stdout=subprocess.DEVNULL, check=True, timeout=BUILD_TIMEOUT_S)


def _is_up_to_date(library: Path) -> bool:
    """Whether an operator was compiled from what is installed: otherwise torch would compile it again in each worker."""
    origins = [spec.origin for name in ("torch", "deepspeed") if (spec := importlib.util.find_spec(name)) is not None]
    installed = max(Path(origin).stat().st_mtime for origin in origins if origin is not None)
    return library.exists() and library.stat().st_mtime > installed


def use_own_copy() -> None:
    """Let the jobs of this process have a copy of what is compiled; it goes when the process ends."""
    if not _copies:
        copy = Path(tempfile.mkdtemp(prefix="zerotop-operators-"))
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        shutil.copytree(_built_folder(), copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lock", "building"))
        _copies.append(copy)


def remove_locks() -> None:
    """Remove the locks that killed jobs of this process left in its copy."""
    for copy in _copies:
        for lock in copy.glob("*/lock"):
            with suppress(FileNotFoundError):
                lock.unlink()


def _built_folder() -> Path:
    """Return the folder that all tests of this checkout share.

    In torch's usual folder the tests of two checkouts would replace each other's operators, for minutes and under running
    jobs: torch compiles again wherever the path of an installation in the command is another one.
    """
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    installation = hashlib.sha256(str(torch.origin).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "torch_extensions" / f"zerotop-tests-{installation}"


if __name__ == "__main__":
    from real_jobs import make_environment

    build_operators(make_environment())
