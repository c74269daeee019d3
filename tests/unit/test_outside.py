"""The sampler's rules: what a rank is, when silence means something, how an end is told, where limits lie."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from agents import read_table_file, wait_for
from small_recording import S
from zerotop_probe.outside import procfs
from zerotop_probe.outside.job import job, job_control
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling import cgroup, gpu_sampler, nvml, pcie
from zerotop_probe.outside.sampling.ranks import rank_discovery, silent_ranks
from zerotop_probe.outside.sampling.ranks.rank_discovery import RankFinder
from zerotop_probe.outside.sampling.sampler_thread import SamplerThread
from zerotop_probe.recording import clock, directory, events, launchers
from zerotop_probe.recording.writer import EventWriter, Identity


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["python", "-E", "train.py"], "-E"),
        (["python3.11", "-uI", "-m", "train"], "-I"),
        (["python", "-X", "importtime", "-S", "train.py"], "-S"),
        (["python", "-Ximporttime", "-Wignore", "-BS", "train.py"], "-S"),
        (["python", "-u", "train.py", "-E"], None),
        (["python", "-m", "package", "-I"], None),
        (["python", "-c", "pass", "-S"], None),
        (["python", "-W", "-I", "train.py"], None),
        (["python", "--help-all", "-I"], None),
        (["python", "-", "-I"], None),
        (["python"], None),
    ],
)
def test_options_that_keep_the_probe_out(arguments: list[str], option: str | None) -> None:
    assert silent_ranks.find_blind_option(arguments) == option


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["/usr/bin/python3.12", "x.py"], True),
        (["pypy3"], True),
        (["bash", "python.sh"], False),
        (["numactl", "-C", "0", "python"], False),
        ([], False),
    ],
)
def test_pythons_are_recognized_by_their_arguments(arguments: list[str], answer: bool) -> None:
    assert silent_ranks.is_python(arguments) is answer


def test_silence_means_something_only_when_peers_spoke_long_ago() -> None:
    assert silent_ranks.explain_late(0, 1e6) is None
    assert silent_ranks.explain_late(3, 29.0) is None
    assert silent_ranks.explain_late(3, 31.0) == "3 other ranks created an engine, the first 31 s ago, but it has not"


def test_rank_variables_in_order_and_only_if_not_our_own() -> None:
    def read_rank(environment: dict[str, str], **ours: str) -> int | None:
        return launchers.read_number(environment, launchers.RANK, inherited=ours)

    assert read_rank({"SLURM_PROCID": "5", "RANK": "2"}) == 2
    assert read_rank({"SLURM_PROCID": "5"}) == 5
    assert read_rank({"SLURM_PROCID": "5"}, SLURM_PROCID="5") is None
    assert read_rank({"RANK": "1"}, RANK="0") == 1
    assert read_rank({"RANK": "many"}) is None
    assert read_rank({"RANK": "\N{SUPERSCRIPT TWO}"}) is None  # a digit, and no number


class _Recorder(EventWriter):
    """An event writer whose events can be looked at."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), Identity.for_this_process("node"))
        self.events: list[tuple[type[events.Event] | str, dict[str, Any]]] = []

    def write(self, time_ns: int, event: type[events.Event] | str, **facts: Any) -> None:
        self.events.append((event, facts))


def test_a_late_rank_is_named_once_and_only_if_it_was_there(tmp_path: Path) -> None:
    """Rank 1 was there when rank 0 reported; rank 2 came later, as after an elastic restart."""
    recorder = _Recorder(tmp_path)
    watcher = RankFinder(str(tmp_path), ProcessHandle(1, 1), recorder)
    watcher._reported_s[ProcessHandle(10, 1)] = 100.0
    for rank, found_s in ((0, 90.0), (1, 95.0), (2, 101.0)):
        watcher.rank_by_pid[10 + rank] = rank_discovery.SeenRank(ProcessHandle(10 + rank, 1), rank, None, found_s)
    watcher._report_late(125.0)
    assert recorder.events == []
    for now_s in (131.0, 150.0):
        watcher._report_late(now_s)
    assert [(event, facts["rank"]) for event, facts in recorder.events] == [(events.RankSilent, 1)]
    recorder.close()


