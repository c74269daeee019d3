"""Telling the threads of OpenMP in a real process from its other threads without a name."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

from agents import build_python_command, wait_for
from zerotop_probe.outside.sampling.thread_libraries import ThreadLibraries

# A thread of Python sleeps, and so does the team of a sum over three threads.
CHILD = """
import threading, time, torch
sleeper = threading.Thread(target=time.sleep, args=(600,), daemon=True)
sleeper.start()
torch.set_num_threads(3)
torch.randn(4_000_000).sum()
print(sleeper.native_id, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere GNU's OpenMP leaves system calls to the C library")
def test_the_team_of_openmp_is_found_and_no_other_thread() -> None:
    with subprocess.Popen(build_python_command(CHILD), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            sleeper = int(process.stdout.readline())
            found: dict[str, str] = {}
            libraries = ThreadLibraries(process.pid, lambda *_, **facts: found.update(facts["libraries"]))
            folder = Path(f"/proc/{process.pid}/task")
            names = {int(tid): (folder / tid / "comm").read_bytes().rstrip(b"\n") for tid in os.listdir(folder)}

            def look() -> bool:
                libraries.check_threads(names)
                return len(found) >= 2

            assert wait_for(look, 60)
            assert len(found) == 2  # beside the thread that called it
            assert all(library.startswith("libgomp") for library in found.values())
            assert not {str(sleeper), str(process.pid)} & found.keys()
        finally:
            process.kill()
