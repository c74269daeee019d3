"""What docs/trust.md says of jobs is what is found in their recordings now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from recordings import FOLDER

PROJECT = Path(__file__).resolve().parents[2]
TABLE = PROJECT / "docs" / "trust.md"
# The rows of recordings that are kept here, under shorter names.
ROWS = {
    "hand-clean0": "clean0",
    "hand-clean2": "clean2",
    "hand-foreach": "foreach_off",
    "hand-fp32": "fp32",
    "hand-generate": "generate",
    "hand-rank0": "rank0_only",
    "hand-threads": "more_threads",
}


def test_the_table_is_up_to_date(tmp_path: Path) -> None:
    for name, row in ROWS.items():
        (tmp_path / f"h-{row}.zerotop").symlink_to(FOLDER / f"{name}.zerotop")
    copied = tmp_path / "trust.md"
    copied.write_text(TABLE.read_text())
    options = ["--prefix", "h-", "--table", str(copied), "--without", "peak_owner", "logits_peak"]
    command = [sys.executable, str(PROJECT / "benchmarks" / "trust_table.py"), str(tmp_path), *options]
    subprocess.run(command, check=True, capture_output=True)
    assert copied.read_text().splitlines() == TABLE.read_text().splitlines(), "write it anew by the command in it"
