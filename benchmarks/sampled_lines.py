"""Which lines do samples show that are taken while code keeps Python's lock?

A loop trains a small model and does one thing more in each iteration: short code in Python, a call that keeps the lock, an
expression that does. Prints the share of its time, of the samples at its line, of those that are known to show nothing, and
of those at a wrong line; with ``--raw`` each sample counts, as without ``LockWait``.

    python benchmarks/sampled_lines.py [--raw]
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch

from zerotop_probe.inside.stacks.frames import UNKNOWN_STACK, StackReader
from zerotop_probe.inside.stacks.lock_wait import LockWait
from zerotop_probe.inside.stacks.paths import PathNames

_KINDS = ("short", "regex", "json", "hash", "sort", "contains", "concatenate", "compare")
_SECONDS, _SAMPLE_S = 4.0, 0.013
_WORDS = [f"word{random.randrange(9999)}" for _ in range(4000)]
_TEXT, _KNOWN, _NUMBERS = " ".join(_WORDS), list(range(1000, 60_000)), [random.random() for _ in range(7000)]
_EQUAL = [number + 0 for number in _KNOWN]
_RECORD = {f"key {number}": [number, number / 3, str(number)] for number in range(600)}
_ROWS, _LAYER = torch.randn(128, 256), torch.nn.Linear(256, 256)


def count_up(limit: int) -> int:
    total = 0
    for number in range(limit):
        total += number % 7  # slow: short
    return total


def work(kind: str, found: list[object]) -> None:  # noqa: C901 as each kind needs a line of its own
    """Do one thing that keeps the lock."""
    if kind == "short":
        count_up(20_000)
    elif kind == "regex":
        text = re.sub(r"(\w+)(\d)", r"\2\1", _TEXT)  # slow: regex
        found.append(len(text))
    elif kind == "json":
        found.append(json.dumps(_RECORD))  # slow: json
    elif kind == "hash":
        digest = hashlib.md5(usedforsecurity=False)
        for word in _WORDS:
            digest.update(word.encode())  # slow: hash
    elif kind == "sort":
        ordered = sorted(_NUMBERS)  # slow: sort
        found.append(ordered[0])
    elif kind == "contains":
        for number in (59_999, 59_990, 59_980):
            if number in _KNOWN:  # slow: contains
                found.append(number)
    elif kind == "concatenate":
        joined = _KNOWN + _KNOWN + _KNOWN + _KNOWN  # slow: concatenate
        found.append(len(joined))
    elif kind == "compare":
        is_same = _KNOWN == _EQUAL  # slow: compare
        found.append(is_same)
    found.clear()


def train() -> None:
    rows = _ROWS + 0.01
    for _ in range(12):
        rows = _LAYER(rows)
    rows.sum().backward()


def sample(trainer: int, over: threading.Event, is_raw: bool, lines: list[int]) -> None:
    """Note the line of each sample: 0 for none, -1 in ``train``."""
    reader, lock = StackReader(PathNames(os.path.dirname(os.path.abspath(__file__)), [])), LockWait()
    while not over.is_set():
        lock.wait(over, _SAMPLE_S, is_prompt=True)
        stack = reader.read_stack(sys._current_frames()[trainer], is_late=lock.is_late and not is_raw)
        if stack is UNKNOWN_STACK or (lock.is_misleading and not is_raw):
            lines.append(0)
        else:
            own = next((frame for frame in stack.frames if frame.own), None)
            lines.append(0 if own is None else -1 if own.function == "train" else own.line)


def main() -> None:
    torch.set_num_threads(1)
    source = Path(__file__).read_text().splitlines()
    slow = {line.rpartition("# slow: ")[2]: number for number, line in enumerate(source, 1) if "  # slow: " in line}
    print(f"{'':12}{'time':>8}{'right':>8}{'nothing':>8}{'wrong':>8}")
    for kind in _KINDS:
        over, lines, spent_s = threading.Event(), list[int](), 0.0
        thread = threading.Thread(target=sample, args=(threading.get_ident(), over, "--raw" in sys.argv, lines))
        thread.start()
        begin_s = time.monotonic()
        while time.monotonic() - begin_s < _SECONDS:
            work_s = time.monotonic()
            work(kind, [])
            spent_s += time.monotonic() - work_s
            train()
        over.set()
        thread.join()
        counts, total = Counter(lines), len(lines)
        right, nothing = counts[slow[kind]] / total, counts[0] / total
        wrong = 1 - right - nothing - counts[-1] / total
        print(f"{kind:12}{spent_s / _SECONDS:8.0%}{right:8.0%}{nothing:8.0%}{wrong:8.0%}")


if __name__ == "__main__":
    main()
