"""How fast a recording of spans is exported to CSV, beside Polars writing the same table from memory.

python benchmarks/export_speed.py [--rows 10000000]
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars

from zerotop.analysis.export import export
from zerotop_probe.recording import tables


def recording(path: Path, rows: int) -> Any:
    """A memory-mapped recording of spans as two ranks would write them."""
    made = np.zeros(rows, [(field.name, field.dtype) for field in tables.SPANS.fields])
    numbers = np.arange(rows)
    made["begin_ns"] = numbers * 1_234_567
    made["end_ns"] = made["begin_ns"] + 1_000_003
    made["tokens"] = np.where(numbers % 4 == 0, 4096, -1)
    made["rows"] = np.where(numbers % 4 == 0, 8, -1)
    made["sequence"] = np.where(numbers % 4 == 0, 512, -1)
    made["step"] = numbers // 8
    made["phase"] = numbers % len(tables.PHASES)
    made["flags"] = numbers % 2
    made.tofile(path)
    mapped = np.memmap(path, made.dtype, mode="r")
    half = rows // 2
    sources = [
        SimpleNamespace(array=part, offset_ns=1_700_000_000_000_000_000, rank=rank, host="node1", pid=rank)
        for rank, part in enumerate((mapped[:half], mapped[half:]))
    ]
    return SimpleNamespace(sources={"spans": sources}, events=[])


def main() -> None:
    """Prints rows a second of both, best of three, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        session = recording(Path(folder, "spans"), rows)
        parquet = io.BytesIO()
        export(session, "spans", "parquet", parquet)
        parquet.seek(0)
        frame = polars.read_parquet(parquet)
        ours, theirs = [], []
        for _ in range(3):
            begin = time.perf_counter()
            with open(Path(folder, "ours.csv"), "wb") as stream:
                export(session, "spans", "csv", stream)
            ours.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            frame.write_csv(Path(folder, "polars.csv"))
            theirs.append(time.perf_counter() - begin)
        same = Path(folder, "ours.csv").stat().st_size == Path(folder, "polars.csv").stat().st_size
        print(f"spans, {rows:,} rows, the files {'are' if same else 'are NOT'} of one size")
        print(f"zerotop export   {rows / min(ours):12,.0f} rows/s")
        print(f"polars write_csv {rows / min(theirs):12,.0f} rows/s")
        print(f"ratio            {min(theirs) / min(ours):12.2f}")


if __name__ == "__main__":
    main()
