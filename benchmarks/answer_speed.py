"""How long ``estimate`` and ``what-if`` take to answer: the least and the median of runs of the whole program.

    python benchmarks/answer_speed.py [--runs 10]

Processor seconds are beside the elapsed ones, which other work on the machine makes longer. The goal is 1 s, and 0.3 s
without torch, which neither command loads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

_RECORDING = str(Path(__file__).parents[1] / "tests" / "recordings" / "gpu-microscope.zerotop")
_HARDWARE = ("--gpus", "8", "--gpu-memory", "80GB")
_QUESTIONS: dict[str, tuple[str, ...]] = {
    "estimate, one setting": ("estimate", "llama-8b", *_HARDWARE, "--stage", "2", "--offload", "none"),
    "estimate, all modes": ("estimate", "llama-8b", *_HARDWARE),
    "estimate, checkpointing": ("estimate", "llama-8b", *_HARDWARE, "--gradient-checkpointing"),
    "estimate --all": ("estimate", "llama-8b", *_HARDWARE, "--all"),
    "what-if": ("what-if", _RECORDING, "--micro-batch", "8"),
}


def ask(words: tuple[str, ...]) -> tuple[float, float]:
    """Return elapsed and processor seconds of one run."""
    before, begin = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "zerotop", *words], stdout=subprocess.DEVNULL, check=True)
    elapsed, after = time.perf_counter() - begin, os.times()
    return elapsed, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    print("| | elapsed, least | median | processor, least | median |\n|---|---|---|---|---|")
    for name, words in _QUESTIONS.items():
        columns = zip(*(ask(words) for _ in range(runs)), strict=True)
        figures = [figure for column in columns for figure in (min(column), statistics.median(column))]
        print(f"| {name} | " + " | ".join(f"{figure:.2f} s" for figure in figures) + " |")


if __name__ == "__main__":
    main()
