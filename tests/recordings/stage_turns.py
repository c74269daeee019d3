"""Record a trainer and a stand-in for an inference engine that share a GPU in turns, as GRPO with vLLM's sleep mode does.

Usage: stage_turns.py FOLDER [NAME...]. Both processes are real, started by one script, and set RANK inside themselves;
NVML's answers are played back, with the memory that each says it holds. ``turns-kept``: the engine keeps 300 MiB more of
the GPU after each sleep, and 8 MiB more of host memory. ``turns-clean``: it keeps nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
MIB, GIB = 1 << 20, 1 << 30
KEPT = {"turns-kept": 300 * MIB, "turns-clean": 0}
CYCLES, STEPS = 6, 40
WEIGHTS, ROOM, CONTEXT = 8 * GIB, 32 * GIB, GIB


def say(folder: Path, name: str, held_bytes: int) -> None:
    """Tell NVML's player what this process holds."""
    file = folder / f"{name}.new"
    file.write_text(f"{os.getpid()} {held_bytes}")
    file.replace(folder / name)


def run_engine(folder: Path, kept: int) -> None:
    """Wake for weights, then for everything; generate; sleep. As often as the trainer asks."""
    os.environ.update(RANK="1", WORLD_SIZE="2")
    held = [bytearray(1)]
    for cycle in range(CYCLES):
        say(folder, "engine", CONTEXT + cycle * kept)
        while not (folder / f"wake{cycle}").exists():
            time.sleep(0.05)
        say(folder, "engine", CONTEXT + cycle * kept + WEIGHTS)
        time.sleep(2)
        say(folder, "engine", CONTEXT + cycle * kept + WEIGHTS + ROOM)
        time.sleep(5)
        held.append(bytearray(b"x") * (8 * MIB if kept else 1))
        say(folder, "engine", CONTEXT + (cycle + 1) * kept)
        (folder / f"asleep{cycle}").touch()
    time.sleep(2)


def run_trainer(folder: Path) -> None:
    """Wait for each generation, then train."""
    os.environ.update(RANK="0", WORLD_SIZE="2")
    import torch

    class Slow(torch.nn.Module):  # type: ignore[misc]
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1)
            return inputs

    model = torch.nn.Sequential(Slow(), torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    say(folder, "trainer", 20 * GIB)
    for cycle in range(CYCLES):
        (folder / f"wake{cycle}").touch()
        while not (folder / f"asleep{cycle}").exists():
            time.sleep(0.05)
        for _ in range(STEPS):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def start_both(folder: Path, kept: int) -> None:
    """Be the script that starts both, as Ray's driver does."""
    parts = [subprocess.Popen([sys.executable, HERE, f"--{part}", folder, str(kept)]) for part in ("trainer", "engine")]
    sys.exit(max(part.wait() for part in parts))


def record(name: str, folder: Path) -> None:
    """Record one job."""
    from played_nvml import PlayedNvml

    work = folder / f"{name}.files"
    work.mkdir()
    nvml = PlayedNvml(work)
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder / name), "--"]
    command += ["env", "-u", "LD_LIBRARY_PATH", sys.executable, str(HERE), "--both", str(work), str(KEPT[name])]
    with (folder / f"{name}.out").open("wb") as output:
        environment = nvml.environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        told: dict[str, str] = {}
        while process.poll() is None:
            for part in ("trainer", "engine"):
                if (file := work / part).exists() and told.get(part) != (text := file.read_text()):
                    told[part] = text
                    nvml.hold(0, *map(int, text.split()))
            time.sleep(0.02)
    print(f"{name}: {process.returncode}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--both":
        start_both(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "--engine":
        run_engine(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "--trainer":
        run_trainer(Path(sys.argv[2]))
    else:
        sys.path.insert(0, str(HERE.parents[1] / "support"))
        for each in sys.argv[2:] or KEPT:
            record(each, Path(sys.argv[1]))
