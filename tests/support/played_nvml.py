"""NVML's answers played back: a library that the real code loads, whose script a test writes while a job runs."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).parent / "nvml" / "fake_nvml.c"


@functools.lru_cache(maxsize=1)
def build_library() -> Path:
    """Compile the library once for this process; return its folder."""
    folder = Path(tempfile.mkdtemp(prefix="played-nvml-"))
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", target, _SOURCE], check=True, timeout=60)
    return folder


class PlayedNvml:
    """A script of answers. The values that a healthy H100 has are there from the begin."""

    def __init__(self, folder: Path, gpus: int = 1) -> None:
        self.path = folder / "nvml.txt"
        self._lines = [f"gpus {gpus}"]
        for gpu in range(gpus):
            self.add(*(f"{gpu}.field.{number} 0" for number in (3, 4, 38, 45, 52, 59, 94, 142, 143, 144, 145, 230)))

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a sampler that loads this library."""
        return os.environ | {"LD_LIBRARY_PATH": str(build_library()), "PLAYED_NVML": str(self.path)}

    def add(self, *lines: str) -> None:
        """Add lines; one that names a value takes the place of an earlier one."""
        for line in lines:
            key = line.split()[0]
            self._lines = [one for one in self._lines if "." not in key or one.split()[0] != key] + [line]
        self._write()

    def hold(self, gpu: int, pid: int, held_bytes: int) -> None:
        """Let a process hold memory of a GPU."""
        self._lines = [one for one in self._lines if one.split()[:3] != ["pid", str(gpu), str(pid)]]
        self.add(f"pid {gpu} {pid} {held_bytes}")

    def remove(self, line: str) -> None:
        """Remove a line."""
        self._lines.remove(line)
        self._write()

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(self._lines) + "\n")
        new.replace(self.path)
