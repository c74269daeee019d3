"""What stragglers and links cost by the figures of NCCL's Inspector, in findings that do not need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory_recording import PlantedRecording, make_gpu_process_sample, make_gpu_sample
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.analysis.findings import Finding, detect_findings
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.tables import BOUNDARY


class Job(PlantedRecording):
    """Two ranks with a step of two seconds; rank 1 needs half a second longer between its phases from step 10 on."""

    def __init__(self, folder: Path, *, late: float = 0.5) -> None:
        super().__init__(folder)
        self.node_event(2)
        for rank in (0, 1):
            spans = []
            for step in range(40):
                begin, gap = 2.0 * step, late if rank == 1 and step >= 10 else 0.0
                spans.append(make_span(begin + gap, begin + gap + 0.5, "forward", step))
                spans.append(make_span(begin + gap + 0.5, begin + 1.9, "step", step, BOUNDARY))
            self.write_event(make_identity(rank), 0, events.Hello, rank=rank, world_size=2)
            self.write_records(tables.SPANS, make_identity(rank), spans)
            self.write_records(tables.BEGINS, make_identity(rank), [(r[0], r[3], 0, r[7], 0, 0, 0) for r in spans])
        samples = [make_gpu_process_sample(at, 100 + gpu, 1, gpu) for at in range(80) for gpu in (0, 1)]
        self.write_records(tables.GPU_PROCESSES, self.node, samples)
        self.write_records(tables.GPUS, self.node, [make_gpu_sample(at, 2, index=gpu) for at in (0, 60) for gpu in (0, 1)])

    def figures(
        self, second: float, rank: int, seconds: float, gbs: float = 100.0, name: str = "AllReduce", missed: int | None = 0
    ) -> None:
        counts = {"count": 10, "missed": missed}
        figure = {"communicator": "0x7f", "collective": name, "seconds": seconds, "bus_gbs": gbs, **counts}
        facts: dict[str, Any] = {"pid": 100 + rank, "start": 1, "seconds": 5.0, "figures": [figure]}
        self.write_event(self.node, second, events.NcclFigures, **facts)

    def find(self, name: str, second: float = 79) -> list[Finding]:
        recording = self.open_recording()
        return [one for one in detect_findings(recording, BEGIN_NS + int(second * S)) if one.name == name]


def plant(job: Job, *, waits: float = 1.5, missed: int | None = 0) -> None:
    for second in (6, 16, 36, 46):
        job.figures(second, 0, waits if second > 20 else 0.25, missed=missed)
        job.figures(second + 0.5, 1, 0.25)


@pytest.mark.parametrize(("missed", "is_priced"), [(None, True), (10, True), (11, False), (990, False)])
def test_a_sample_of_the_collectives_gives_no_price(missed: int | None, is_priced: bool, tmp_path: Path) -> None:
    job = Job(tmp_path)
    plant(job, missed=missed)
    (found,) = job.find("straggler")
    assert ("nccl_wait_s" in found.evidence) is is_priced


def test_a_straggler_is_priced_by_nccl_once_its_figures_are_known(tmp_path: Path) -> None:
    job = Job(tmp_path)
    plant(job)
    (early,), (later,) = job.find("straggler", 34), job.find("straggler", 36.6)
    assert "NCCL" not in early.details
    assert early.event == later.event
    assert "nccl_wait_s" not in early.evidence
    assert later.evidence["nccl_wait_s"] == pytest.approx(0.25 * later.evidence["iteration_s"])
    assert later.known_ns == BEGIN_NS + int(36.5 * S)
    assert "NCCL says that the other ranks are in AllReduce for 500 ms of it longer" in later.details


@pytest.mark.parametrize("case", ["no figures", "of one rank", "the straggler waits itself", "before it only"])
def test_without_figures_that_show_it_a_straggler_has_no_price(tmp_path: Path, case: str) -> None:
    job = Job(tmp_path)
    if case == "of one rank":
        job.figures(36, 0, 1.5)
    elif case == "the straggler waits itself":
        plant(job, waits=0.1)
    elif case == "before it only":
        job.figures(6, 0, 1.5)
        job.figures(6, 1, 0.2)
    (found,) = job.find("straggler")
    assert "NCCL" not in found.details


def test_figures_alone_are_no_finding(tmp_path: Path) -> None:
    job = Job(tmp_path, late=0.0)
    plant(job)
    assert detect_findings(job.open_recording(), BEGIN_NS + 79 * S) == ()


@pytest.mark.parametrize(("kind", "name"), [("nvlinks", "nvlink_faults"), ("pcie_width", "pcie_link")])
def test_a_link_is_priced_by_the_bus_bandwidth_before_and_since(tmp_path: Path, kind: str, name: str) -> None:
    job = Job(tmp_path, late=0.0)
    job.figures(20, 1, 0.3, 240.0)
    job.write_event(job.node, 30, events.GpuFault, gpu=1, gpus=[1], kind=kind, value=8, before=16)
    job.figures(32, 1, 0.3, 10.0)  # about a time that began before the fault
    job.figures(38, 1, 0.6, 120.0)
    (early,), (later,) = job.find(name, 33), job.find(name)
    assert "NCCL" not in early.details
    assert early.event == later.event
    assert later.details.endswith("NCCL moved data in AllReduce at up to 240.0 GB/s before, at 120.0 GB/s since.")
    assert later.evidence["bus_gbs"] == 120


@pytest.mark.parametrize("after", [(38, 235.0, "AllReduce"), (38, 10.0, "Broadcast"), (24, 10.0, "AllReduce")])
def test_a_bandwidth_that_stays_or_is_unknown_is_not_told(tmp_path: Path, after: tuple[float, float, str]) -> None:
    job = Job(tmp_path, late=0.0)
    job.figures(20, 1, 0.3, 240.0)
    job.write_event(job.node, 30, events.GpuFault, gpu=1, gpus=[1], kind="nvlinks", value=8, before=16)
    job.figures(after[0], 1, 0.6, after[1], after[2])
    (found,) = job.find("nvlink_faults")
    assert "NCCL" not in found.details
