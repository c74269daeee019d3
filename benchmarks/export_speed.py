"""The speed of exporting a recording of spans to CSV, beside Polars writing the same table from memory.

python benchmarks/export_speed.py [--rows 10000000]
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars

from zerotop.analysis.reports.export import export_table
from zerotop.recording.reader import Recording
from zerotop_probe.recording import directory, tables
from zerotop_probe.recording.writer import Identity, RecordWriter

RANKS = 2
TARGET = 0.5  # of the speed of Polars


def make_recording(path: Path, rows: int) -> Recording:
    """Write a recording with the spans of RANKS ranks behind the real writer's headers."""
    directory.create_recording(["python", "train.py"], path=str(path))
    numbers = np.arange(rows // RANKS)
    forward = numbers % 4 == 0
    made = np.zeros(len(numbers), [(field.name, field.dtype) for field in tables.SPANS.fields])
    made["begin_ns"] = numbers * 1_234_567
    made["end_ns"] = made["begin_ns"] + 1_000_003
    for name, value in (("tokens", 4096), ("rows", 8), ("sequence", 512)):
        made[name] = np.where(forward, value, -1)
    made["step"] = numbers // 8
    made["phase"] = numbers % len(tables.PHASES)
    made["flags"] = numbers % 2
    for rank in range(RANKS):
        who = Identity.for_this_process("rank", rank)
        RecordWriter(str(path), tables.SPANS, who).close()
        with open(path / f"spans-{who.file_stem}.rec", "ab") as file:
            made.tofile(file)
    return Recording.open(path)


def measure_seconds(work: Callable[[Path], object], path: Path) -> float:
    """Return the seconds that writing a new file takes."""
    path.unlink(missing_ok=True)
    begin = time.perf_counter()
    work(path)
    return time.perf_counter() - begin


def main() -> None:
    """Print the rows per second of both exports, the best of five each, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        recording = make_recording(Path(folder, "recording"), rows)
        parquet = io.BytesIO()
        export_table(recording, "spans", "parquet", parquet)
        parquet.seek(0)
        frame = polars.read_parquet(parquet)

        def export_ours(path: Path) -> None:
            with open(path, "wb") as stream:
                export_table(recording, "spans", "csv", stream)

        files = Path(folder, "ours.csv"), Path(folder, "polars.csv")
        times = [(measure_seconds(export_ours, files[0]), measure_seconds(frame.write_csv, files[1])) for _ in range(5)]
        mine, theirs = (min(column) for column in zip(*times, strict=True))
        same = files[0].stat().st_size == files[1].stat().st_size
    print(f"spans, {rows:,} rows, the files {'are' if same else 'are NOT'} of one size")
    print(f"zerotop export   {rows / mine:12,.0f} rows/s, {mine:.2f} s")
    print(f"polars write_csv {rows / theirs:12,.0f} rows/s, {theirs:.2f} s")
    print(f"ratio            {theirs / mine:12.2f}, target {TARGET}")


if __name__ == "__main__":
    main()