@pytest.mark.parametrize(("command", "is_awaited"), [("python", False), ("bash", True)])
def test_children_of_an_ended_program_are_judged_by_its_command(tmp_path: Path, command: str, is_awaited: bool) -> None:
    """A shell's child may be the training; a Python program's daemon is a helper."""
    recording = directory.create_recording([command, "start"], path=str(tmp_path / "recording"))
    code = "import time; time.sleep(600)"
    environment = {**os.environ, directory.SESSION_VARIABLE: recording}
    recorder = _Recorder(tmp_path)
    with subprocess.Popen([sys.executable, "-S", "-c", code], env=environment) as left:
        try:
            wait_for(lambda: code in procfs.read_command_line(left.pid))
            finder = RankFinder(recording, ProcessHandle(2**22 + 1, 1), recorder)  # there is no such process any more
            finder.update_ranks()
            assert finder.has_outlived_root is is_awaited
        finally:
            left.kill()
            recorder.close()


@pytest.mark.parametrize(
    ("script", "is_rank"), [("train.py", True), ("torchrun", False), ("deepspeed/launcher/launcher_helper.py", False)]
)
def test_a_launcher_with_a_number_is_no_rank(tmp_path: Path, script: str, is_rank: bool) -> None:
    """As one task of srun or mpirun, which start it."""
    path = tmp_path / script
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("import time; time.sleep(600)")
    recording = directory.create_recording(["srun"], path=str(tmp_path / "recording"))
    recorder = _Recorder(tmp_path)
    with subprocess.Popen([sys.executable, "-S", str(path)], env={**os.environ, "SLURM_PROCID": "3"}) as task:
        try:
            wait_for(lambda: str(path) in procfs.read_command_line(task.pid))
            process = ProcessHandle(task.pid, clock.read_process_start(task.pid))
            for attached in (None, [process]):
                finder = RankFinder(recording, process, recorder, attached_ranks=attached, inherited={})
                finder.update_ranks()
                assert [(one.rank, one.process) for one in finder.rank_by_pid.values()] == [(3, process)] * is_rank
        finally:
            task.kill()
            recorder.close()


@pytest.mark.parametrize(
    ("returncode", "kills", "asked", "text"),
    [
        (0, 0, False, "The job ended with exit code 0."),
        (2, 0, False, "The job failed with exit code 2."),
        (200, 0, False, "The job failed with exit code 200."),
        (143, 0, False, "The job failed with exit code 143, as after SIGTERM."),
        (
            None,
            0,
            True,
            "The job has ended, after it had been asked to stop; "
            "its exit code is not known, as this sampler did not start it.",
        ),
        (
            -9,
            1,
            False,
            "The job was killed by signal 9 (SIGKILL); the kernel's OOM killer ended 1 process of its control group.",
        ),
        (
            1,
            2,
            True,
            "The job failed with exit code 1, after it had been asked to stop; "
            "the kernel's OOM killer ended 2 processes of its control group.",
        ),
    ],
)
def test_how_an_end_is_described(returncode: int | None, kills: int, asked: bool, text: str) -> None:
    assert job.describe_end(returncode, kills, "its control group", stop_requested=asked) == text


def test_exit_codes_are_a_shells() -> None:
    assert [job.compute_exit_code(code) for code in (0, 3, 255, -9, -11)] == [0, 3, 255, 137, 139]


def test_a_name_with_parentheses_and_spaces() -> None:
    fields = " ".join(["S", "7", "8"] + ["0"] * 8 + ["3", "4"] + ["0"] * 6 + ["99"] + ["0"] * 16 + ["5"] + ["0"] * 10)
    facts = procfs.parse_stat(f"12 (a) b (c)) {fields}\n".encode())
    assert facts is not None
    assert (facts.name, facts.parent, facts.group, facts.cpu_ticks) == (b"a) b (c)", 7, 8, 7)
    assert (facts.start, facts.processor, facts.is_dead) == (99, 5, False)
    assert procfs.parse_stat(b"12 (torn) S 1 2") is None
    assert procfs.parse_stat(b"") is None


