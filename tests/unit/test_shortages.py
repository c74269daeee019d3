"""Messages about shortages, as PyTorch and Python print them."""

from __future__ import annotations

import pytest

from zerotop.analysis.failures.end_causes import SHORTAGES, Short, find_shortage
from zerotop.analysis.failures.tracebacks import parse_tracebacks
from zerotop.recording.output.tail import PrintedLine

WORKER = '  File "/env/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop'
OWN = '  File "train.py", line 3, in <module>'
SENDING = '  File "/env/site-packages/torch/multiprocessing/reductions.py", line 620, in reduce_storage'
KILLED = "RuntimeError: DataLoader worker (pid 24276) is killed by signal: "
EXITED = "RuntimeError: DataLoader worker (pid(s) 24276) "
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
        (OWN, f"{KILLED}Segmentation fault. ", Short.CRASHED_WORKER, True),
        (OWN, f"{EXITED}exited unexpectedly with exit code 3. Details are lost.", Short.EXITED_WORKER, True),
        (OWN, f"{EXITED}exited unexpectedly", None, False),
        (OWN, "RuntimeError: received 0 items of ancdata", Short.SENT_TENSORS, False),
        (SENDING, "OSError: [Errno 24] Too many open files", Short.SENT_TENSORS, False),
        (OWN, "OSError: [Errno 24] Too many open files", Short.OPEN_FILES, False),
        (WORKER, "OSError: [Errno 24] Too many open files: '/data/1.png'", Short.OPEN_FILES, True),
        (OWN, "OSError: [Errno 28] No space left on device: '/tmp/x/y.bin'", Short.SPACE, False),
        (OWN, "OSError: [Errno 28] No space left on device: '/dev/shm/a'", Short.SHARED_MEMORY, False),
        (OWN, "RuntimeError: CUDA out of memory", None, False),
        (OWN, "ValueError: planned", None, False),
    ],
)
def test_the_kind_of_shortage_is_read_from_the_traceback(frame: str, line: str, kind: Short | None, is_worker: bool) -> None:
    lines = [PrintedLine(0, text) for text in ("Traceback (most recent call last):", frame, "    code", line)]
    (traceback,) = parse_tracebacks(lines)
    found = find_shortage(traceback)
    assert (found and (found.kind, found.is_worker)) == (None if kind is None else (kind, is_worker))


def test_the_strategy_of_sharing_is_advised_only_where_tensors_are_sent() -> None:
    assert "sharing_strategy" not in SHORTAGES[Short.OPEN_FILES].advice
    assert "DataLoader" not in SHORTAGES[Short.OPEN_FILES].details
    assert "sharing_strategy" in SHORTAGES[Short.SENT_TENSORS].advice


def test_an_exception_behind_a_bar_of_progress_is_read_and_an_ignored_one_is_not() -> None:
    head, late = "Traceback (most recent call last):", '  File "/env/site-packages/logs/handlers.py", line 9, in close'
    texts = [
        "411it [00:11, 44.38it/s]" + head,
        '  File "fetch.py", line 8, in ask',
        "OSError: [Errno 24] Too many open files",
    ]
    texts += ["Exception ignored in atexit callback: <function close at 0x7f>", head, late, "ValueError: at the exit"]
    (traceback,) = parse_tracebacks([PrintedLine(0, text) for text in texts])
    assert (traceback.place, traceback.error) == ("fetch.py:8 in ask", "OSError")


def test_mixed_lines_of_ranks_keep_their_prefixes() -> None:
    head = "Traceback (most recent call last):"
    texts = [head, f"[rank1]: {head}", '  File "a.py", line 1, in <module>', '[rank1]:   File "b.py", line 2, in <module>']
    lines = [PrintedLine(0, text) for text in [*texts, "ValueError: a", "[rank1]: KeyError: b"]]
    assert [(found.rank, found.place) for found in parse_tracebacks(lines)] == [(None, "a.py:1"), (1, "b.py:2")]
