"""The story behind zerotop as two sweeps on one GPU, whose results are packed into a folder.

    python benchmarks/sweep_story.py OUTPUT [--model qwen-0.5b] [--parts lengths,stages,fit] [--seconds 220]

``lengths``: ZeRO-3 at each sequence length with PyTorch's default allocator and with expandable segments. ``stages``: every
ZeRO stage with every offload mode that it can have. Each is stopped after ``--seconds``: points that are not reached are
missing. ``fit``, only if asked for, searches the longest sequence that fits with and without offload, in at most ten runs.
The first point that offloads compiles DeepSpeed's CPU optimizer, a minute on sixteen cores.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ZEROTOP = [sys.executable, "-m", "zerotop"]
GRACE_S = 40.0
TABLES = ("sweep.json", "results.csv", "results.parquet")


def main() -> None:
    options = parse_options()
    output = Path(options.output)
    common = ["--model", options.model, "--micro-batch", options.micro_batch, "--steps", "8", "--warmup", "3"]
    common += ["--retries", "1", "--hang-after", "120", "--price-per-hour", options.price]
    parts = {
        "lengths": f"sweep --stage 3 --allocator default expandable_segments:True --seq-length {options.lengths}",
        "stages": f"sweep --stage 0,1,2,3 --offload none,optimizer,params,optimizer_params --seq-length {options.length}",
        "fit": "fit --stage 3 --offload none,optimizer --seq-length 256:16384:256 --most-runs 10",
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.parts.split(","):
            folder = Path(scratch, name)
            run_sweep([*ZEROTOP, *shlex.split(parts[name]), "-o", str(folder), *common], options.seconds)
            bring_back(folder, output / name)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", help="folder for tables and packed recordings")
    parser.add_argument("--model", default="qwen-0.5b")
    parser.add_argument("--micro-batch", default="4")
    parser.add_argument("--parts", default="lengths,stages", help="which, separated by commas")
    parser.add_argument("--lengths", default="128,256,512,1024,2048,3072,4096", help="of the first sweep")
    parser.add_argument("--length", default="512", help="of the second sweep")
    parser.add_argument("--price", default="3", help="of the machine, in an hour")
    parser.add_argument("--seconds", type=float, default=220.0, help="for each sweep")
    return parser.parse_args()


def run_sweep(command: list[str], seconds: float) -> None:
    """Run a sweep, and stop it with its job when its time is over."""
    process = subprocess.Popen(command)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(GRACE_S)


def bring_back(folder: Path, output: Path) -> None:
    """Copy a sweep's tables and pack its recordings."""
    (output / "points").mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        shutil.copy(folder / name, output / name)
    for recording in sorted((folder / "points").iterdir()):
        packed = output / "points" / f"{recording.name}.zerotop"
        subprocess.run([*ZEROTOP, "pack", str(recording), "-o", str(packed)], check=False)


if __name__ == "__main__":
    main()
