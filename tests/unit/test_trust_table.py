"""The benchmark that writes the table of ``docs/trust.md`` tells what a recording's findings say."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import recordings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_last_cell_has_the_warnings_with_their_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "gpu-slow"
    (tmp_path / f"h-{name}.zerotop").symlink_to(recordings.find_packed_file(name))
    table = tmp_path / "table.md"
    table.write_text(f"| job | said now |\n| --- | --- |\n| {name} | old |\n| another | kept |\n")
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr("sys.argv", ["trust_table", str(tmp_path), "--prefix", "h-", "--table", str(table)])
    importlib.import_module("trust_table").main()
    text = table.read_text()
    assert "| another | kept |" in text
    assert "**Iterations take " in text
    assert " of the training time" in text
