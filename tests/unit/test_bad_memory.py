"""GPUs and jobs that are not as one would have them: divided by MIG, hidden, renumbered, shared, with another allocator."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from memory_recording import (
    GIB,
    PARTS,
    UUID,
    PlantedRecording,
    gib_to_bytes,
    make_gpu_process_sample,
    make_gpu_sample,
    make_reading,
    make_record,
    record_two_steps,
)
from small_recording import BEGIN_NS, S, make_identity, make_span, second_to_unix_ns
from zerotop.analysis.failures.oom_log_parser import parse_output
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.memory.expected.zero_model import parse_setups, sum_expected
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.views.memory_view import read_memory_view
from zerotop.recording.moments.devices import Devices
from zerotop.recording.reader import Recording
from zerotop_probe.inside.device.allocator import AllocatorSampler, extract_counters, find_backend
from zerotop_probe.inside.device.cuda_events import DeviceClock
from zerotop_probe.inside.device.gpu import RankDevice
from zerotop_probe.inside.device.microscope import StepMicroscope
from zerotop_probe.inside.device.tensor_inventory import PARAMETERS, Inventory
from zerotop_probe.inside.guard import CostMeter, now
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.outside.sampling import gpu_sampler, nvml
from zerotop_probe.recording import clock, events, tables
from zerotop_probe.recording.events import Engine, Hello, Node
from zerotop_probe.recording.rings.ring_files import DiskFiles
from zerotop_probe.recording.tables import BOUNDARY, PHASE_CODE
from zerotop_probe.recording.writer import Identity

MIG = "MIG-0a1b2c3d-0000-0000-0000-00000000000"


def read_checked_ledgers(recording: Recording, second: float) -> dict[int, GpuLedger]:
    """By number; the rows of each add up."""
    found = {one.index: one for one in read_ledgers(recording.at(second_to_unix_ns(second)))}
    assert all(sum(row.bytes for row in one.rows) == one.total_bytes for one in found.values())
    return found


def list_row_sizes(one: GpuLedger) -> dict[str, float]:
    return {row.key: row.bytes / GIB for row in one.rows if row.bytes}


# --- MIG -----------------------------------------------------------------------------------------------------------------


class Driver:
    """NVML of a node with two GPUs, the second divided into two instances, the place between them empty."""

    def __init__(self, instances: tuple[int, ...] = (0, 2)) -> None:
        self.instances = instances

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"gpu{index}"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [int(handle == "gpu1")] * 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, place: int) -> str:
        if place not in self.instances:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"instance{place}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"{UUID}{handle[-1]}" if handle.startswith("gpu") else f"{MIG}{handle[-1]}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        total, used = (80, 20) if handle.startswith("gpu") else (10, 3 + int(handle[-1]))
        return SimpleNamespace(total=gib_to_bytes(total), used=gib_to_bytes(used))

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        if not handle.startswith("gpu"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 60

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=100, usedGpuMemory=gib_to_bytes(2))] if handle == "instance2" else []

    def answer_call(self, name: str, *arguments: Any) -> Any:
        fixed = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 2,
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlDeviceGetName": "H200",
            "nvmlDeviceGetMaxMigDeviceCount": 7,
        }
        if name in fixed:
            return fixed[name]
        own = getattr(self, name, None)
        if own is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return own(*arguments)

    def replace_nvml(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the place of all of NVML."""
        for name in [name for name in dir(pynvml) if name.startswith("nvml") and callable(getattr(pynvml, name))]:
            monkeypatch.setattr(pynvml, name, lambda *arguments, name=name: self.answer_call(name, *arguments))


def test_instances_stand_in_the_place_of_a_divided_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver().replace_nvml(monkeypatch)
    seen, devices = nvml.discover_gpus()
    assert [(one.index, one.uuid, one.mig_of) for one in seen.gpus] == [
        (0, f"{UUID}0", None),
        (2, f"{MIG}0", f"{UUID}1"),
        (3, f"{MIG}2", f"{UUID}1"),
    ]
    assert [one.total_bytes for one in seen.gpus] == [gib_to_bytes(80), gib_to_bytes(10), gib_to_bytes(10)]
    assert str(seen.notice).startswith("MIG is enabled on GPU 1: its instances are GPUs 2 to 3 here")
    row = dict(zip([field.name for field in tables.GPUS.fields], devices[2].read_row(5, 0), strict=True))
    assert (row["used_bytes"], row["total_bytes"], row["gpu"], row["temperature_c"]) == (
        gib_to_bytes(5),
        gib_to_bytes(10),
        3,
        60,
    )
    assert str(row["utilization_percent"]) == str(row["power_w"]) == "nan"
    assert [row[:4] for row in devices[2].read_process_rows(5, refresh=True)] == [(5, gib_to_bytes(2), 100, 3)]


