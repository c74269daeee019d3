"""Real recordings as recording directories whose tables have many short segments, as if they had lasted for days."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from zerotop.recording.packed.packing import unpack_files
from zerotop_probe.outside.folding.folding import fold_recording
from zerotop_probe.recording import clock, segments
from zerotop_probe.recording.tables import FOLDED_TABLES, INCOMPLETE, PHASE_CODE, SPANS, TABLES, Table


def unpack_segmented(
    packed: Path,
    folder: Path,
    full_detail_s: float,
    max_bytes: int | None = None,
    *,
    lost_steps: Sequence[int] = (),
    incomplete_step: int | None = None,
) -> Path:
    """Unpack a recording, or copy a directory, with segments of a page or a few.

    ``lost_steps``: leave out the spans of these; ``incomplete_step``: say that spans of this one were lost.
    """
    folder.mkdir()
    files = {path.name: path.read_bytes() for path in packed.iterdir()} if packed.is_dir() else unpack_files(packed)
    for name, content in files.items():
        line, _, records = content.partition(b"\n")
        header = json.loads(line) if name.endswith(".rec") else {}
        if name == "session.json":
            info = json.loads(content) | {"full_detail_s": full_detail_s, "max_bytes": max_bytes}
            content = json.dumps(info).encode()
        if header.get("table") not in FOLDED_TABLES:
            (folder / name).write_bytes(content)
            continue
        table = TABLES[header["table"]]
        rows = _convert_records(records, header["dtype"], table)
        if table is SPANS:
            rows = rows[~np.isin(rows["step"], lost_steps)]
            is_step = (rows["phase"] == PHASE_CODE["step"]) & (rows["step"] == incomplete_step)
            rows["flags"][is_step] |= INCOMPLETE
        records = rows.tobytes()
        line = json.dumps(header | {"dtype": table.dtype}).encode()
        size = table.record_struct.size
        with patch.object(segments, "SEGMENT_BYTES", 1):
            each = segments.count_records(size) * size
        for number, begin in enumerate(range(0, max(1, len(records)), each)):
            part = folder / segments.make_name(name.removesuffix(".rec"), number)
            part.write_bytes(segments.pad_header(line) + records[begin : begin + each])
    return folder


def _convert_records(records: bytes, columns: list[list[str]], table: Table) -> Any:
    """Return records of an older version with the columns that were added since."""
    dtype = np.dtype([(name, code) for name, code in columns])
    old = np.frombuffer(records, dtype, len(records) // dtype.itemsize)
    new = np.zeros(len(old), [(name, code) for name, code in table.dtype])
    for name in set(dtype.names or ()) & set(new.dtype.names or ()):
        new[name] = old[name]
    return new


def fold_at(folder: Path, now_ns: int) -> None:
    """Fold a recording of another machine."""
    name = next(path.name for path in folder.glob("*.rec"))
    with open(folder / name, "rb") as file:
        writer = json.loads(file.readline())["writer"]
    with (
        patch.object(clock, "read_hostname", lambda: writer["host"]),
        patch.object(clock, "read_boot_id", lambda: writer["boot"]),
    ):
        fold_recording(str(folder), now_ns)