def test_files_of_proc_that_are_longer_than_a_page() -> None:
    libraries = {line.split()[-1] for line in procfs.read_file("/proc/self/maps", 1 << 22).splitlines() if b"/" in line}
    with open("/proc/self/maps", "rb") as whole:
        assert libraries == {line.split()[-1] for line in whole if b"/" in line}
    assert len(procfs.read_file("/proc/self/maps", 5000)) == 5000


def test_searches_of_all_processes() -> None:
    attributes = dict(procfs.iter_processes("cmdline", "environ"))[os.getpid()]
    assert attributes["cmdline"] == procfs.read_command_line(os.getpid())
    assert attributes["environ"] == procfs.read_environment(os.getpid())
    assert procfs.list_ancestors(os.getpid())[:2] == [os.getpid(), os.getppid()]


def test_psutil_is_not_loaded_before_a_search() -> None:
    code = "import sys; import zerotop_probe.outside.__main__, zerotop_probe.outside.attaching.attaching as _; "
    subprocess.run([sys.executable, "-c", code + "sys.exit('psutil' in sys.modules)"], check=True)


class TestControlGroup:
    """On folders laid out like the kernel's."""

    @pytest.fixture
    def cgroup_tree(self, tmp_path: Path) -> Path:
        leaf = tmp_path / "slurm" / "job" / "task"
        leaf.mkdir(parents=True)
        for folder, limit, used in (
            (leaf, "max", 100),
            (leaf.parent, 5000, 400),
            (leaf.parent.parent, 9000, 800),
        ):
            (folder / "memory.max").write_text(f"{limit}\n")
            (folder / "memory.current").write_text(f"{used}\n")
            (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 3\noom 2\noom_kill {used // 100}\n")
        return leaf

    def make_group(self, leaf: Path | None, monkeypatch: pytest.MonkeyPatch) -> cgroup.ControlGroup:
        path = None if leaf is None else str(leaf)
        monkeypatch.setattr(cgroup, "find_folder", lambda pid, controller: None if controller else path)
        return cgroup.ControlGroup(os.getpid())

    def test_the_lowest_limit_above_counts(self, cgroup_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        group = self.make_group(cgroup_tree, monkeypatch)
        assert group.read_memory() == (400, 5000, -1, -1)
        assert group.count_oom_kills() == 1

    def test_of_several_limits_the_one_that_is_reached_first_counts(
        self, cgroup_tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        group = self.make_group(cgroup_tree, monkeypatch)
        (cgroup_tree.parent.parent / "memory.current").write_text("8900\n")  # by another job of the same user
        assert group.read_memory()[:2] == (8900, 9000)
        (cgroup_tree.parent.parent / "memory.stat").write_text("anon 800\nactive_file 7000\ninactive_file 1000\nshmem 90\n")
        again = self.make_group(cgroup_tree, monkeypatch)
        assert again.read_memory()[:2] == (400, 5000)  # 8000 of the 8900 are pages of files
        assert self.make_group(cgroup_tree.parent.parent, monkeypatch).read_memory().cache_bytes == 8000

    def test_swap_that_the_tightest_group_allows(self, cgroup_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for folder, limit, used in (
            (cgroup_tree, "max", 10),
            (cgroup_tree.parent, 700, 30),
            (cgroup_tree.parent.parent, 650, 50),
        ):
            (folder / "memory.swap.max").write_text(f"{limit}\n")
            (folder / "memory.swap.current").write_text(f"{used}\n")
        assert self.make_group(cgroup_tree, monkeypatch).read_memory().swap_left_bytes == 600
        (cgroup_tree / "memory.swap.max").write_text("0\n")
        assert self.make_group(cgroup_tree, monkeypatch).read_memory().swap_left_bytes == 0

    def test_a_job_that_moves_to_another_group_is_followed(self, cgroup_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        group = self.make_group(cgroup_tree.parent.parent, monkeypatch)
        assert (group.read_memory().limit_bytes, group.count_oom_kills()) == (9000, 8)
        monkeypatch.setattr(cgroup, "find_folder", lambda pid, controller: None if controller else str(cgroup_tree))
        group.follow(os.getpid())  # nothing has changed by the kernel's word
        assert group.read_memory().limit_bytes == 9000
        with subprocess.Popen(["sleep", "60"]) as child:
            group._membership = b"of another process"
            group.follow(child.pid)
            child.kill()
        assert (group.read_memory().limit_bytes, group.count_oom_kills()) == (5000, 8)
        (cgroup_tree / "memory.events").write_text("oom_kill 2\n")
        assert group.count_oom_kills() == 9
        (cgroup_tree / "memory.events").unlink()  # the group is gone with its last process
        assert group.count_oom_kills() == 9

    def test_version_1(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = {"memory.usage_in_bytes": 900, "memory.limit_in_bytes": 1000, "memory.memsw.usage_in_bytes": 950}
        for name, size in (sizes | {"memory.memsw.limit_in_bytes": 1200}).items():
            (tmp_path / name).write_text(f"{size}\n")
        (tmp_path / "memory.stat").write_text("cache 5\ntotal_cache 600\ntotal_active_file 200\ntotal_inactive_file 300\n")
        monkeypatch.setattr(cgroup, "find_folder", lambda pid, controller: str(tmp_path) if controller else None)
        assert cgroup.ControlGroup(os.getpid()).read_memory() == (900, 1000, 500, 150)
        (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
        assert cgroup.ControlGroup(os.getpid()).read_memory() == (900, -1, -1, -1)

    def test_no_limit(self, cgroup_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for folder in (cgroup_tree, cgroup_tree.parent, cgroup_tree.parent.parent):
            (folder / "memory.max").write_text("max\n")
        assert self.make_group(cgroup_tree, monkeypatch).read_memory() == (100, -1, -1, -1)

    def test_no_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        group = self.make_group(None, monkeypatch)
        assert group.read_memory() == (-1, -1, -1, -1)
        assert group.count_oom_kills() == -1


def test_a_container_shows_a_part_of_the_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    files = {
        "/proc/7/cgroup": b"5:cpu,memory:/docker/abc/inner\n0::/docker/abc\n",
        "/proc/self/mountinfo": (
            f"30 20 0:1 /docker/abc {tmp_path} rw - cgroup cgroup rw,cpu,memory\n31 20 0:2 / /sys rw - cgroup2 x rw\n"
        ).encode(),
    }
    monkeypatch.setattr(procfs, "read_file", lambda path, limit=0: files.get(path, b""))
    assert cgroup.find_folder(7, "memory") == f"{tmp_path}/inner"
    assert cgroup.find_folder(7, "") == "/sys"
    assert cgroup.find_folder(7, "pids") is None


class _Steps:
    """A sampler that says what was asked of it; a sample takes until it may go on."""

    def __init__(self, *, fails: bool = False) -> None:
        self.said: list[Any] = []
        self.goes_on = threading.Event()
        self._fails = fails

    def prepare_sampling(self) -> None:
        self.said.append("prepare")

    def take_sample(self, time_ns: int, tick: int) -> None:
        self.said.append(tick)
        if self._fails:
            raise ZeroDivisionError("no")
        self.goes_on.wait()

    def close(self) -> None:
        self.said.append("close")


def _start_lane(sampler: _Steps) -> tuple[SamplerThread, list[str]]:
    """A lane that has begun to sample tick 0, and what it reports."""
    errors: list[str] = []
    lane = SamplerThread("lane", sampler, on_error=lambda where, error: errors.append(f"{where}: {error}"))
    lane.start()
    _tick_until_sampled(lane, sampler, 0)
    return lane, errors


def _tick_until_sampled(lane: SamplerThread, sampler: _Steps, number: int) -> None:
    def is_sampled() -> bool:
        lane.request_sample(number, number)
        return number in sampler.said

    wait_for(is_sampled)


def test_a_slow_sampler_leaves_ticks_out() -> None:
    sampler = _Steps()
    lane, errors = _start_lane(sampler)
    for number in (1, 2, 3):
        lane.request_sample(number, number)
    sampler.goes_on.set()
    _tick_until_sampled(lane, sampler, 4)
    lane.finish_sampling(5.0)
    assert errors == []
    assert [said for said, _ in groupby(sampler.said)] == ["prepare", 0, 4, "close"]


def test_a_failing_sampler_is_reported_once() -> None:
    sampler = _Steps(fails=True)
    lane, errors = _start_lane(sampler)
    for number in (1, 2, 3):
        lane.request_sample(number, number)
    lane.finish_sampling(5.0)
    assert errors == ["lane: no"]
    assert sampler.said == ["prepare", 0]


def test_a_hanging_sampler_does_not_hold_the_end_up() -> None:
    sampler = _Steps()
    lane, _ = _start_lane(sampler)
    lane.finish_sampling(0.1)
    assert lane.is_alive()
    assert sampler.said == ["prepare", 0]
    sampler.goes_on.set()
    lane.join(5.0)
    assert sampler.said[-1] == "close"


@pytest.mark.parametrize(
    ("devices", "look_s", "pace"),
    [
        (1, 0.0, (1, 2)),
        (1, 330e-6, (1, 2)),
        (2, 330e-6, (2, 4)),
        (8, 90e-6, (2, 4)),
        (8, 330e-6, (5, 10)),
        (64, 1e-3, (10, 10)),
    ],
)
def test_counters_are_looked_at_as_often_as_we_can_afford(devices: int, look_s: float, pace: tuple[int, int]) -> None:
    assert pcie.choose_pace(devices, look_s) == pace
    cores = devices * look_s * 20 / pace[0]  # of 20 half ticks a second
    assert cores <= 0.011 or pace == (10, 10)


@pytest.mark.parametrize(
    ("pace", "begins", "goes_on"),
    [(pcie.ReadPace(1, 2), 42e9, 85e9), (pcie.ReadPace(2, 4), 21e9, 42e9), (pcie.ReadPace(5, 10), 8.5e9, 17e9)],
)
def test_less_than_a_wrap_between_looks_is_counted_to_the_byte(pace: pcie.ReadPace, begins: float, goes_on: float) -> None:
    """Bursts of two seconds, in bytes a second: what begins is seen at the pace of the idle, what goes on at the other."""
    counter = pcie.LinkCounter()
    sent, first = 0, (1 << 32) - 77
    counter.add_reading(first, 0, 0, pace)
    begun = counter.total
    for half_tick in range(1, 400):
        at = half_tick % 80
        sent += 0 if at >= 40 else int(0.05 * (begins if at <= 10 else goes_on))
        if counter.is_due(half_tick):
            counter.add_reading((first + sent) % (1 << 32), half_tick * 50_000_000, half_tick, pace)
            assert counter.total - begun == sent


def test_a_direction_that_is_not_used_is_looked_at_rarely() -> None:
    counter, pace = pcie.LinkCounter(), pcie.ReadPace(5, 10)
    looks = []
    for half_tick in range(2000):
        sent = 0 if half_tick < 1000 else 10**8 * (half_tick - 1000)
        if counter.is_due(half_tick):
            looks.append(half_tick)
            counter.add_reading(sent, half_tick * 50_000_000, half_tick, pace)
    between = {first: second - first for first, second in itertools.pairwise(looks)}
    assert {wait for half_tick, wait in between.items() if half_tick < 600} == {10}
    assert {wait for half_tick, wait in between.items() if 620 < half_tick < 1000} == {20}
    assert {wait for half_tick, wait in between.items() if half_tick > 1020} == {5}
    assert counter.total == 10**8 * (looks[-1] - 1000)


class TestGpus:
    """NVML's answers that cannot be had on a machine at will: unsupported queries, a GPU that is lost."""

    @pytest.fixture
    def nvml_answers(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What NVML answers, by function; an exception is raised. Counts calls under ``("calls", name)``."""
        unsupported = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        table: dict[Any, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlSystemGetDriverVersion": b"580.1",
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": b"GPU-1",
            "nvmlDeviceGetName": "H200",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=100, used=40),
            "nvmlDeviceGetMigMode": unsupported,
            "nvmlDeviceGetUtilizationRates": unsupported,
            "nvmlDeviceGetFieldValues": unsupported,
            "nvmlDeviceGetPowerUsage": 250_000,
            "nvmlDeviceGetTemperature": 60,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=None)],
            "nvmlDeviceGetProcessUtilization": unsupported,
        }

        def replace_function(name: str) -> None:
            def answer_call(*arguments: Any) -> Any:
                table["calls", name] = table.get(("calls", name), 0) + 1
                if isinstance(table[name], Exception):
                    raise table[name]
                return table[name]

            monkeypatch.setattr(pynvml, name, answer_call)

        for name in list(table):
            replace_function(name)
        return table

    def make_sampler(self, folder: Path, **listeners: Callable[[Any], None]) -> gpu_sampler.GpuSampler:
        quiet = dict.fromkeys(("on_seen", "on_lost", "on_neighbour"), lambda fact: None)
        return gpu_sampler.GpuSampler(str(folder), Identity.for_this_process("node"), **(quiet | listeners))

    def test_unsupported_queries_are_made_once(self, nvml_answers: dict[Any, Any]) -> None:
        _, (device,) = nvml.discover_gpus()
        rows = [device.read_row(1000 + tick, 2 * tick) for tick in range(3)]
        assert rows[0][:6] == (1000, 40, 100, -1, -1, 4)
        assert str(rows[0][6]) == str(rows[0][7]) == "nan"
        assert rows[2][8:] == (250.0, 60, 1980, 0)
        assert nvml_answers["calls", "nvmlDeviceGetUtilizationRates"] == 1
        assert nvml_answers["calls", "nvmlDeviceGetFieldValues"] == 1
        assert nvml_answers["calls", "nvmlDeviceGetTemperature"] == 1
        assert [row[:4] for row in device.read_process_rows(5, refresh=True)] == [(5, -1, 7, 0)]
        assert ("calls", "nvmlDeviceGetProcessUtilization") not in nvml_answers  # a process that has the GPU alone

    def test_processes_that_share_a_gpu_are_measured_once_a_second(
        self, nvml_answers: dict[Any, Any], tmp_path: Path
    ) -> None:
        nvml_answers["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=pid, usedGpuMemory=9) for pid in (7, 8)]
        nvml_answers["nvmlDeviceGetProcessUtilization"] = [SimpleNamespace(pid=8, smUtil=percent) for percent in (30, 50)]
        neighbours: list[int] = []
        sampler = self.make_sampler(tmp_path, on_neighbour=neighbours.append)
        sampler.prepare_sampling()
        for tick in range(0, 45, 2):
            nvml_answers["nvmlDeviceGetMemoryInfo"] = SimpleNamespace(total=100, used=40 + tick)
            sampler.take_sample(tick * S // 20, tick)
        sampler.close()
        rows = read_table_file(next(tmp_path.glob("gpu_processes-*.rec")))
        assert nvml_answers["calls", "nvmlDeviceGetComputeRunningProcesses"] > 10
        assert nvml_answers["calls", "nvmlDeviceGetProcessUtilization"] == 3
        assert set(rows[["pid", "sm_percent"]].tolist()) == {(7, 0.0), (8, 40.0)}
        assert sorted(neighbours) == [7, 8]

    @pytest.mark.parametrize("error", [pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_NOT_SUPPORTED])
    def test_how_much_processes_compute_may_be_hidden(self, nvml_answers: dict[Any, Any], error: int) -> None:
        nvml_answers["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=pid, usedGpuMemory=9) for pid in (7, 8)]
        nvml_answers["nvmlDeviceGetProcessUtilization"] = pynvml.NVMLError(error)
        _, (device,) = nvml.discover_gpus()
        rows = [row for second in range(3) for row in device.read_process_rows(second * S, refresh=True)]
        assert {str(row[4]) for row in rows} == {"nan"}
        assert nvml_answers["calls", "nvmlDeviceGetProcessUtilization"] == 1

    def test_without_samples_nothing_is_known(self, nvml_answers: dict[Any, Any]) -> None:
        nvml_answers["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=pid, usedGpuMemory=9) for pid in (7, 8)]
        nvml_answers["nvmlDeviceGetProcessUtilization"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        _, (device,) = nvml.discover_gpus()
        assert [str(row[4]) for row in device.read_process_rows(0, refresh=True)] == ["nan", "nan"]
        nvml_answers["nvmlDeviceGetProcessUtilization"] = [SimpleNamespace(pid=8, smUtil=30)]
        assert [row[4] for row in device.read_process_rows(S, refresh=True)] == [0.0, 30.0]

    def test_byte_counters_of_32_bits_do_not_wrap_for_us(self, nvml_answers: dict[Any, Any]) -> None:
        _, (device,) = nvml.discover_gpus()
        kept = []
        for tick, raw in enumerate(((1 << 32) - 10, 5, 1000)):
            value = SimpleNamespace(fieldId=197, nvmlReturn=0, valueType=1, value=SimpleNamespace(uiVal=raw))
            nvml_answers["nvmlDeviceGetFieldValues"] = [value]
            kept.append(device.read_row(0, 2 * tick)[3])
        assert kept == [(1 << 32) - 10, (1 << 32) + 5, (1 << 32) + 1000]
        assert device.read_row(0, 8)[4] == -1

    def test_counters_are_looked_at_between_rows_only_while_bytes_flow(self, nvml_answers: dict[Any, Any]) -> None:
        _, (device,) = nvml.discover_gpus()
        value = SimpleNamespace(fieldId=198, nvmlReturn=0, valueType=1, value=SimpleNamespace(uiVal=0))
        unsupported = SimpleNamespace(fieldId=197, nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED)
        nvml_answers["nvmlDeviceGetFieldValues"] = [value, unsupported]
        device.read_row(0, 0)
        due = []
        for tick, flown in enumerate((0, 10, 3 << 30, 0), 1):
            value.value.uiVal = (value.value.uiVal + flown) % (1 << 32)
            device.read_row(0, 2 * tick)
            due.append(device.is_due(2 * tick + 1))
        assert due == [False, False, True, False]

    def test_processes_are_asked_for_when_memory_has_changed(self, nvml_answers: dict[Any, Any], tmp_path: Path) -> None:
        nvml_answers["nvmlDeviceGetCount"] = 2
        sampler = self.make_sampler(tmp_path)
        sampler.prepare_sampling()
        asked = []
        for tick in range(0, 60, 2):
            if tick in (30, 32, 36):
                nvml_answers["nvmlDeviceGetMemoryInfo"] = SimpleNamespace(total=100, used=40 + tick)
            before = nvml_answers.get(("calls", "nvmlDeviceGetComputeRunningProcesses"), 0)
            sampler.take_sample(tick, tick)
            if nvml_answers["calls", "nvmlDeviceGetComputeRunningProcesses"] > before:
                asked.append(tick)
        sampler.close()
        assert asked == [0, 20, 30, 34, 38, 58]
        rows = read_table_file(next(tmp_path.glob("gpu_processes-*.rec")))
        assert rows[["time_ns", "gpu"]].tolist() == [(tick, gpu) for tick in asked for gpu in (0, 1)]

    def test_a_passing_failure_is_asked_again(self, nvml_answers: dict[Any, Any]) -> None:
        _, (device,) = nvml.discover_gpus()
        nvml_answers["nvmlDeviceGetPowerUsage"] = pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        assert str(device.read_row(0, 1)[8]) == "nan"
        nvml_answers["nvmlDeviceGetPowerUsage"] = 100_000
        assert device.read_row(0, 2)[8] == 100.0

    def test_a_lost_gpu_is_reported_once(self, nvml_answers: dict[Any, Any], tmp_path: Path) -> None:
        seen: list[nvml.GpuDiscovery] = []
        lost: list[str] = []
        sampler = self.make_sampler(tmp_path, on_seen=seen.append, on_lost=lost.append)
        sampler.prepare_sampling()
        assert seen == [nvml.GpuDiscovery("580.1", (nvml.GpuIdentity(0, "GPU-1", "H200", 100),), None)]
        sampler.take_sample(1, 0)
        nvml_answers["nvmlDeviceGetMemoryInfo"] = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        for tick in (2, 4, 6):
            sampler.take_sample(tick, tick)
        assert lost == ["GPU 0 (H200) does not respond any more: GPU is lost"]
        assert sampler.lost_records == 0
        sampler.close()

    def test_mig_without_a_visible_instance_is_reported(self, nvml_answers: dict[Any, Any]) -> None:
        nvml_answers["nvmlDeviceGetMigMode"] = [1, 1]
        seen, _ = nvml.discover_gpus()
        assert str(seen.notice).startswith("MIG is enabled on GPU 0, but no instance is visible")

    def test_a_gpu_that_is_not_ours_leaves_the_others(self, nvml_answers: dict[Any, Any]) -> None:
        nvml_answers["nvmlDeviceGetHandleByIndex"] = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        seen, devices = nvml.discover_gpus()
        assert (seen.driver, seen.gpus, devices) == ("580.1", (), [])
        assert str(seen.notice).startswith("GPU 0 cannot be sampled: ")

    @pytest.mark.parametrize(
        ("error", "begins"),
        [
            (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "No NVIDIA driver"),
            (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "The NVIDIA driver is installed but not loaded"),
            (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "The NVIDIA library and the loaded driver have different versions"),
            (pynvml.NVML_ERROR_NO_PERMISSION, "This user may not access"),
            (pynvml.NVML_ERROR_UNKNOWN, "The NVIDIA driver does not respond ("),
        ],
    )
    def test_no_driver(self, nvml_answers: dict[Any, Any], error: int, begins: str) -> None:
        nvml_answers["nvmlInit"] = pynvml.NVMLError(error)
        seen, devices = nvml.discover_gpus()
        assert str(seen.notice).startswith(begins)
        assert (seen.driver, seen.gpus, devices) == (None, (), [])


@pytest.mark.parametrize(
    "line",
    [
        '{"time_ns": 5, "event": "job_started", "pid": "x", "start": 1}',
        '{"time_ns": 5, "event": "attached", "pid": 2, "start": 1, "ranks": [7, null]}',
        '{"time_ns": 5, "event": "rank_found", "pid": [], "start": 1e999}',
        '{"time_ns": "x", "event": []}',
        "[" * 100_000,
        "5",
    ],
    ids=range(6),
)
def test_facts_that_make_no_sense_hide_no_others(tmp_path: Path, line: str) -> None:
    ours = ProcessHandle.from_pid(os.getpid())
    assert ours is not None
    writer = EventWriter(str(tmp_path), Identity.for_this_process("node"))
    writer.write(1, events.JobStarted, pid=ours.pid, start=ours.start)
    (path,) = tmp_path.glob("events-*")
    with path.open("a") as file:
        file.write(line + "\n")
    writer.write(9, events.RankFound, pid=ours.pid, start=ours.start)
    torn = '{"zerotop": [1, 0], "writer": {"role": "node", "host": %s, "boot": %s}}\n'
    (tmp_path / "events-node-x-1.jsonl").write_text(
        torn % (json.dumps(clock.read_hostname()), json.dumps(clock.read_boot_id()))
    )
    (tmp_path / "events-node-x-2.jsonl").write_text('{"writer": 5}\n')
    facts = job_control.read_facts(str(tmp_path))
    assert facts.samplers == [ours]
    assert facts.ranks == [ours]
    assert facts.is_alive()
