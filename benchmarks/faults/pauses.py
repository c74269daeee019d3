"""Hours of training with pauses that are no hangs: whether a viewer ever says that the job stands still.

    python benchmarks/faults/pauses.py [--hours 2] [--ranks 2] [--seed 1]

The loop (pausing.py) has 100 ms steps; every 6 to 30 s all ranks evaluate, or one of them saves, loads, computes, compiles
or waits for a program that copies a file, for 5 to 60 s, while the others wait for it. A viewer looks twice a second.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "tests" / "support"))

from free_ports import find_free_port
from real_jobs import make_environment
from zerotop.analysis.findings import begin_detection
from zerotop.recording.headers import RecordingError
from zerotop.recording.reader import Recording

_LOOP = Path(__file__).with_name("pausing.py")


def main() -> None:
    """Print each finding once, when a viewer has it first, then the pauses and the findings that speak of hangs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = _start_job(Path(folder), options)
        try:
            hangs = _watch_job(job, Path(folder, "recording"))
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)
                job.wait()
        lines = Path(folder, "output").read_text(errors="replace").splitlines()
    pauses = [line.split() for line in lines if line.startswith("PAUSE ")]
    counts = collections.Counter(words[1] for words in pauses)
    print(f"\n{job.returncode=}, {options.hours} hours, {len(pauses)} pauses: {dict(counts)}")
    print(f"longest {max((float(words[2]) for words in pauses), default=0.0)} s; told falsely: {len(hangs)}")


def _start_job(folder: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": str(options.ranks)}
    script = f"{sys.executable} -u {_LOOP} {options.hours} {options.seed}"
    members = " & ".join(f"RANK={rank} LOCAL_RANK={rank} {script}" for rank in range(options.ranks))
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder / "recording"), "--"]
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(
            [*command, "bash", "-c", f"{members} & wait"],
            cwd=folder,
            env={**make_environment(), **world},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _watch_job(job: subprocess.Popen[bytes], folder: Path) -> set[tuple[str, int]]:
    """Return the findings about hangs, each by its headline and when it began."""
    seen: set[tuple[str, int]] = set()
    hangs: set[tuple[str, int]] = set()
    recording = detection = None
    while job.poll() is None:
        time.sleep(0.5)
        now_ns = time.time_ns()
        if recording is None or detection is None:
            try:
                recording = Recording.open(folder)
            except (RecordingError, OSError):
                continue
            detection = begin_detection(recording)
        recording.refresh()
        detection.update(now_ns)
        for finding in detection.findings_at(now_ns):
            key = finding.name, finding.begin_ns
            if key not in seen:
                seen.add(key)
                print(f"{time.strftime('%H:%M:%S')}  {finding.name:24} {finding.headline}", flush=True)
                if finding.name == "hung_ranks":
                    hangs.add(key)
    return hangs


if __name__ == "__main__":
    main()
