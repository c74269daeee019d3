"""Figures of NCCL's Inspector: read from its files as they grow, in the formats of its versions."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents import wait_for
from zerotop_probe.outside.procfs import ProcessHandle, read_environment
from zerotop_probe.outside.sampling.nccl_inspector import InspectorReader, enable_inspector

HEADER = {"id": "0x7f8c496ae9f661", "rank": 1, "n_ranks": 2, "nnodes": 1}
METADATA = {"inspector_output_format_version": "v4.0", "hostname": "node1", "pid": 48}


def make_call(number: int, micros: float, speed: float, name: str = "AllReduce") -> dict[str, Any]:
    facts = {"coll": name, "coll_sn": number, "coll_msg_size_bytes": 2 << 20, "coll_exec_time_us": micros}
    return {"coll_perf": facts | {"coll_timing_source": "kernel_gpu", "coll_algobw_gbs": speed / 2, "coll_busbw_gbs": speed}}


def mark(header: dict[str, Any] = HEADER) -> dict[str, Any]:
    return {"header": header, "metadata": METADATA, "dump_stats": {"coll_records": 2}}


class Rank:
    """A process with the variables that ``zerotop run --nccl-inspector`` sets, and the file of its Inspector."""

    def __init__(self, recording: Path, environment: dict[str, str]) -> None:
        self.job = subprocess.Popen([sys.executable, "-c", "input()"], env=environment, cwd=recording, stdin=subprocess.PIPE)
        self.process = ProcessHandle(self.job.pid, 1)
        wait_for(lambda: read_environment(self.job.pid) == environment)
        folder = Path(environment.get("NCCL_INSPECTOR_DUMP_DIR") or recording / "nccl-inspector-unknown-jobid")
        folder.mkdir(exist_ok=True)
        self.file = folder / f"{socket.gethostname()}-pid{self.job.pid}.log"
        self.written: list[dict[str, Any]] = []
        self.reader = InspectorReader(str(recording), lambda: [self.process], self._keep)

    def _keep(self, time_ns: int, event: type, **facts: Any) -> None:
        self.written.append(facts)

    def append(self, *records: dict[str, Any] | str) -> None:
        with self.file.open("a") as file:
            file.writelines(f"{one}\n" if isinstance(one, str) else json.dumps(one) + "\n" for one in records)

    def close(self) -> None:
        self.job.communicate(b"\n")


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    environment = dict(os.environ)
    enable_inspector("/opt/libnccl-profiler-inspector.so", str(tmp_path), environment)
    rank = Rank(tmp_path, environment)
    yield rank
    rank.close()


@pytest.mark.parametrize("is_grouped", [False, True])
def test_figures_are_sums_for_each_communicator_and_collective(rank: Rank, is_grouped: bool) -> None:
    calls = [make_call(1, 400, 90), make_call(2, 600, 120), make_call(3, 50, 10, "Broadcast")]
    other = {**HEADER, "id": "0x1"}
    lines = [mark(), *calls] if is_grouped else [{"header": HEADER, "metadata": METADATA, **call} for call in calls]
    rank.reader.read_figures(10)
    rank.append(*lines, mark(other), make_call(1, 7, 5))
    rank.reader.read_figures(15)
    (event,) = rank.written
    assert (event["pid"], event["seconds"]) == (rank.process.pid, 5)
    first, second, third = event["figures"]
    assert (first["communicator"], first["collective"], first["n_ranks"], first["count"]) == (
        HEADER["id"],
        "AllReduce",
        2,
        2,
    )
    assert (first["seconds"], first["bytes"], first["bus_gbs"]) == (pytest.approx(0.001), 4 << 20, 120)
    assert (second["collective"], second["count"]) == ("Broadcast", 1)
    assert (third["communicator"], third["seconds"]) == ("0x1", pytest.approx(7e-6))


def test_a_line_that_is_not_whole_waits_and_bad_ones_are_skipped(rank: Rank) -> None:
    rank.reader.read_figures(10)
    text = json.dumps(make_call(2, 600, 120))
    bad: list[dict[str, Any]] = [
        {"coll_perf": 5},
        {"coll_perf": {}},
        make_call(1, float("nan"), 1),
        make_call(1, -1, 1),
        {"p2p_perf": {}},
    ]
    rank.append("[]", "{", "[" * 100_000, "\x00\x00", *bad, mark(), *bad, make_call(1, 400, 90))
    with rank.file.open("a") as file:
        file.write(text[:40])
    rank.reader.read_figures(15)
    assert [one["count"] for one in rank.written[0]["figures"]] == [1]
    rank.append(text[40:])
    rank.reader.read_figures(20)
    assert rank.written[1]["figures"][0]["seconds"] == pytest.approx(600e-6)


def test_collectives_that_are_left_out_are_counted_by_kind(rank: Rank) -> None:
    """Version 4.0 writes the last one of each interval, later ones at most 1,024."""
    rank.reader.read_figures(0)
    kinds = [("AllReduce", 7), ("Broadcast", 1), ("AllReduce", 8), ("AllReduce", 12), ("Broadcast", 2)]
    rank.append(mark(), *[make_call(number, 400, 90, name) for name, number in kinds])
    rank.reader.read_figures(5)
    rank.append(mark(), make_call(20, 400, 90), make_call(1, 400, 90))
    rank.reader.read_figures(10)
    counted = [[(one["collective"], one["count"], one["missed"]) for one in event["figures"]] for event in rank.written]
    assert counted == [[("AllReduce", 3, 3), ("Broadcast", 2, 0)], [("AllReduce", 2, 7)]]


def test_figures_that_stay_alike_are_written_once_a_minute(rank: Rank) -> None:
    rank.reader.read_figures(0)
    for second in range(5, 65, 5):
        rank.append(mark(), make_call(second, 400 + second / 10, 90))
        rank.reader.read_figures(second)
    assert len(rank.written) == 1
    rank.append(mark(), make_call(9, 500, 90))
    rank.reader.read_figures(70)
    assert len(rank.written) == 2


def test_blocks_that_were_read_are_given_back_and_the_writer_goes_on(rank: Rank) -> None:
    rank.reader.read_figures(0)
    rank.append(mark(), *[make_call(number, 400, 90) for number in range(4000)])
    size, blocks = rank.file.stat().st_size, rank.file.stat().st_blocks
    rank.reader.read_figures(5)
    after = rank.file.stat()
    assert (after.st_size, rank.written[0]["figures"][0]["count"]) == (size, 4000)
    if after.st_blocks == blocks:
        pytest.skip("this file system has no holes")
    assert after.st_blocks < blocks / 10
    rank.append(make_call(5000, 4000, 9))
    rank.reader.read_figures(10)
    assert rank.written[1]["figures"][0]["count"] == 1


@pytest.mark.parametrize("missing", ["NCCL_PROFILER_PLUGIN", "NCCL_INSPECTOR_ENABLE"])
def test_a_process_without_the_inspector_is_not_read(tmp_path: Path, missing: str) -> None:
    environment = dict(os.environ)
    enable_inspector("/opt/libnccl-profiler-inspector.so", str(tmp_path), environment)
    del environment[missing]
    rank = Rank(tmp_path, environment)
    rank.append(mark(), make_call(1, 400, 90))
    rank.reader.read_figures(0)
    rank.reader.read_figures(5)
    rank.close()
    assert rank.written == []


def test_settings_and_files_of_the_user_stay(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    environment = {
        **os.environ,
        "NCCL_INSPECTOR_DUMP_DIR": "theirs",
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "5",
    }
    enable_inspector("/opt/plugin.so", str(tmp_path), environment)
    assert environment["NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"] == "5"
    rank = Rank(tmp_path, {**environment, "NCCL_INSPECTOR_DUMP_DIR": str(folder)})
    rank.reader.read_figures(0)
    rank.append(mark(), *[make_call(number, 400, 90) for number in range(400)])
    before = rank.file.read_bytes()
    rank.reader.read_figures(5)
    rank.close()
    assert len(rank.written) == 1
    assert rank.file.read_bytes() == before