def test_a_divided_gpu_without_instances_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(()).replace_nvml(monkeypatch)
    seen, _ = nvml.discover_gpus()
    assert [one.index for one in seen.gpus] == [0, 1]
    assert "no instance is visible" in str(seen.notice)


def sample_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PlantedRecording:
    """What the sampler writes of that node."""
    Driver().replace_nvml(monkeypatch)
    # Its times count from the boot of a machine; this one may have booted days ago.
    monkeypatch.setattr(clock, "read_clock_pair", lambda: {"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    recording = PlantedRecording(folder)
    seen: list[Any] = []
    quiet = {"on_lost": lambda text: None, "on_neighbour": lambda pid: None}
    sampler = gpu_sampler.GpuSampler(str(folder), recording.node, on_seen=seen.append, **quiet)
    sampler.prepare_sampling()
    for tick in range(0, 100, 2):
        sampler.take_sample(tick * S // 10, tick)
    sampler.close()
    told = [one.__dict__ for one in seen[0].gpus]
    recording.write_event(recording.node, 0, events.Node, host="node1", cores=8, gpus=told, gpu_notice=seen[0].notice)
    return recording


# How CUDA may call the second instance: by its own UUID, PyTorch having put NVML's prefix away; by that of the variable.
@pytest.mark.parametrize("uuid", [f"GPU-{MIG[4:]}2", f"{MIG}2", f"{MIG}2".upper()])
def test_an_instance_is_not_counted_as_the_whole_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    recording = sample_node(tmp_path, monkeypatch)
    device = {"ordinal": 0, "uuid": uuid, "name": "NVIDIA H200 MIG 1g.18gb", "total_bytes": gib_to_bytes(9.9)}
    recording.write_engine(devices=[device])
    readings = [make_reading(1 + i / 2, 1, 1.5) for i in range(12)]
    recording.write_records(tables.ALLOCATOR, make_identity(0), readings, born=0.5)
    ledgers = read_checked_ledgers(recording.open_recording(), 6)
    assert {index: one.ranks for index, one in ledgers.items()} == {0: (), 2: (), 3: (0,)}
    assert ledgers[3].total_bytes == gib_to_bytes(10)
    expected = {"free": 5, "driver": 3, "outside_pytorch": 0.5, "reserved_unallocated": 0.5, "unattributed": 1}
    assert list_row_sizes(ledgers[3]) == expected
    assert any("MIG" in note for note in ledgers[3].notes)
    assert list_row_sizes(ledgers[2]) == {"free": 7, "driver": 3}


# --- hidden and renumbered -------------------------------------------------------------------------------------------------


def make_writer(pid: int) -> Identity:
    return Identity("rank", 0, "node1", pid, 0, "")


def make_node_event(*uuids: str, **more: Any) -> Node:
    return Node({"gpus": [{"index": index, "uuid": uuid, **more} for index, uuid in enumerate(uuids)]}, 0, make_writer(-1))


def make_engine_event(pid: int, ordinal: int, uuid: str | None, **more: Any) -> Engine:
    return Engine({"devices": [{"ordinal": ordinal, "uuid": uuid, **more}]}, 0, make_writer(pid))


def test_reordered_by_cuda_visible_devices() -> None:
    made = [make_engine_event(1, 0, "GPU-cc"), make_engine_event(1, 1, "GPU-aa"), make_engine_event(2, 0, "GPU-bb")]
    devices = Devices([make_node_event("GPU-aa", "GPU-bb", "GPU-cc")], made)
    assert [devices.find_gpu("node1", *which)[1] for which in ((1, 0), (1, 1), (2, 0))] == [2, 0, 1]


def test_two_gpus_that_nvml_does_not_show_are_two() -> None:
    """Each process calls its own GPU 0, and so does NVML that of somebody else."""
    made = [make_engine_event(1, 0, "GPU-xx"), make_engine_event(2, 0, "GPU-yy"), make_engine_event(3, 0, "GPU-xx")]
    devices = Devices([make_node_event("GPU-aa", "GPU-bb")], made)
    assert [devices.find_gpu("node1", pid, 0)[1] for pid in (1, 2, 3)] == [2, 3, 2]
    devices = Devices([make_node_event()], made)
    assert [devices.find_gpu("node1", pid, 0)[1] for pid in (1, 2, 3)] == [0, 1, 0]


def test_a_torch_without_uuids() -> None:
    made = [make_engine_event(1, 0, None, visible="3"), make_engine_event(2, 1, None), make_engine_event(3, 0, "GPU-bb1")]
    devices = Devices([make_node_event("GPU-aa11", "GPU-bb11", "GPU-cc11", "GPU-dd11")], made)
    assert [devices.find_gpu("node1", *which)[1] for which in ((1, 0), (2, 1), (3, 0))] == [3, 1, 1]


def test_an_engine_without_a_device() -> None:
    hello = Hello({"environment": {"CUDA_VISIBLE_DEVICES": "1, 3"}}, 0, make_writer(1))
    devices = Devices([make_node_event("GPU-aa", "GPU-bb")], [], [hello])
    assert [devices.find_gpu("node1", *which)[1] for which in ((1, 0), (1, 1), (1, 2), (2, 0))] == [1, 3, 2, 0]


def test_an_instance_for_which_cuda_gives_the_whole_gpus_uuid() -> None:
    small, large = ({"uuid": f"MIG-{size}", "mig_of": "GPU-aa", "total_bytes": gib_to_bytes(size)} for size in (10, 40))
    parts = Node({"gpus": [{"index": 1, **small}, {"index": 2, **large}]}, 0, make_writer(-1))
    devices = Devices(
        [parts],
        [
            make_engine_event(1, 0, "GPU-aa", total_bytes=gib_to_bytes(39.5)),
            make_engine_event(2, 0, "GPU-aa", total_bytes=gib_to_bytes(20)),
        ],
    )
    assert [devices.find_gpu("node1", pid, 0)[1] for pid in (1, 2)] == [2, 0]


# --- a container ---------------------------------------------------------------------------------------------------------


def test_in_a_container_the_jobs_own_processes_are_not_those_of_others(tmp_path: Path) -> None:
    """NVML calls the rank 99999: neither the ledger nor a finding may call that another process."""
    planted, who = PlantedRecording(tmp_path), make_identity(0)
    planted.node_event()
    planted.write_engine()
    planted.write_event(planted.node, 0.4, events.RankFound, rank=0, local_rank=0, pid=who.pid, start=1)
    planted.write_records(tables.ALLOCATOR, who, [make_reading(2 + i / 4, 20, 30) for i in range(100)], born=1)
    spans = [make_span(3 + i, 3.9 + i, "step", i, BOUNDARY) for i in range(24)]
    planted.write_records(tables.SPANS, who, spans, born=1)
    begins = [make_record(tables.BEGINS, 3 + i, step=i, phase=PHASE_CODE["step"]) for i in range(24)]
    planted.write_records(tables.BEGINS, who, begins, born=1)
    looks = [i / 10 for i in range(280)]
    planted.write_records(
        tables.GPUS, planted.node, [make_gpu_sample(second, 0.5 if second < 2 else 32) for second in looks]
    )
    planted.write_records(
        tables.GPU_PROCESSES,
        planted.node,
        [make_gpu_process_sample(second, 99999, 31.5) for second in looks if second >= 2],
    )
    recording = planted.open_recording()
    (ledger,) = read_checked_ledgers(recording, 20).values()
    assert list_row_sizes(ledger)["before_the_job"] == 0.5
    assert (ledger.sum_bytes("outside_pytorch"), ledger.sum_bytes("other_processes")) == (gib_to_bytes(1.5), 0)
    assert "the device's use, less its use" in ledger.notes[0]
    assert not [one.name for one in detect_findings(recording, second_to_unix_ns(28)) if one.name.startswith("others")]


# --- other allocators ----------------------------------------------------------------------------------------------------

STATS = {
    "allocated_bytes": {"all": {"current": 5, "peak": 9}},
    "reserved_bytes": {"all": {"current": 8, "peak": 12}},
    "requested_bytes": {"all": {"current": 0, "peak": 0}},
    "inactive_split_bytes": {"all": {"current": 0, "peak": 0}},
    "segment": {"all": {"current": 0, "peak": 0}},
    "num_alloc_retries": 0,
    "num_ooms": 0,
}
ME = Identity.for_this_process("rank", 0)


def test_which_allocator_there_is() -> None:
    assert find_backend(SimpleNamespace(cuda=SimpleNamespace())) == "native"
    assert find_backend(SimpleNamespace(cuda=SimpleNamespace(get_allocator_backend=lambda: "cudaMallocAsync"))) != "native"


def test_counters_that_cuda_malloc_async_lacks_are_unknown(tmp_path: Path) -> None:
    allocator = AllocatorSampler(
        DiskFiles(str(tmp_path), ME), 0, (lambda: STATS, lambda: STATS), CostMeter(), windows=True, has_blocks=False
    )
    allocator.sample_between(0, 0, PHASE_CODE["other"])
    recording = Recording(tmp_path, {"boot": "boot", "clock": {"unix_ns": 0, "monotonic_ns": 0}})
    recording.refresh()
    (row,) = recording.sources["allocator"][0].array
    assert (row["allocated_bytes"], row["reserved_peak_bytes"], row["retries"]) == (5, 12, 0)
    assert row["requested_peak_bytes"] == row["segments"] == -1
    assert extract_counters(STATS)[4] == 0


class Cuda:
    """As much of torch.cuda as the clock asks; no event is ever over."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return False

    def current_device(self) -> int:
        return 0

    def is_current_stream_capturing(self) -> bool:
        return False


def test_an_allocator_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    """Phases are recorded all the same, and who asks for the microscope is told why not."""
    meter = CostMeter()
    said: list[BaseException] = []
    meter.report_error = lambda where, error: said.append(error)
    recorder = Recorder(str(tmp_path), ME, meter)
    clock = DeviceClock(recorder.files, 0, Cuda(), meter)
    refusal = "PyTorch keeps no history of this job's allocator (pluggable)."
    microscope = StepMicroscope(str(tmp_path), ME, 0, None, recorder.write_event, meter, refusal)
    recorder.device = RankDevice(None, clock, microscope)
    (tmp_path / "microscope.json").write_text('{"request": 1, "steps": 1}')
    microscope.poll(0, 0, 0)
    for step in range(2):
        for phase in ("forward", "backward", "step"):
            recorder.end_span(recorder.begin_span(now(), phase, (0, step, 0)), now())
        recorder.end_step(recorder.begin_span(now(), "other", (0, step, 0)), now())
    recorder.close()
    assert (said, meter.errors, recorder.lost_records) == ([], 0, 0)
    text = next(tmp_path.glob("events-*.jsonl")).read_text()
    assert '"refused"' in text
    assert refusal in text
    assert not list(tmp_path.glob("allocator-*"))


def make_tensor(address: int, size: int) -> Any:
    storage = SimpleNamespace(nbytes=lambda: size, data_ptr=lambda: address)
    return SimpleNamespace(device=SimpleNamespace(type="cuda"), untyped_storage=lambda: storage)


def test_tensors_are_counted_by_their_size_where_there_are_no_blocks() -> None:
    held = Inventory()
    for address, size in ((1, 100), (1, 100), (2, 30)):
        held.add(make_tensor(address, size), PARAMETERS)
    assert held.sum_device_bytes() == {PARAMETERS: 130}


def test_the_ledger_of_cuda_malloc_async(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_inventory(19, "after_update", PARTS, allocated_bytes=None)
    (ledger,) = read_checked_ledgers(recording.open_recording(), 19.5).values()
    assert ledger.sum_bytes("optimizer_state", "master_weights") == gib_to_bytes(12)
    assert ledger.sum_bytes("activations") == gib_to_bytes(14.75 - sum(PARTS.values()))
    assert not ledger.sum_bytes("unattributed", "unexplained")
    assert "counted by their own size" in ledger.notes[0]


def test_a_job_with_an_allocator_of_its_own(tmp_path: Path) -> None:
    planted, who = PlantedRecording(tmp_path), make_identity(0)
    planted.node_event(gpus=2)
    planted.write_engine(allocator="pluggable", on=1)
    planted.write_records(tables.BEGINS, who, [make_record(tables.BEGINS, 2, phase=PHASE_CODE["forward"])], born=1)
    looks = [make_gpu_sample(second, (1, 24)[index], index=index) for second in range(1, 6) for index in (0, 1)]
    planted.write_records(tables.GPUS, planted.node, looks)
    planted.write_records(
        tables.GPU_PROCESSES, planted.node, [make_gpu_process_sample(second, who.pid, 23, 1) for second in range(1, 6)]
    )
    recording = planted.open_recording()
    ledgers = read_checked_ledgers(recording, 5.5)
    assert list_row_sizes(ledgers[1]) == {"free": 56, "driver": 1, "this_job": 23}
    assert "an allocator of device memory of its own" in ledgers[1].notes[0]
    assert ledgers[0].notes == ()
    assert read_memory_view(recording.at(second_to_unix_ns(5.5))).gpu == ledgers[1]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (  # github.com/comfyanonymous/ComfyUI/issues/1285
            "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
            "Currently allocated     : 6.66 GiB\nRequested               : 72.00 MiB\nDevice limit            : 8.00 GiB\n"
            "Free (according to CUDA): 0 bytes\nPyTorch limit (set by user-supplied memory fraction)\n"
            "                        : 17179869184.00 GiB\nelse",
            (72 << 20, gib_to_bytes(8), 0, gib_to_bytes(6.66)),
        ),
        ("torch.OutOfMemoryError: Allocation on device \nThis error means", (None, None, None, None)),
    ],
)
def test_how_cuda_malloc_async_says_that_there_is_no_more(text: str, sizes: tuple[int | None, ...]) -> None:
    output = parse_output("step 3\n" + text)
    assert output is not None
    assert output.kind == "cuda"
    assert (output.requested_bytes, output.total_bytes, output.free_bytes, output.allocated_bytes) == sizes
    assert "else" not in output.text


# --- engines and ranks ---------------------------------------------------------------------------------------------------


def test_a_job_that_never_touches_cuda_on_a_machine_with_gpus(tmp_path: Path) -> None:
    planted, who = PlantedRecording(tmp_path), make_identity(0)
    planted.node_event(gpus=2)
    planted.write_engine(devices=[], device="cpu", allocator=None)
    spans = [make_span(3 + i, 3.9 + i, "step", i, BOUNDARY) for i in range(12)]
    planted.write_records(tables.SPANS, who, spans, born=1)
    planted.write_records(
        tables.GPUS, planted.node, [make_gpu_sample(second, 0.5, index=index) for second in range(16) for index in (0, 1)]
    )
    recording = planted.open_recording()
    ledgers = read_checked_ledgers(recording, 15)
    assert [list_row_sizes(one) for one in ledgers.values()] == [{"free": 79.5, "driver": 0.5}] * 2
    assert not any(one.ranks or one.notes for one in ledgers.values())
    assert detect_findings(recording, second_to_unix_ns(16)) == ()
    view = read_memory_view(recording.at(second_to_unix_ns(15)))
    assert (view.rank, len(view.gpus), view.peak, view.health) == (0, 2, None, None)


def test_the_expected_memory_of_several_engines_adds_up(tmp_path: Path) -> None:
    planted = record_two_steps(tmp_path)
    planted.write_engine(at=18.8, engine=1, optimizer="", parameters=2 * GIB, trainable_parameters=0)
    planted.write_inventory(18.9, "init", {"parameters": 4}, engine=1, unclaimed=14.5)
    recording = planted.open_recording()
    view = read_memory_view(recording.at(second_to_unix_ns(19.5)))
    (line,) = [line for line in view.lines if line.key == "parameters"]
    assert (line.now_bytes, line.expected_bytes) == (gib_to_bytes(6), gib_to_bytes(6))
    assert view.setup is not None
    assert (view.setup.parameters, view.setup.trains) == (GIB, True)
    both = sum_expected(parse_setups([one for one in recording.events if isinstance(one, Engine)]))
    assert both is not None
    assert both.gpu["master_weights"] == gib_to_bytes(4)
    assert sum_expected([]) is None
