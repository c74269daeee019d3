"""``os._exit`` says goodbye first, or notes its code, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, pickle, sys
from zerotop_probe.inside import guard
from zerotop_probe.inside.interpreter import quick_exit
original = os._exit
quick_exit.watch_quick_exit(lambda: os.write(1, b"goodbye"), lambda code: os.write(1, b"%d" % code))
assert os._exit.__name__ == "_exit" and os._exit.__doc__ == original.__doc__
assert pickle.loads(pickle.dumps(os._exit)) is os._exit
if sys.argv[2] == "removed":
    guard.remove_hooks()
    assert os._exit is original
os._exit(status=int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("code", "state", "printed"),
    [
        *((0, "watched", b"goodbye"), (256, "watched", b"goodbye"), (3, "watched", b"3"), (-1, "watched", b"-1")),
        *((0, "removed", b""), (3, "removed", b"")),
    ],
)
def test_an_end_is_told(code: int, state: str, printed: bytes) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(code), state], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code % 256, printed, b"")


INTERRUPTED = """
import os
from zerotop_probe.inside.interpreter import quick_exit
def interrupt(*code):
    raise KeyboardInterrupt
quick_exit.watch_quick_exit(interrupt, interrupt)
try:
    os._exit(%d)
finally:
    os.write(1, b"goes on")
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_process_ends_whatever_is_raised_before(code: int) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED % code], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (code, b"")
