"""How long a recording of ten million records takes to open, and to seek in; NumPy reading of the same bytes beside it."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from zerotop.analysis.source import RecordingSource
from zerotop.session.reader import Session
from zerotop_probe.recording import directory
from zerotop_probe.recording.tables import BOUNDARY, PHASE_CODE, SPANS
from zerotop_probe.recording.writer import Identity, RecordWriter

RANKS = 8
PER_STEP = ("data", "forward", "backward", "reduce", "step")


def write(path: Path, records: int) -> None:
    """A recording of hand-made steps of five phases on eight ranks; the files' headers are the real writer's."""
    count = records // RANKS // len(PER_STEP) * len(PER_STEP)
    phase = np.tile(np.array([PHASE_CODE[name] for name in PER_STEP]), count // len(PER_STEP))
    identity = Identity.of_this_process("rank", 0)
    for rank in range(RANKS):
        mine = identity._replace(rank=rank, pid=1000 + rank)
        RecordWriter(str(path), SPANS, mine).close()
        spans = np.zeros(count, np.dtype([tuple(field) for field in SPANS.dtype]))
        begin = time.monotonic_ns() + np.arange(count) * 1_000_000
        spans["begin_ns"], spans["end_ns"], spans["phase"] = begin, begin + 900_000, phase
        spans["step"] = np.arange(count) // len(PER_STEP)
        spans["flags"] = np.where(phase == PHASE_CODE["step"], BOUNDARY, 0)
        with open(path / f"spans-{mine.stem}.rec", "ab") as file:
            spans.tofile(file)


def main() -> None:
    """Prints seconds, ratios and the highest resident memory."""
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(directory.create(["python", "train.py"], path=folder + "/session"))
        write(path, records)
        begin = time.perf_counter()
        for file in sorted(path.glob("spans-*.rec")):
            with open(file, "rb") as opened:
                header = json.loads(opened.readline())
                np.fromfile(opened, np.dtype([tuple(field) for field in header["dtype"]]))
        plain = time.perf_counter() - begin
        begin = time.perf_counter()
        source = RecordingSource(Session.open(path))
        view = source.view(None)
        ours = time.perf_counter() - begin
        middle = (source.begin_ns + source.end_ns) // 2
        begin = time.perf_counter()
        source.view(middle)
        seek = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{records:,} records, {len(view.iterations.step):,} steps on {RANKS} ranks")
    print(f"open to first view {ours:.2f} s; reading the bytes with NumPy {plain:.2f} s; ratio {ours / plain:.2f}")
    print(f"seek to the middle {seek * 1e3:.1f} ms; highest resident memory {peak:.0f} MiB, mapped pages included")


if __name__ == "__main__":
    main()
