"""Damage real recordings in a thousand ways, and try each in all commands and on all screens.

Counts tracebacks, hangs (10 s), memory (1 GiB), crashes and lists without their healthy recordings. Ends with 1 if there
are any.

python benchmarks/fuzz_recordings.py [--cases 1000] [--workers 2] [--only KIND] [FOLDER with more recordings]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT / "tests" / "support"))

_MAX_RESIDENT_BYTES = 250 << 20
_DATA_BYTES = 3 << 30
_SILENCE_S = 200.0  # a worker that says nothing for longer is stuck outside of Python


def list_cases(options: argparse.Namespace) -> list[tuple[int, str, Path]]:
    """Return (seed, kind of damage, recording) of each case."""
    import recordings
    from fuzzing import KINDS

    packs = [recordings.find_packed_file(name) for name in recordings.list_recordings()]
    for folder in options.folders:
        packs += sorted(Path(folder).glob("*.zerotop"))
    kinds = [kind for kind in KINDS if options.only in (None, kind)]
    first = options.first
    return [(seed, kinds[seed % len(kinds)], packs[seed * 7 % len(packs)]) for seed in range(first, first + options.cases)]


def try_cases(options: argparse.Namespace) -> None:
    """Try the cases whose numbers are read from standard input; write a line of JSON for each step."""
    from fuzzing import find_faults, read_resident_bytes

    # A test that takes more than this would take the machine with it.
    resource.setrlimit(resource.RLIMIT_DATA, (_DATA_BYTES, _DATA_BYTES))
    cases = {seed: (kind, packed) for seed, kind, packed in list_cases(options)}
    for line in sys.stdin:
        seed = int(line)
        kind, packed = cases[seed]
        with tempfile.TemporaryDirectory() as state:
            path = _write_case(packed, kind, seed, Path(state))
            for name, seconds, peak, fault in find_faults(path, kind, seed, seed % options.screens_every == 0):
                report = {"seed": seed, "step": name, "seconds": seconds, "peak": peak, "fault": fault}
                print(json.dumps(report), flush=True)
            os.chdir("/")
        # What one case has left in memory must not count to the next one.
        is_large = read_resident_bytes() > _MAX_RESIDENT_BYTES
        print(json.dumps({"seed": seed, "done": True, "leaving": is_large}), flush=True)
        if is_large:
            return


def _write_case(packed: Path, kind: str, seed: int, state: Path) -> Path:
    """Write a case in a process of its own, as the memory for making a huge one would count."""
    code = "import sys; from pathlib import Path; from fuzzing import write_case; "
    code += "print(write_case(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))"
    if not kind.startswith("huge"):
        from fuzzing import write_case

        return write_case(packed, kind, seed, state)
    folders = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(packed), kind, str(seed), str(state)]
    return Path(subprocess.run(command, env=folders, check=True, capture_output=True, text=True).stdout.strip())


class Worker:
    """A process that tries cases, replaced when it dies or is stuck."""

    def __init__(self, arguments: list[str], results: list[dict[str, Any]]) -> None:
        self._arguments = arguments
        self._results = results
        self._process: subprocess.Popen[str] | None = None
        self._heard_s = 0.0

    def try_case(self, seed: int) -> None:
        """Try one case, and add its results."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, __file__, "--work", *self._arguments]
            # Its threads would wait for each other busily.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{seed}\n")
        process.stdin.flush()
        self._heard_s, stuck = time.monotonic(), threading.Event()
        watchdog = threading.Timer(_SILENCE_S, self._kill_stuck, (process, stuck))
        watchdog.start()
        last = "begin"
        for line in process.stdout:
            watchdog.cancel()
            result = json.loads(line)
            if result.get("done"):
                if result["leaving"]:
                    process.wait()
                return
            self._results.append(result)
            if result["fault"]:
                _, what, text = result["fault"]
                print(f"seed {seed}: {what} in {result['step']}: {text[-300:]}", file=sys.stderr, flush=True)
            last = result["step"]
            watchdog = threading.Timer(_SILENCE_S, self._kill_stuck, (process, stuck))
            watchdog.start()
        watchdog.cancel()
        what = "hang" if stuck.is_set() else "crash"
        fault = [f"after {last}", what, f"exit code {process.wait()}"]
        self._results.append({"seed": seed, "step": f"after {last}", "seconds": 0.0, "peak": 0, "fault": fault})

    @staticmethod
    def _kill_stuck(process: subprocess.Popen[str], stuck: threading.Event) -> None:
        stuck.set()
        process.kill()

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", metavar="KIND")
    parser.add_argument("--screens-every", type=int, default=1, metavar="N", help="all screens for every Nth case only")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        try_cases(options)
        return 0
    cases, results = list_cases(options), list[dict[str, Any]]()
    queue, done = iter(cases), list[int]()
    lock = threading.Lock()
    begin_s = time.monotonic()

    def run_worker() -> None:
        worker = Worker([argument for argument in sys.argv[1:] if argument != "--work"], results)
        while True:
            with lock:
                case = next(queue, None)
            if case is None:
                break
            worker.try_case(case[0])
            done.append(case[0])
            if len(done) % 50 == 0:
                print(f"{len(done)} cases, {time.monotonic() - begin_s:.0f} s", file=sys.stderr, flush=True)
        worker.close()

    threads = [threading.Thread(target=run_worker) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return print_report(cases, results, time.monotonic() - begin_s)


def print_report(cases: list[tuple[int, str, Path]], results: list[dict[str, Any]], seconds: float) -> int:
    """Print the faults, those of one place once, and the figures. Return 1 if there is a fault."""
    by_seed = {seed: (kind, packed.stem) for seed, kind, packed in cases}
    faults = [(result["seed"], *result["fault"]) for result in results if result["fault"]]
    seen: dict[str, list[Any]] = {}
    for seed, step, what, text in faults:
        lines = text.strip().splitlines()
        place = "".join(lines[-3:]) if what == "traceback" else what + step + lines[-1][:60]
        seen.setdefault(place, []).append((seed, step, what, text))
    for group in sorted(seen.values(), key=len, reverse=True):
        seed, step, what, text = group[0]
        print(f"--- {len(group)} x {what} in {step}; seed {seed}: {by_seed[seed][0]} of {by_seed[seed][1]}")
        print(text)
    counts = Counter(what for _, _, what, _ in faults)
    slowest, largest = max(results, key=lambda r: r["seconds"]), max(results, key=lambda r: r["peak"])
    extremes = (f"slowest: {slowest['seconds']:.1f} s", slowest), (f"largest: {largest['peak'] / 2**20:.0f} MiB", largest)
    tried = len({result["seed"] for result in results})
    print(f"{tried} damaged recordings, {len(results)} commands and screens in {seconds:.0f} s")
    print(f"faults: {dict(counts) or 'none'}")
    for text, result in extremes:
        print(f"{text}, {result['step']} of seed {result['seed']} {by_seed[result['seed']][0]}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
