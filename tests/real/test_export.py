"""A real recording through ``zerotop export``: every table in every format, the same rows in each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars
import pytest

from config_runs import RUNS
from real_jobs import RANKS, Run
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.reports.export import FORMATS
from zerotop.analysis.reports.export_tables import TABLES
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import BOUNDARY

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

STEPS = [
    *("rank", "step", "begin_unix_s", "iteration_s", "forward_s", "backward_s", "step_s", "micro_steps", "tokens"),
    *("skipped", "allocated_peak_bytes", "reserved_peak_bytes", "host_rss_bytes", "host_held_bytes", "nvml_process_bytes"),
]


def run_zerotop(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "zerotop", *arguments], check=True, timeout=120, capture_output=True)


def from_json_lines(data: bytes, schema: polars.Schema) -> polars.DataFrame:
    return polars.DataFrame([json.loads(line) for line in data.splitlines()], schema=schema)


@pytest.fixture(scope="module")
def recorded_folder(finetune_run: Callable[..., Run]) -> Path:
    launcher, options = RUNS["zero3_bf16"]
    run = finetune_run("zero3_bf16", launcher=launcher, options=options)
    assert run.returncode == 0, run.output[-4000:]
    return run.recording


@pytest.fixture(scope="module")
def exported_tables(
    recorded_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], polars.DataFrame]:
    """Every table as read back from every format, with Parquet's types."""
    folder = tmp_path_factory.mktemp("exported")
    for fmt in FORMATS:
        run_zerotop("export", str(recorded_folder), "--table", "all", "--format", fmt, "-o", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.{fmt}" for name in TABLES for fmt in FORMATS)
    found = {}
    for name in TABLES:
        found[name, "parquet"] = polars.read_parquet(folder / f"{name}.parquet")
        schema = found[name, "parquet"].schema
        found[name, "csv"] = polars.read_csv(folder / f"{name}.csv", schema=schema)
        found[name, "jsonl"] = from_json_lines((folder / f"{name}.jsonl").read_bytes(), schema)
    return found


@pytest.mark.parametrize("table", TABLES)
def test_all_formats_say_the_same(
    recorded_folder: Path, exported_tables: dict[tuple[str, str], polars.DataFrame], table: str
) -> None:
    whole = exported_tables[table, "parquet"]
    for fmt in ("csv", "jsonl"):
        assert exported_tables[table, fmt].columns == whole.columns
        assert exported_tables[table, fmt].equals(whole), (table, fmt)
    recording = Recording.open(recorded_folder)
    if table == "events":
        assert whole.height == len(recording.events) > 0
    elif table == "findings":
        assert whole.height == len(detect_findings(recording, recording.end_ns))
    elif table == "step_parts":
        updates = [source.array["flags"] & BOUNDARY != 0 for source in recording.sources["spans"]]
        assert whole.height == sum(int(boundary.sum()) for boundary in updates) > 0
    elif table == "loss":
        assert set(whole["rank"].unique()) == {0}
        assert whole["learning_rate"].drop_nulls().len() > 0
    elif table == "peaks":
        assert whole.height == 0  # of a device's allocator only
    elif table != "steps":
        assert whole.height == sum(len(source.array) for source in recording.sources[table])


def test_steps_have_what_was_promised(exported_tables: dict[tuple[str, str], polars.DataFrame]) -> None:
    steps = exported_tables["steps", "csv"]
    assert set(STEPS) <= set(steps.columns)
    assert steps["rank"].unique().sort().to_list() == list(range(RANKS))
    always = [name for name in STEPS if name not in ("allocated_peak_bytes", "reserved_peak_bytes", "nvml_process_bytes")]
    assert steps.select(always).null_count().row(0) == (0,) * len(always)
    # There is no GPU in these runs: nothing was recorded, which is not zero.
    assert steps["allocated_peak_bytes"].null_count() == steps.height
    assert (steps["iteration_s"] > 0).all()


def test_launchers_keep_their_rank_and_texts_are_no_formulas(
    exported_tables: dict[tuple[str, str], polars.DataFrame],
) -> None:
    ranks = exported_tables["processes", "csv"]["rank"]
    assert ranks.null_count() == 0
    assert set(ranks.to_list()) >= {-1, *range(RANKS)}
    for table in TABLES:
        for column in exported_tables[table, "csv"].iter_columns():
            if column.dtype == polars.String:
                assert not column.str.contains(r"^[=+\-@\t\r]").any(), (table, column.name)


def test_without_a_file_it_is_standard_output(
    recorded_folder: Path, exported_tables: dict[tuple[str, str], polars.DataFrame]
) -> None:
    said = run_zerotop("export", str(recorded_folder), "--table", "steps", "--format", "jsonl").stdout
    assert from_json_lines(said, exported_tables["steps", "jsonl"].schema).equals(exported_tables["steps", "jsonl"])
