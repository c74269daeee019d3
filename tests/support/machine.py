"""Little pieces of machine that a test may break: small disks, read-only ones, control groups. Skips where not allowed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agents import wait_for
from zerotop_probe.outside.sampling import cgroup


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a new file system of this size ("1m") at ``folder``; unmount it at the end of the block."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def make_read_only(folder: Path) -> None:
    """Remount the file system of ``small_disk`` read-only."""
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)


@contextmanager
def small_group(limit_bytes: int) -> Iterator[Path]:
    """Make a control group with this memory limit; a process enters it through its ``cgroup.procs``."""
    own = cgroup.find_folder(os.getpid(), "memory") or cgroup.find_folder(os.getpid(), "")
    if own is None:
        pytest.skip("there are no control groups here")
    name = "memory.max" if Path(own, "memory.max").exists() else "memory.limit_in_bytes"
    group = Path(own, f"test-{os.getpid()}")
    try:
        group.mkdir()
        (group / name).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    try:
        yield group
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def run_in_cgroup(group: Path, *command: str) -> list[str]:
    """Return a command line that runs ``command`` in that control group."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "_", *command]
