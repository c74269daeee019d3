"""Messages about shortages, as PyTorch and Python print them."""

from __future__ import annotations

import pytest

from zerotop.analysis.failures.end_causes import Short, find_shortage
from zerotop.analysis.failures.tracebacks import parse_tracebacks
from zerotop.recording.output.tail import PrintedLine

WORKER = '  File "/env/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop'
OWN = '  File "train.py", line 3, in <module>'
KILLED = "RuntimeError: DataLoader worker (pid 24276) is killed by signal: "
BUS = (
    f"{KILLED}Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your limit."
)
FULL = "RuntimeError: unable to allocate shared memory(shm) for file </torch_18111_165_0>: No space left on device (28)"


@pytest.mark.parametrize(
    ("frame", "line", "kind", "is_worker"),
    [
        (WORKER, FULL, Short.SHARED_MEMORY, True),
        (OWN, BUS, Short.SHARED_MEMORY, True),
        (WORKER, "RuntimeError: unable to write to file </torch_18692_1954506624>", Short.SHARED_MEMORY, True),
        (OWN, f"{KILLED}Killed. ", Short.WORKER, True),
        (OWN, "RuntimeError: received 0 items of ancdata", Short.OPEN_FILES, False),
        (WORKER, "OSError: [Errno 24] Too many open files: '/data/1.png'", Short.OPEN_FILES, True),
        (OWN, "OSError: [Errno 28] No space left on device: '/tmp/x/y.bin'", Short.SPACE, False),
        (OWN, "OSError: [Errno 28] No space left on device: '/dev/shm/a'", Short.SHARED_MEMORY, False),
        (OWN, "RuntimeError: CUDA out of memory", None, False),
        (OWN, "ValueError: planned", None, False),
    ],
)
def test_kinds(frame: str, line: str, kind: Short | None, is_worker: bool) -> None:
    lines = [PrintedLine(0, text) for text in ("Traceback (most recent call last):", frame, "    code", line)]
    (traceback,) = parse_tracebacks(lines)
    found = find_shortage(traceback)
    assert (found and (found.kind, found.is_worker)) == (None if kind is None else (kind, is_worker))
