"""The cost of writing the records of 8 ranks from shared memory to a recording, as a share of one core.

    python benchmarks/draining_cost.py [--ranks 8] [--step-ms 56] [--records 16] [--seconds 10]

Real processes put so many records into their rings for each step; this process drains them as a sampler does. The processor
time of the draining thread is measured, with nothing to drain and with all.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zerotop_probe.outside.sampling.ring_collector import Report, RingCollector
from zerotop_probe.recording import directory

RANK = """
import sys, time
from zerotop_probe.recording import tables
from zerotop_probe.recording.rings.ring_files import RingFiles, open_rank_files
from zerotop_probe.recording.writer import Identity
recording, rank, period_s, records = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
files = open_rank_files(recording, Identity.for_this_process("rank", rank))
assert isinstance(files, RingFiles)
spans, begins, allocator = (files.open_table(table) for table in (tables.SPANS, tables.BEGINS, tables.ALLOCATOR))
print("ready", flush=True)
step = 0
while True:
    time.sleep(period_s)
    step += 1
    now = time.monotonic_ns()
    for number in range(records // 2):
        begins.write(now, step, 0, 3, 0, 0, 0)
        spans.write(now, now, 0, step, 0, 0, 0, 3, 0, 0, 0, 0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=56.0)
    parser.add_argument("--records", type=int, default=16, help="of a step [16]")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recording = directory.create_recording(["python", "train.py"], path=str(Path(folder) / "recording"))
        collector = RingCollector(recording, Report(print, print))
        collector.start()
        for ranks in (0, options.ranks):
            started = [start_rank(recording, rank, options) for rank in range(ranks)]
            time.sleep(1.0)
            before_s, begin_s = read_seconds(collector), time.monotonic()
            time.sleep(options.seconds)
            share = (read_seconds(collector) - before_s) / (time.monotonic() - begin_s)
            print(f"{ranks} ranks, {options.records} records each {options.step_ms:g} ms: {share:.2%} of a core", flush=True)
            for process in started:
                process.kill()
                process.communicate()
        collector.finish(10)


def start_rank(recording: str, rank: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    arguments = [recording, str(rank), str(options.step_ms / 1000), str(options.records)]
    process = subprocess.Popen([sys.executable, "-c", RANK, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def read_seconds(thread: RingCollector) -> float:
    """Return the processor time of a thread of this process."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


if __name__ == "__main__":
    main()
