"""A rank that is importing, as while DeepSpeed compiles its operators, is entered when that is over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agents import wait_for
from zerotop_probe.outside.attaching.probe_entry import enter_processes
from zerotop_probe.outside.procfs import ProcessHandle

# The module imports for so long, in Python code; the call for entering waits less for an answer, and longer than a busy
# machine may leave the process without a core.
IMPORTS_S, PATIENCE_S = 24.0, 12.0
MODULE = f"""
import time
print("importing", flush=True)
end = time.monotonic() + {IMPORTS_S}
while time.monotonic() < end:
    time.sleep(0.01)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into any process")
def test_a_rank_is_asked_again_until_it_has_imported(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(MODULE)
    code = "import slow_module, time\nwhile True: time.sleep(0.01)"
    recording = tmp_path / "recording"
    recording.mkdir()
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=output)
    try:
        wait_for(lambda: "importing" in (tmp_path / "output").read_text())
        target = ProcessHandle.from_pid(process.pid)
        assert target is not None
        (entry,) = enter_processes([target], str(recording), patience_s=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    # It imports no more, and that it has no PyTorch is said.
    assert entry.reply == "early", entry.why_not
