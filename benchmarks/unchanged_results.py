"""A check that training with the probe is equal to the bit: losses and final weights, same seed.

    python benchmarks/unchanged_results.py [--ranks 2] [--steps 6] [--only "stage 3"]

Each kind of training runs without the probe, with it, and without it once more: where the two runs without it
differ, DeepSpeed itself is not repeatable there, and the probe is not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import zerotop_probe

BOOTSTRAP = Path(zerotop_probe.__file__).parent / "bootstrap"
LOOP = Path(__file__).resolve().parent.parent / "tests" / "real" / "loops" / "hand_written.py"

KINDS = {
    "stage 0, fp32": ("--stage", "0"),
    "stage 1, bf16": ("--stage", "1", "--dtype", "bf16"),
    "stage 2, bf16": ("--stage", "2", "--dtype", "bf16"),
    "stage 2, fp16, overflows": ("--stage", "2", "--dtype", "fp16", "--scale-power", "20"),
    "stage 3, bf16": ("--stage", "3", "--dtype", "bf16"),
    "stage 3, loss.backward()": ("--stage", "3", "--dtype", "bf16", "--direct"),
    "stage 1, offload": ("--stage", "1", "--dtype", "bf16", "--offload"),
    "stage 2, offload": ("--stage", "2", "--dtype", "bf16", "--offload"),
    "stage 3, offload": ("--stage", "3", "--dtype", "bf16", "--offload"),
}
COMMON = ("--accumulation", "2", "--evaluate-every", "2")


def main() -> None:
    options = parse_options()
    differs = False
    print(f"{'training':28}{'losses':>9}{'weights':>10}{'compared':>10}")
    for name, arguments in KINDS.items():
        if options.only not in name:
            continue
        runs = [run_training((*arguments, *COMMON), options, probe) for probe in (False, True, False)]
        losses, weights, compared = compare_runs(*runs)
        differs |= "differ" in (losses, weights)
        print(f"{name:28}{losses:>9}{weights:>10}{compared:>10}", flush=True)
    raise SystemExit(differs)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps a run [6]")
    parser.add_argument("--only", default="", help="only the kinds with this in their name")
    return parser.parse_args()


def run_training(arguments: tuple[str, ...], options: argparse.Namespace, probe: bool) -> list[dict[str, Any]]:
    """Train once; return the counts of each rank. Raise RuntimeError with the output if the run fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    launcher = shutil.which("deepspeed", path=os.path.dirname(sys.executable)) or "deepspeed"
    head = [launcher, "--num_gpus", str(options.ranks), "--master_port", port, str(LOOP)]
    with tempfile.TemporaryDirectory() as recording:
        variables = {"PYTHONZEROTOP_SESSION": recording, "PYTHONPATH": str(BOOTSTRAP)} if probe else {}
        tools = os.path.dirname(sys.executable)
        path = {"PATH": os.pathsep.join((tools, os.environ.get("PATH", os.defpath)))}
        done = subprocess.run(
            [*head, *arguments, "--steps", str(options.steps)],
            env=os.environ | path | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        recorded = len(list(Path(recording).glob("spans-*.rec")))
    ranks = [json.loads(line[8:]) for line in done.stdout.splitlines() if line.startswith("COUNTED ")]
    if len(ranks) != options.ranks or recorded != options.ranks * probe:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
    return sorted(ranks, key=lambda rank: int(rank["rank"]))


def compare_runs(
    before: list[dict[str, Any]], with_probe: list[dict[str, Any]], after: list[dict[str, Any]]
) -> tuple[str, str, str]:
    """Compare losses and weights: "same", "differ", or "-" if training is not deterministic. Count the losses, too."""
    words = []
    for name in ("losses", "weights"):
        values = [[rank[name] for rank in ranks] for ranks in (before, with_probe, after)]
        same = "same" if values[0] == values[1] else "differ"
        words.append(same if values[0] == values[2] else "-")
    return words[0], words[1], f"{sum(len(rank['losses']) for rank in before)} losses"


if __name__ == "__main__":
    main()
