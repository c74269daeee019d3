"""Entering a process that is recorded already, or still lets go of another recording."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from zerotop_probe.recording import directory

AWAKE = """
import shutil, sys, types
from zerotop_probe.inside.hooks import hook_installer as install
first, second = sys.argv[1:]
probe = install.PROBE
probe.start_recording(first)
print(install.enter(second) == first)
probe.leaving = True
print(install.enter(first) == first, probe.leaving)
probe.engines = types.SimpleNamespace(current="in the midst of a step", loop=None)
probe.leaving = True
print(install.enter(second), probe.recording == first)
probe.leaving = False
shutil.rmtree(first)
print(install.enter(second), probe.leaving)
probe.engines = types.SimpleNamespace(current=None, loop=None)
print(install.enter(second), probe.recording == "")
"""


def test_one_that_is_recorded_already(tmp_path: Path) -> None:
    recordings = [directory.create_recording(["python"], path=str(tmp_path / name)) for name in ("first", "second")]
    done = subprocess.run([sys.executable, "-c", AWAKE, *recordings], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "True",  # told where
        "True False",  # and stays, though it was asked to go
        "leaving True",  # not yet gone
        "leaving True",  # what it is recorded in was removed
        "early True",  # gone, and without PyTorch not entered anew
    ]
