"""Findings about hardware faults of GPUs: which rank, whose fault, and what it explains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory_recording import PlantedRecording, make_gpu_process_sample, make_gpu_sample
from recordings import open_recording
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.analysis.failures.diagnosis import find_known_failure
from zerotop.analysis.findings import Finding, detect_findings, link_findings
from zerotop.analysis.hardware.gpu_faults import name_fault
from zerotop.analysis.hardware.xids import XIDS, Origin, describe_xid, format_table
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.tables import BOUNDARY

NAMES = (
    "gpu_xid",
    "gpu_event",
    "gpu_lost",
    "gpu_memory_faults",
    "nvlink_faults",
    "pcie_link",
    "gpu_recovery",
    "nvml_silent",
)
# Numbers that NVIDIA's document blames on the application first.
OF_THE_CODE = (13, 31, 43, 68, 69)


class Job(PlantedRecording):
    """Two ranks with a step in each second; NVML lists rank 0 on GPU 0 and rank 1 on GPU 1."""

    def __init__(self, folder: Path, *, steps: int = 20, begin: int = 0, listed: bool = True) -> None:
        super().__init__(folder)
        self.node_event(2)
        for rank in (0, 1):
            spans = [make_span(begin + i, begin + i + 0.9, "step", i, BOUNDARY) for i in range(steps)]
            self.write_event(make_identity(rank), begin, events.Hello, rank=rank, world_size=2)
            self.write_records(tables.SPANS, make_identity(rank), spans, born=begin)
            starts = [(row[0], row[3], 0, row[7], 0, 0, 0) for row in spans]
            self.write_records(tables.BEGINS, make_identity(rank), starts, born=begin)
        if listed:
            ticks = range(begin, begin + steps)
            samples = [make_gpu_process_sample(at, 100 + gpu, 1, gpu) for at in ticks for gpu in (0, 1)]
            self.write_records(tables.GPU_PROCESSES, self.node, samples)
        self.write_records(tables.GPUS, self.node, [make_gpu_sample(at, 2, index=gpu) for at in (0, 60) for gpu in (0, 1)])

    def report(self, second: float, severity: int, *traits: str, xid: int | None = None, **facts: Any) -> None:
        """Write a GPU Operational Event."""
        report = {"module": "GPU-RAS", "code": 23, "category": 2, "severity": severity, "group": 7, "traits": traits} | facts
        self.fault(second, "operational", xid, report=report)

    def fault(self, second: float, kind: str, value: int | None = None, gpu: int = 1, **facts: Any) -> None:
        self.write_event(self.node, second, events.GpuFault, gpu=gpu, gpus=[gpu], kind=kind, value=value, **facts)


def find(recording: Recording, second: float | None = None, names: tuple[str, ...] = NAMES) -> list[Finding]:
    cursor_ns = recording.last_written_ns if second is None else BEGIN_NS + int(second * S)
    return [finding for finding in detect_findings(recording, cursor_ns) if finding.name in names]


def test_an_xid_names_its_rank_and_step_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.fault(10.5, "xid", 79)
    (finding,) = find(job.open_recording(), 10.6)
    assert finding.headline == "GPU 1 of rank 1 reported Xid 79, fallen off the bus"
    assert (finding.ranks, finding.step, finding.known_ns) == ((1,), 10, BEGIN_NS + int(10.5 * S))
    assert "not your code" in finding.details
    assert "drained" in finding.advice


@pytest.mark.parametrize("number", [*XIDS, 999])
def test_only_xids_of_hardware_and_driver_are_not_the_code(number: int, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.fault(10.5, "xid", number)
    (finding,) = find(job.open_recording())
    said = " ".join((finding.headline, finding.details, finding.advice))
    is_theirs = describe_xid(number).origin in (Origin.HARDWARE, Origin.DRIVER)
    assert ("not your code" in said) is is_theirs
    assert (finding.severity.value == "error") is is_theirs
    assert f"Xid {number}" in finding.headline
    assert len(finding.headline) <= 80


def test_an_operational_event_names_its_rank_and_step_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.report(10.5, 40)
    (finding,) = find(job.open_recording(), 10.6)
    assert finding.headline == "GPU 1 of rank 1 reported a memory integrity error, fatal"
    assert (finding.ranks, finding.step, finding.severity.value) == ((1,), 10, "error")
    assert "GPU-RAS 0x0017" in finding.details
    assert "another node" in finding.advice
    assert "not your code" in finding.details


@pytest.mark.parametrize("category", [*range(12), 999])
@pytest.mark.parametrize("severity", [30, 35, 40, 60])
def test_other_categories_blame_nobody(category: int, severity: int, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.report(19.6, severity, category=category)
    job.write_event(job.node, 20, events.RankGone, rank=1, pid=101)
    job.write_event(job.node, 21, events.JobEnded, exit_code=1)
    found = find(job.open_recording(), names=(*NAMES, "dead_rank"))
    assert [finding.name for finding in found].count("gpu_event") == 1
    assert ("not your code" in f"{found}") is (category == 2)
    assert all(len(finding.headline) <= 80 for finding in found)


@pytest.mark.parametrize("facts", [{"severity": 20}, {"severity": 10}, {"severity": 0}, {"severity": None}])
def test_an_operational_event_that_is_no_error_is_only_recorded(facts: dict[str, Any], tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.report(10.5, **facts)
    assert find(job.open_recording()) == []


@pytest.mark.parametrize("trait", ["simulated", "previous"])
def test_tests_of_the_driver_and_old_events_are_only_recorded(trait: str, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.report(19.6, 40, trait, xid=79)
    job.report(19.7, 40, trait)
    job.write_event(job.node, 20, events.RankGone, rank=1, pid=101)
    job.write_event(job.node, 21, events.JobEnded, exit_code=1)
    (dead,) = find(job.open_recording(), names=(*NAMES, "dead_rank"))
    assert "GPU 1" not in dead.details


@pytest.mark.parametrize("order", [("xid", "report"), ("report", "xid"), ("report",)])
def test_an_operational_event_with_an_xid_is_that_xid(order: tuple[str, ...], tmp_path: Path) -> None:
    job = Job(tmp_path)
    for place, kind in enumerate(order):
        if kind == "xid":
            job.fault(10.5 + place / 1000, "xid", 79)
        else:
            job.report(10.5 + place / 1000, 40, xid=79)
    job.report(10.51, 30)
    (finding,) = find(job.open_recording())
    assert finding.headline == "GPU 1 of rank 1 reported Xid 79, fallen off the bus"


def test_the_worst_event_of_an_incident_is_reported(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.report(10.5, 30, category=3, code=1)
    job.report(10.5, 40, code=2)
    job.report(10.5, 30, category=1, code=3)
    job.report(12, 30, category=1, code=3, group=8)
    found = find(job.open_recording())
    assert [finding.headline.partition("reported ")[2] for finding in found] == [
        "a memory integrity error, fatal",
        "a timeout, recoverable",
    ]


def test_a_rank_that_dies_after_an_operational_event(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.report(19.6, 40)
    job.write_event(job.node, 20, events.RankGone, rank=1, pid=101)
    job.write_event(job.node, 21, events.JobEnded, exit_code=1)
    found = {finding.name: finding for finding in find(job.open_recording(), names=(*NAMES, "dead_rank"))}
    assert found["gpu_event"].headline == "GPU 1 reported a memory integrity error, fatal, 400 ms before rank 1 ended"
    said = "GPU 1 of rank 1 reported a memory integrity error (fatal, GPU-RAS 0x0017) 400 ms before: it is not your code."
    assert said in found["dead_rank"].details
    causes = {one.finding.name: one.cause.name for one in link_findings(list(found.values())) if one.cause is not None}
    assert causes == {"dead_rank": "gpu_event"}


def test_the_lane_names_operational_events(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.report(10.5, 40, xid=79)
    job.report(10.6, 20)
    job.report(10.7, 40, "simulated")
    job.fault(10.8, "xid", 31)
    assert [name_fault(fault) for fault in job.open_recording().events_of(events.GpuFault)] == [
        "Xid 79: fatal GPU-RAS 0x0017 on GPU 1",
        "corrected GPU-RAS 0x0017 on GPU 1",
        "fatal GPU-RAS 0x0017, simulated on GPU 1",
        "Xid 31 on GPU 1",
    ]


def test_the_table_blames_the_code_where_nvidia_does() -> None:
    assert {number for number, xid in XIDS.items() if xid.origin is Origin.CODE} == set(OF_THE_CODE)
    assert XIDS[45].origin is Origin.CLEANUP
    assert all(XIDS[number].origin is Origin.HARDWARE for number in (48, 63, 64, 74, 79, 94, 95))
    assert all(
        len(f"GPU 10 reported Xid {one.number}, {one.name}, 59.9 s before rank 127 ended") <= 80 for one in XIDS.values()
    )


def test_the_document_has_the_table(checkout_root: Path) -> None:
    """``python -c 'from zerotop.analysis.hardware.gpu_faults import name_fault
    from zerotop.analysis.hardware.xids import *; print(format_table())'`` prints it."""
    assert format_table() in (checkout_root / "docs" / "hardware.md").read_text()


