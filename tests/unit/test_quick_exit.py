"""``os._exit`` says goodbye first, or notes its code, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, sys
from zerotop_probe.inside import guard
from zerotop_probe.inside.interpreter import quick_exit
original = os._exit
quick_exit.watch_quick_exit(lambda: os.write(1, b"goodbye"), lambda code: os.write(1, b"%d" % code))
assert os._exit.__name__ == "_exit" and os._exit.__doc__ == original.__doc__
if sys.argv[2] == "removed":
    guard.remove_hooks()
    assert os._exit is original
os._exit(status=int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("code", "state", "printed"),
    [(0, "watched", b"goodbye"), (3, "watched", b"3"), (0, "removed", b""), (3, "removed", b"")],
)
def test_an_end_is_told(code: int, state: str, printed: bytes) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(code), state], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, printed, b"")
