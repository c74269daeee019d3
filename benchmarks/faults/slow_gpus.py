"""GPUs that become slow where ranks exchange tensors: whether that is said, and of which rank.

python benchmarks/faults/slow_gpus.py [fsdp2-kernels zero3-none ...] [--ranks 2] [--keep FOLDER]

Each job trains for 80 seconds. ``kernels``: one rank's GPU has more to do; ``pauses``: one rank's CPU launches later;
``links``: from half time on another process copies between the GPUs; ``sockets``: NCCL uses no NVLink and no shared memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from zerotop.analysis.findings import detect_findings
from zerotop.recording.reader import Event, Recording
from zerotop_probe.recording import events

_SCRIPT = Path(__file__).with_name("gathering_gpu.py")
_JOBS = ("fsdp2-kernels", "fsdp2-none", "zero3-kernels", "ddp-kernels", "zero3-none", "fsdp2-pauses", "fsdp1-kernels")


def main() -> None:
    """Print what was planted and what was said, a line for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=_JOBS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--keep", type=Path, help="folder for the recordings")
    parser.add_argument("--options", default="", help="more arguments of the loop")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(options.jobs):
            engine, fault = name.split("-")
            rank = number % options.ranks
            recording = _run_job(engine, fault, rank, options, (options.keep or Path(folder)) / f"{number}-{name}")
            looks = recording.events_of(events.StreamWaits)
            print(f"{name} rank {rank}:", *(_describe_look(look) for look in looks), sep="\n    ", flush=True)
            for one in detect_findings(recording, recording.end_ns):
                print(f"    {one.name} {one.ranks} step {one.step}: {one.headline}", flush=True)


def _describe_look(look: Event) -> str:
    waited = ", ".join(f"{one / 1e6:.1f}" for one in look.facts["waited_ns"])
    return f"rank {look.rank}, step {look.facts['first_step']}: {waited} ms, {look.facts['waits']}, {look.facts['starved']}"


def _run_job(engine: str, fault: str, rank: int, options: argparse.Namespace, folder: Path) -> Recording:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    words = ["--rank", str(rank), "--seconds", str(options.seconds), *options.options.split()]
    job = [sys.executable, "-m", *torchrun, str(_SCRIPT), engine, fault, *words]
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder), "--", *job]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=os.environ)
    if done.returncode:
        print(done.stdout[-3000:], flush=True)
    return Recording.open(folder)


if __name__ == "__main__":
    main()