def test_a_rank_that_dies_after_a_fault_of_its_gpu(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.fault(19.6, "xid", 79)
    job.write_event(job.node, 20, events.RankGone, rank=1, pid=101)
    job.write_event(job.node, 21, events.JobEnded, exit_code=1)
    recording = job.open_recording()
    found = {finding.name: finding for finding in find(recording, names=(*NAMES, "dead_rank"))}
    assert found["gpu_xid"].headline == "GPU 1 reported Xid 79, fallen off the bus, 400 ms before rank 1 ended"
    assert found["gpu_xid"].step == 19
    dead = found["dead_rank"]
    assert "GPU 1 of rank 1 reported Xid 79 (fallen off the bus) 400 ms before: it is not your code." in dead.details
    assert dead.fix == "nvidia-smi -q -i 1"
    causes = {one.finding.name: one.cause.name for one in link_findings(list(found.values())) if one.cause is not None}
    assert causes == {"dead_rank": "gpu_xid"}


def test_a_fault_of_the_code_keeps_the_advice_on_the_code(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.fault(19.6, "xid", 31)
    job.write_event(job.node, 20, events.RankGone, rank=1, pid=101)
    job.write_event(job.node, 21, events.JobEnded, exit_code=1)
    (dead,) = find(job.open_recording(), names=("gpu_xid", "dead_rank"))
    assert dead.name == "dead_rank"
    assert "reported Xid 31" in dead.details
    assert "its cause is mostly the job's own code" in dead.details
    assert "not your code" not in f"{dead.details}{dead.advice}"
    assert "nvidia-smi" not in dead.fix


def test_another_ranks_gpu_may_take_a_rank_down(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.fault(19, "xid", 79, gpu=0)
    job.write_event(job.node, 20, events.RankGone, rank=1, pid=101)
    job.write_event(job.node, 21, events.JobEnded, exit_code=1)
    (dead,) = find(job.open_recording(), names=("dead_rank",))
    assert "GPU 0 of rank 0 reported Xid 79" in dead.details


def test_a_hang_after_a_fault(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.fault(19.95, "xid", 74)
    job.write_records(tables.HOSTS, job.node, [(100 * S, *[0] * (len(tables.HOSTS.fields) - 1))])
    (hung,) = find(job.open_recording(), names=("hung_ranks",))
    assert "reported Xid 74 (NVLink error)" in hung.details
    assert hung.fix == "nvidia-smi -q -i 1"


def test_a_normal_end_after_a_fault_is_none_of_its_doing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.fault(19.6, "xid", 63)
    for rank in (0, 1):
        job.write_event(make_identity(rank), 20, events.Goodbye)
    job.write_event(job.node, 21, events.JobEnded, exit_code=0)
    (finding,) = find(job.open_recording())
    assert finding.headline == "GPU 1 of rank 1 reported Xid 63, memory will be replaced"


def test_the_drivers_cleanup_is_no_news(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.fault(10, "xid", 31)
    job.fault(10, "xid", 43)
    job.fault(10.1, "xid", 45)
    job.write_event(job.node, 15, events.StopSent, signal="SIGTERM")
    job.fault(15.1, "xid", 45, gpu=0)
    job.fault(15.2, "xid", 31)
    assert [finding.evidence["xid"] for finding in find(job.open_recording())] == [31]


def test_a_gpu_that_no_rank_uses_is_none_of_ours(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for kind in ("xid", "lost", "ecc_uncorrected", "pcie_width"):
        job.fault(10, kind, 79, gpu=5, before=100)
    job.write_event(job.node, 12, events.GpuSilent, gpu=5, seconds=3.0, back=False)
    assert find(job.open_recording()) == []


def test_without_a_known_gpu_no_rank_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path, listed=False)
    job.fault(10, "xid", 79)
    (finding,) = find(job.open_recording())
    assert (finding.ranks, finding.headline) == ((), "GPU 1 reported Xid 79, fallen off the bus")


@pytest.mark.parametrize("number", OF_THE_CODE)
def test_another_process_before_the_job_uses_the_gpu_is_none_of_ours(number: int, tmp_path: Path) -> None:
    job = Job(tmp_path, begin=5)
    job.fault(4, "xid", number)
    assert find(job.open_recording()) == []


def test_a_lost_gpu_is_reported_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.fault(10, "lost", gpu=0)
    job.fault(12, "xid", 79)
    job.fault(12.5, "lost")
    assert [(finding.name, finding.ranks) for finding in find(job.open_recording())] == [
        ("gpu_lost", (0,)),
        ("gpu_xid", (1,)),
    ]


def test_a_bad_state_from_the_begin_is_reported_with_the_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, begin=5)
    job.fault(0, "pcie_width", 4, before=16)
    (finding,) = find(job.open_recording())
    assert (finding.ranks, finding.known_ns) == ((1,), BEGIN_NS + int(5.9 * S))
    assert finding.headline == "GPU 1 of rank 1 has 4 of 16 PCIe lanes"
    assert "25 % of the bandwidth" in finding.details


def test_the_worst_of_what_is_read_at_once_is_reported(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for kind, value in (("ecc_corrected", 9), ("rows_pending", 1), ("ecc_uncorrected", 2)):
        job.fault(10, kind, value, before=0, rise=value, seconds=1.0)
    (finding,) = find(job.open_recording())
    assert finding.headline == "GPU 1 of rank 1 could not correct 2 memory errors"


def test_a_counter_is_reported_again_when_it_has_doubled(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for second, value in ((10, 4), (11, 7), (12, 9), (13, 10)):
        job.fault(second, "ecc_corrected", value, before=0, rise=1, seconds=1.0)
    recording = job.open_recording()
    assert [find(recording, second + 0.5)[0].evidence["count"] for second in (10, 11, 12, 13)] == [4, 4, 9, 9]
    assert find(recording)[0].severity.value == "info"


@pytest.mark.parametrize(
    ("kind", "rise", "is_told"), [("pcie_replays", 8, False), ("pcie_replays", 60, True), ("nvlink_crc", 90, False)]
)
def test_counters_that_rise_now_and_then_are_no_finding(kind: str, rise: int, is_told: bool, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.fault(10, kind, rise, before=0, rise=rise, seconds=10.0)
    assert bool(find(job.open_recording())) is is_told


def test_nvml_that_does_not_answer(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write_event(job.node, 10, events.GpuSilent, gpu=1, seconds=3.0, back=False)
    job.write_event(job.node, 12, events.GpuSilent, gpu=None, seconds=5.5, back=False)
    job.write_event(job.node, 15, events.GpuSilent, gpu=1, seconds=8.0, back=True)
    recording = job.open_recording()
    (silent,), (back,) = find(recording, 13), find(recording)
    assert silent.headline == "NVML does not answer about GPU 1 of rank 1"
    assert back.headline == "NVML did not answer about GPU 1 of rank 1 for 8.00 s"
    assert silent.event == back.event


def test_hidden_xids_are_a_notice(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for gpu in (0, 1):
        hidden = {"xid": "Not Supported", "ecc_corrected": "Not Supported"}
        job.write_event(job.node, 1, events.GpuFaultsHidden, gpu=gpu, hidden=hidden)
    notices = RecordingSource(job.open_recording()).view_at(None).job.notices
    assert "Xids of GPU 0, 1 are not visible here (Not Supported): see the kernel's log, dmesg." in notices


@pytest.mark.parametrize("facts", [{"kind": "new"}, {"kind": "xid"}, {"kind": "pcie_width", "value": 0, "before": 0}, {}])
def test_odd_events_do_no_harm(facts: dict[str, Any], tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write_event(job.node, 10, events.GpuFault, **facts)
    job.write_event(job.node, 10, events.GpuSilent)
    job.write_event(job.node, 20, events.RankGone, rank=1, pid=101)
    find(job.open_recording())


def test_the_post_mortem_names_the_fault_first() -> None:
    """The failure under the header, with the same time as the finding about the rank that died."""
    broken, wrong = (find_known_failure(open_recording(name).at()) for name in ("hardware-bus", "hardware-address"))
    assert broken is not None
    assert broken.why.startswith("GPU 1 of rank 1 reported Xid 79 (fallen off the bus) 415 ms before: it is not your code.")
    assert "drained" in broken.advice
    assert wrong is not None
    assert "its cause is mostly the job's own code" in wrong.why
    assert wrong.advice == "Its output has the traceback."
