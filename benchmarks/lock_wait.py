"""Does the sampler's short switch interval slow the training thread?

In one process a loop trains a small model, computes in Python and gives the lock away in short calls, in blocks that take
turns: nobody samples; a thread samples as usual; it samples as ``wait_promptly`` lets it. Prints the median time of an
iteration in each, as a ratio to the first, and the share of samples that are in the loop in Python.

    python benchmarks/lock_wait.py [NUMBERS]         # 50,000 by default: 2 to 5 ms at a time
"""

from __future__ import annotations

import statistics
import sys
import threading
import time

import torch

from zerotop_probe.inside.interpreter.prompt_lock import wait_promptly

_BLOCKS, _BLOCK_S, _SAMPLE_S = 30, 1.0, 0.02
_NUMBERS = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000


def compute() -> int:
    """Work in pure Python."""
    return sum(number * number for number in range(_NUMBERS))


def sample(main: int, is_prompt: bool, seen: list[bool], over: threading.Event) -> None:
    """Note in which samples the main thread is in ``compute``."""
    while not (wait_promptly(over, _SAMPLE_S) if is_prompt else over.wait(_SAMPLE_S)):
        frame, names = sys._current_frames().get(main), []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        seen.append("compute" in names)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    model, seen = torch.nn.Linear(512, 512), {"usual": [], "prompt": []}  # type: ignore[var-annotated]
    times: dict[str, list[float]] = {"none": [], "usual": [], "prompt": []}
    shares: list[float] = []
    for block in range(_BLOCKS):
        kind = ("none", "usual", "prompt")[block % 3]
        over = threading.Event()
        thread = threading.Thread(
            target=sample, args=(threading.get_ident(), kind == "prompt", seen.get(kind, []), over), daemon=True
        )
        if kind != "none":
            thread.start()
        end_s = time.monotonic() + _BLOCK_S
        while (begin_s := time.monotonic()) < end_s:
            rows = []
            for _ in range(4):
                compute()
                rows.append(torch.randn(512))
            computed_s = time.monotonic()
            model(torch.stack(rows)).sum().backward()
            times[kind].append(time.monotonic() - begin_s)
            shares.append((computed_s - begin_s) / times[kind][-1])
        over.set()
        if kind != "none":
            thread.join()
    base_s = statistics.median(times["none"])
    print(f"in the loop: {statistics.mean(shares):.0%} of the time; iteration: {base_s * 1e3:.2f} ms")
    for kind, samples in seen.items():
        ratio = statistics.median(times[kind]) / base_s
        print(
            f"{kind}: {ratio:.3f} times the iteration, {statistics.mean(samples):.0%} of {len(samples)} samples in the loop"
        )


if __name__ == "__main__":
    main()
