"""Blocks of rows x rows elements, from the allocator's totals before and after a rise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zerotop.analysis.findings.support.memory.square_blocks import SquareBlocks, find_square_blocks
from zerotop.analysis.memory.block_lines import AllocatingLine, LineBlocks, Look

GIB, MIB = 1 << 30, 1 << 20
COLUMN = {"name": "output", "scope": "local", "owner": "main", "file": "a.py", "own": True, "levels": 0, "kind": "Tensor"}


def find(rows: int, grown: int, *, allocs: int = 5, frees: int = 0, sizes: tuple[int, ...] = ()) -> SquareBlocks | None:
    names = "device_allocs", "device_frees", "reserved_bytes", "device"
    readings = np.zeros(4, [(name, "<i8") for name in names])
    readings["device_allocs"][2:], readings["device_frees"][2:], readings["reserved_bytes"][2:] = allocs, frees, grown
    held = SimpleNamespace(**COLUMN, count=1, bytes=1, shape=[rows, 1], keeps_graph=False, view_of=None, step=0)
    vars(held).update(added_file=None, added_line=None)
    counted: Any = SimpleNamespace(unix_ns=5, when="before_backward", step=0, held=[held])
    counted.unclaimed_groups = [[512, 3], *([size, 1] for size in sizes)]
    samples = type("Samples", (), {"rows": readings, "times": np.array([0, 10, 20, 30]), "__len__": lambda self: 4})()
    records = SimpleNamespace(read_window=lambda begin_ns, end_ns: samples)
    process: Any = SimpleNamespace(records=lambda name: records, events_of=lambda kind: [counted])
    return find_square_blocks(process, 10, {"end_unix_ns": 20, "rows": rows, "micro_steps": 1}, grown)


@pytest.mark.parametrize(
    ("rows", "grown", "more", "item_bytes"),
    [
        pytest.param(32768, 20 * GIB, {}, 4, id="fp32"),
        pytest.param(32768, 2 * GIB, {"allocs": 1}, 2, id="one in bf16"),
        pytest.param(5000, 3 * 96 * MIB, {"allocs": 3}, 4, id="rounded up"),
        pytest.param(32768, 20 * GIB + 2 * MIB, {"allocs": 6}, 0, id="with another one"),
        pytest.param(32768, 20 * GIB, {"frees": 1}, 0, id="in place of others"),
        pytest.param(32768, 20 * GIB, {"sizes": (4 * GIB,)}, 0, id="a size seen before"),
        pytest.param(1024, 20 * MIB, {"allocs": 5}, 0, id="small ones"),
        pytest.param(12, 20 * GIB, {}, 0, id="of other sizes"),
        pytest.param(-1, 20 * GIB, {}, 0, id="unknown rows"),
    ],
)
def test_new_blocks_of_exactly_rows_x_rows_are_recognized(
    rows: int, grown: int, more: dict[str, Any], item_bytes: int
) -> None:
    found = find(rows, grown, **more)
    assert (found.item_bytes if found is not None else 0) == item_bytes
    if found is not None:
        assert found.fix == "output.squeeze(1)"
        assert f"{rows:,} x {rows:,} elements of {item_bytes} bytes" in str(found.text)


@pytest.mark.parametrize(("lines", "place"), [((51,), "dlrm.py:51"), ((51, 60), None), ((), None)])
def test_the_line_of_the_blocks(lines: tuple[int, ...], place: str | None) -> None:
    square, size = SquareBlocks(5, 4096, 4, ""), 4096**2 * 4
    others = LineBlocks(AllocatingLine("dlrm.py", 29, "main", ()), "forward", ((size // 2, 3),))
    blocks = [LineBlocks(AllocatingLine("dlrm.py", line, "main", ()), "forward", ((64, 1), (size, 2))) for line in lines]
    found = square.find_line(Look("peak", 160, 0, 1, 1, 9 * size, 0, (others, *blocks)))
    assert (found.place, found.fix) == (place, place or "")
    assert str(found.advice).startswith(f"See at {place} whether" if place else "See whether")
    assert found._replace(column="watch").fix == "watch.squeeze(1)"
    assert square.find_line(None) == square
