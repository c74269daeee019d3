"""NVML's answers about hardware faults, played back through the library that the sampler loads."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from agents import read_node_events, wait_for
from played_nvml import PlayedNvml, build_library
from zerotop_probe.outside.attaching.gpus import read_process_gpus
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling.faults import call_guard, fault_watch, nvml_faults
from zerotop_probe.outside.sampling.faults.call_guard import GuardedThread
from zerotop_probe.outside.sampling.faults.fault_watch import FaultWatch
from zerotop_probe.outside.sampling.faults.operational_events import OperationalEvents
from zerotop_probe.outside.sampling.gpu_sampler import GpuSampler
from zerotop_probe.outside.sampling.host_sampler import read_meminfo
from zerotop_probe.outside.sampling.node_sampler import NodeSampler
from zerotop_probe.outside.sampling.nvml import GpuDevice, discover_gpus
from zerotop_probe.recording.events import GpuFault, GpuFaultsHidden, GpuSilent
from zerotop_probe.recording.tables import GPUS, UNKNOWN
from zerotop_probe.recording.writer import EventWriter, Identity

# Each function that the watch for faults calls, and what cannot be seen without it: nothing that is worth a word for some.
FUNCTIONS = {
    "nvmlEventSetCreate": "xid",
    "nvmlDeviceRegisterEvents": "xid",
    "nvmlDeviceGetSupportedEventTypes": "xid",
    "nvmlEventSetWait_v2": "xid",
    "nvmlDeviceGetFieldValues": "ecc_corrected",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie_width",
    "nvmlDeviceGetMaxPcieLinkWidth": None,
    "nvmlDeviceGetCurrPcieLinkGeneration": None,
    "nvmlDeviceGetMaxPcieLinkGeneration": None,
    "nvmlDeviceGetNvLinkState": None,
    "nvmlDeviceGetUtilizationRates": None,
    # Drivers before R615 have none of these: nothing is hidden there.
    "nvmlEventSetWait_v3": None,
    "nvmlEventSetRegisterGpuOperationalEvents_v1": None,
    "nvmlEventSetGetContextCount_v1": None,
    "nvmlEventSetGetContextInfo_v1": None,
    "nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1": None,
}
# Module, code, category, severity, attributes and group; its Xid follows.
OPERATIONAL = "operational 0 GPU-BUS 3 3 40 33 7"
BAD = ("0.field.4 3", "0.pcie_width 8", "0.link.2 0", "0.pcie_generation 1", "event 0 8 79", f"{OPERATIONAL} 79")
SEEN = {
    "ecc_uncorrected": ("nvmlDeviceGetFieldValues",),
    "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkWidth"),
    "nvlinks": ("nvmlDeviceGetNvLinkState",),
    "pcie_generation": (
        "nvmlDeviceGetCurrPcieLinkGeneration",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetUtilizationRates",
    ),
    "xid": (
        "nvmlEventSetCreate",
        "nvmlDeviceRegisterEvents",
        "nvmlDeviceGetSupportedEventTypes",
        "nvmlEventSetWait_v2",
    ),
    "operational": (
        "nvmlEventSetCreate",
        "nvmlEventSetWait_v3",
        "nvmlEventSetRegisterGpuOperationalEvents_v1",
    ),
}
REPORT = {"module": "GPU-BUS", "code": 3, "category": 3, "severity": 40, "group": 7, "traits": ["uncontained", "primary"]}


class WithoutFunction:
    """The library of a driver that lacks a function."""

    def __init__(self, library: ctypes.CDLL, missing: str) -> None:
        self._library, self._missing = library, missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)
        return getattr(self._library, name)


@pytest.fixture
def load_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlayedNvml]:
    """Let pynvml use the library in this process, without some function. Its script has to be written for this process."""

    def load(gpus: int = 1, missing: str = "") -> PlayedNvml:
        played = PlayedNvml(tmp_path, gpus)
        monkeypatch.setenv("PLAYED_NVML", str(played.path))
        ctypes.CDLL(None).setenv(b"PLAYED_NVML", os.fsencode(played.path), 1)
        # Copied, so that each test has a library of its own, which has delivered no event yet.
        own = tmp_path / "libnvidia-ml.so.1"
        own.write_bytes((build_library() / own.name).read_bytes())
        monkeypatch.setattr(pynvml, "nvmlLib", WithoutFunction(ctypes.CDLL(str(own)), missing))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return played

    return load


class Watched:
    """A watch for faults, and the events that it wrote."""

    def __init__(self) -> None:
        self.written: list[tuple[type, dict[str, Any]]] = []
        self.errors: list[tuple[str, BaseException]] = []
        self.watch = FaultWatch(self._write, lambda name, error: self.errors.append((name, error)))
        self.watch.open(discover_gpus()[1])
        self._half_tick = 0

    def _write(self, time_ns: int, event: type, **facts: Any) -> None:
        self.written.append((event, facts))

    def read(self, times: int = 1) -> None:
        """Let time pass: readings are requested, and made."""
        for _ in range(times):
            self._half_tick += 20
            self.watch.request_sample(time.monotonic_ns(), self._half_tick)
            time.sleep(0.15)

    def faults(self) -> dict[str, dict[str, Any]]:
        return {facts["kind"]: facts for event, facts in self.written if event is GpuFault}

    def hidden(self) -> dict[str, str]:
        return {
            kind: why for event, facts in self.written if event is GpuFaultsHidden for kind, why in facts["hidden"].items()
        }

    def silences(self) -> list[tuple[int | None, bool]]:
        return [(facts["gpu"], facts["back"]) for event, facts in self.written if event is GpuSilent]


@pytest.fixture
def watch_gpus() -> Iterator[Callable[[], Watched]]:
    started: list[Watched] = []

    def start() -> Watched:
        started.append(Watched())
        time.sleep(0.15)
        return started[-1]

    yield start
    for one in started:
        one.watch.finish_sampling(2)


def test_each_fault_is_recorded_once(load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched]) -> None:
    played = load_nvml(2)
    watched = watch_gpus()
    watched.read(3)
    assert (watched.faults(), watched.hidden()) == ({}, {})
    played.add(*BAD)
    watched.read(4)
    faults = watched.faults()
    assert set(faults) == set(SEEN)
    assert len(watched.written) == len(SEEN)
    assert {facts["gpu"] for facts in faults.values()} == {0}
    assert (faults["xid"]["value"], faults["nvlinks"]["value"], faults["nvlinks"]["before"]) == (79, 17, 18)
    assert (faults["ecc_uncorrected"]["before"], faults["ecc_uncorrected"]["rise"]) == (0, 3)
    assert (faults["operational"]["value"], faults["operational"]["report"]) == (79, REPORT)
    assert watched.errors == []


def test_an_operational_event_may_have_no_xid(
    load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched]
) -> None:
    load_nvml(2, "nvmlEventSetGetContextInfo_v1").add(f"{OPERATIONAL} 79", "operational 1 GPU-RAS 23 2 40 0 0 0")
    watched = watch_gpus()
    watched.read(2)
    written = [facts for event, facts in watched.written if event is GpuFault]
    assert [(facts["gpu"], facts["value"], facts["report"]["group"]) for facts in written] == [(0, None, 7), (1, None, None)]


def test_the_previews_form_of_the_wait_is_called_safely_and_given_up(
    load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched]
) -> None:
    played = load_nvml()
    played.add("form preview")
    watched = watch_gpus()
    watched.read(2)
    assert watched.written == []
    played.add(f"{OPERATIONAL} 79", "event 0 8 79")
    watched.read(3)
    assert watched.faults().keys() == {"xid"}
    assert watched.hidden() == {"operational": "another form of nvmlEventSetWait_v3"}
    assert watched.errors == []


def test_a_storm_of_events_is_recorded_some_times(
    load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched]
) -> None:
    storm = [f"operational 0 GPU-NVLINK 5 3 30 0 {group} 0" for group in range(1, 60)]
    load_nvml().add(*storm, *["event 0 8 31"] * 60)
    watched = watch_gpus()
    watched.read(8)
    kinds = [facts["kind"] for event, facts in watched.written if event is GpuFault]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"operational": 20, "xid": 20}


@pytest.mark.parametrize("wrong", [pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_GPU_IS_LOST])
def test_a_wait_that_does_not_wait_costs_no_core(wrong: int, load_nvml: Callable[..., PlayedNvml]) -> None:
    load_nvml().add(f"fail nvmlEventSetWait_v3 - {wrong}", f"fail nvmlEventSetWait_v2 - {wrong}")
    devices = discover_gpus()[1]
    for source in (nvml_faults.EventSet(devices), OperationalEvents(devices)):
        before_s = time.monotonic()
        assert source.wait(5) is None
        assert time.monotonic() - before_s > 0.5
        assert source.is_open
        source.close()


def test_earlier_counts_are_no_fault_but_a_bad_state_is(
    load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched]
) -> None:
    load_nvml().add("0.field.3 500", "0.field.4 2", "0.field.94 9", "0.field.144 1")
    watched = watch_gpus()
    watched.read(2)
    assert set(watched.faults()) == {"rows_pending"}


def test_a_link_slows_down_at_idle(load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched]) -> None:
    load_nvml().add("0.pcie_generation 1", "0.utilization 3")
    watched = watch_gpus()
    watched.read(3)
    assert watched.faults() == {}


def test_a_link_that_is_down_from_the_begin_is_known_by_the_other_gpus(
    load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched]
) -> None:
    load_nvml(4).add("2.link.9 0")
    watched = watch_gpus()
    watched.read()
    assert (watched.faults()["nvlinks"]["gpu"], watched.faults()["nvlinks"]["value"]) == (2, 17)


@pytest.mark.parametrize("missing", FUNCTIONS)
def test_a_driver_without_a_function_shows_the_rest(
    missing: str, load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched]
) -> None:
    played = load_nvml(1, missing)
    watched = watch_gpus()
    watched.read(2)
    played.add(*BAD)
    watched.read(4)
    assert set(watched.faults()) == {kind for kind, needed in SEEN.items() if missing not in needed}
    assert FUNCTIONS[missing] in {None, *watched.hidden()}
    assert watched.errors == []


HIDING = {
    "nvmlDeviceRegisterEvents": {"xid"},
    "nvmlEventSetCreate": {"xid", "operational"},
    "nvmlEventSetRegisterGpuOperationalEvents_v1": {"operational"},
    "nvmlEventSetWait_v3": {"operational"},
}


@pytest.mark.parametrize("missing", HIDING)
@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_hidden_faults_of_a_container_or_vgpu_are_recorded_once(
    missing: str, code: int, load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched]
) -> None:
    load_nvml().add(f"fail {missing} - {code}")
    watched = watch_gpus()
    watched.read(3)
    assert [event for event, _ in watched.written] == [GpuFaultsHidden]
    assert set(watched.hidden()) == HIDING[missing]


def test_a_gpu_without_ecc_and_nvlink(load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched]) -> None:
    played = load_nvml()
    for number in (3, 4, 38, 45, 52, 59, 142, 143, 144, 145, 230):
        played.remove(f"0.field.{number} 0")
    played.add("0.links 0", "0.events 0")
    watched = watch_gpus()
    watched.read(2)
    assert watched.hidden() == dict.fromkeys(("xid", "ecc_corrected", "ecc_uncorrected"), "Not Supported")
    played.add("0.field.94 7")
    watched.read(1)
    assert watched.faults()["pcie_replays"]["rise"] == 7


def test_links_of_hopper_count_by_link(
    load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_faults, "_LINK_PERIOD", 2)
    played = load_nvml()
    for number in (38, 45, 52, 59):
        played.remove(f"0.field.{number} 0")
    played.add("0.field.161 0", "0.field.161.5 0")
    watched = watch_gpus()
    watched.read()
    played.add("0.field.161.5 40")
    watched.read(3)
    assert watched.faults()["nvlink_replays"]["rise"] == 40


def test_faults_of_a_divided_gpu_name_its_instances(
    load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = load_nvml(1)
    played.add("0.mig 1")
    watched = watch_gpus()
    played.add("event 0 8 94")
    watched.read(2)
    assert (watched.faults()["xid"]["gpu"], watched.faults()["xid"]["gpus"]) == (0, [1, 2])
    monkeypatch.setattr(call_guard, "PATIENCE_S", 0.4)
    played.add("hang nvmlDeviceGetFieldValues 0")
    watched.read(6)
    assert [(facts["gpu"], facts["gpus"]) for event, facts in watched.written if event is GpuSilent] == [(0, [1, 2])]
    played.remove("hang nvmlDeviceGetFieldValues 0")


def test_a_lost_gpu_is_recorded_once_and_the_others_are_read(
    load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched]
) -> None:
    played = load_nvml(2)
    watched = watch_gpus()
    played.add("1.lost 1")
    watched.read(3)
    played.add("0.field.4 1")
    watched.read()
    assert (watched.faults()["lost"]["gpu"], watched.faults()["ecc_uncorrected"]["gpu"]) == (1, 0)
    assert len(watched.written) == 2


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetFieldValues", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetCurrPcieLinkWidth"]
)
def test_a_call_that_hangs_costs_the_values_of_one_gpu(
    function: str, load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_guard, "PATIENCE_S", 0.4)
    played = load_nvml(2)
    watched = watch_gpus()
    watched.read()
    played.add(f"hang {function} 0")
    watched.read(5)
    assert watched.silences() == [(0, False)]
    played.add("1.field.4 1")
    watched.read(2)
    assert watched.faults()["ecc_uncorrected"]["gpu"] == 1
    played.remove(f"hang {function} 0")
    wait_for(lambda: watched.silences() == [(0, False), (0, True)], 5)
    played.add("0.field.4 2")
    watched.read(2)
    assert watched.faults()["ecc_uncorrected"]["gpu"] == 0


def test_a_wait_for_events_that_hangs_is_reported(
    load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_watch, "_WAIT_S", 0.2)
    monkeypatch.setattr(fault_watch, "_WAIT_PATIENCE_S", 0.2)
    played = load_nvml()
    played.add("hang nvmlDeviceRegisterEvents 0")
    watched = watch_gpus()
    watched.read(8)
    assert watched.silences() == [(None, False)]
    assert watched.hidden() == {"xid": "NVML does not answer"}
    played.remove("hang nvmlDeviceRegisterEvents 0")


def test_a_wait_for_operational_events_that_hangs_hides_no_xid(
    load_nvml: Callable[..., PlayedNvml], watch_gpus: Callable[[], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_watch, "_WAIT_S", 0.2)
    monkeypatch.setattr(fault_watch, "_WAIT_PATIENCE_S", 0.2)
    played = load_nvml()
    played.add("hang nvmlEventSetWait_v3 -1")
    watched = watch_gpus()
    watched.read(8)
    played.add(*BAD)
    watched.read(4)
    assert watched.silences() == [(None, False)]
    assert set(watched.faults()) == set(SEEN) - {"operational"}
    played.remove("hang nvmlEventSetWait_v3 -1")
    wait_for(lambda: "operational" in watched.faults(), 5)


def test_rows_of_other_gpus_go_on_while_a_call_hangs(
    load_nvml: Callable[..., PlayedNvml], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_guard, "PATIENCE_S", 0.3)
    played = load_nvml(2)
    silences: list[tuple[GpuDevice, float, bool]] = []
    quiet = dict.fromkeys(("on_seen", "on_lost", "on_neighbour"), lambda fact: None)
    sampler = GpuSampler(str(tmp_path), Identity.for_this_process("node"), **quiet)
    rows: list[tuple[int, int]] = []
    thread = GuardedThread("gpus", sampler, on_error=lambda *_: None, on_silent=lambda *facts: silences.append(facts))
    thread.start_sampling()
    wait_for(lambda: sampler._writers is not None)
    writer, gpu = sampler._writers[0] if sampler._writers else None, [field.name for field in GPUS.fields].index("gpu")
    monkeypatch.setattr(writer, "write", lambda *row: rows.append((row[0], row[gpu])))

    def tick(count: int) -> None:
        for number in range(count):
            thread.request_sample(time.monotonic_ns(), 2 * number)
            time.sleep(0.05)
            thread.check_calls()

    tick(5)
    assert {gpu for _, gpu in rows} == {0, 1}
    played.add("hang nvmlDeviceGetMemoryInfo 0")
    tick(12)
    rows.clear()
    tick(5)
    assert {gpu for _, gpu in rows} == {1}
    assert [(device.gpu.index, back) for device, _, back in silences] == [(0, False)]
    played.remove("hang nvmlDeviceGetMemoryInfo 0")
    wait_for(lambda: len(silences) == 2, 5)
    rows.clear()
    tick(5)
    assert {gpu for _, gpu in rows} == {0, 1}
    thread.finish_sampling(2)


def test_processes_of_the_job_on_a_gpu_are_noted_with_those_above_them(
    load_nvml: Callable[..., PlayedNvml], tmp_path: Path
) -> None:
    played, root = load_nvml(1), ProcessHandle.from_pid(os.getpid())
    assert root is not None
    identity = Identity.for_this_process("node")
    writer = EventWriter(str(tmp_path), identity)
    shell = ["/bin/sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        pid = int(job.stdout.readline())
        for held in (pid, os.getppid(), root.pid):
            played.hold(0, held, 1 << 30)
        sampler = NodeSampler(str(tmp_path), identity, root, writer)
        ticks = itertools.count()

        def read_noted() -> dict[int, Any]:
            sampler.request_samples(time.monotonic_ns(), next(ticks))
            return {event["pid"]: event["parents"] for event in read_node_events(tmp_path, "gpu_process")}

        try:
            noted = wait_for(lambda: found if len(found := read_noted()) == 3 else None)
        finally:
            sampler.finish_sampling()
            writer.close()
            subprocess.run(["kill", str(pid)], check=False)
    assert noted[pid][:2] == [job.pid, root.pid]
    assert noted[os.getppid()] is None


# Each function that a GPU's rows need, and the columns that are unknown without it.
ROW_FUNCTIONS = {
    "nvmlDeviceGetUtilizationRates": {"utilization_percent", "memory_utilization_percent"},
    "nvmlDeviceGetFieldValues": {"pcie_tx_bytes", "pcie_rx_bytes"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz"},
    "nvmlDeviceGetCurrentClocksThrottleReasons": {"throttle_reasons"},
    "nvmlDeviceGetMigMode": set(),
    "nvmlDeviceGetProcessUtilization": set(),
    "nvmlDeviceGetComputeRunningProcesses_v3": set(),  # drivers before R510 have another one
}


def read_columns(device: GpuDevice) -> dict[str, Any]:
    for tick in range(0, 60, 10):
        row = device.read_row(1, tick)
    return dict(zip([field.name for field in GPUS.fields], row, strict=True))


@pytest.mark.parametrize("missing", ROW_FUNCTIONS)
def test_a_gpu_of_a_driver_without_a_function_has_its_other_columns(
    missing: str, load_nvml: Callable[..., PlayedNvml]
) -> None:
    load_nvml(1, missing).add("0.field.186 300000", "0.field.197 5", "0.field.198 5", f"pid 0 {os.getpid()}")
    (device,) = discover_gpus()[1]
    row = read_columns(device)
    assert {name for name, value in row.items() if value == UNKNOWN or value != value} == ROW_FUNCTIONS[missing]
    assert [each[2] for each in device.read_process_rows(1, refresh=True)] == [os.getpid()]
    assert read_process_gpus() == {os.getpid(): [0]}


def test_a_gpu_without_memory_of_its_own_has_the_hosts(load_nvml: Callable[..., PlayedNvml]) -> None:
    """As GB10 answers, whose processes NVML lists with their memory."""
    load_nvml().add("fail nvmlDeviceGetMemoryInfo - 3", f"pid 0 {os.getpid()}")
    ((device,), host) = discover_gpus()[1], read_meminfo()
    assert (device.gpu.unified, device.gpu.total_bytes) == (True, host[b"MemTotal"])
    row = dict(zip([field.name for field in GPUS.fields], device.read_row(1, 0), strict=True))
    used = row["used_bytes"]
    assert isinstance(used, int)
    assert row["total_bytes"] == host[b"MemTotal"]
    assert abs(used - (host[b"MemTotal"] - host[b"MemAvailable"])) < 1 << 30
    assert [each[1:3] for each in device.read_process_rows(1, refresh=True)] == [(1 << 30, os.getpid())]


@pytest.mark.parametrize("line", ["fail nvmlDeviceGetMemoryInfo - 4", "fail nvmlDeviceGetMemoryInfo - 999", "0.mig 1"])
def test_other_refusals_are_not_unified_memory(load_nvml: Callable[..., PlayedNvml], line: str) -> None:
    load_nvml().add(line, *(["fail nvmlDeviceGetMemoryInfo - 3"] if "mig" in line else []))
    assert not any(device.gpu.unified for device in discover_gpus()[1])


def test_without_gpus_nothing_is_watched() -> None:
    written: list[Any] = []
    watch = FaultWatch(lambda *facts, **more: written.append(facts), lambda *_: None)
    watch.open([])
    watch.request_sample(0, 20)
    watch.finish_sampling(1)
    assert written == []
