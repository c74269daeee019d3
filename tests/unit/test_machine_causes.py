"""What the machine did when iterations became slower: other processes on the GPU, paging, clocks, compiling, loaders."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.lib import recfunctions

import recordings
from agents import wait_for
from loop_runs import torch_version
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.findings.support.causes import causes, host_causes, loader_causes
from zerotop.analysis.findings.support.causes.gpu_causes import check_slower_clock
from zerotop.analysis.findings.support.causes.host_causes import may_be_noise
from zerotop.analysis.findings.support.causes.step_change import StepChange
from zerotop.analysis.findings.support.host_load import CoreLoad, ThreadUse
from zerotop.recording.reader import Recording
from zerotop_probe.outside import procfs
from zerotop_probe.outside.sampling.loader_workers import LoaderWorkers
from zerotop_probe.recording.tables import TABLES

Rows = np.ndarray[Any, Any]


def find_one(folder: Path, name: str) -> Finding:
    recording = Recording.open(folder)
    return next(finding for finding in detect_findings(recording, recording.end_ns) if finding.name == name)


class Planted:
    """A recording of before these columns, in a folder, to which they are added from the first shift on."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = recordings.unpack_to_folder(name, folder)
        self.since_ns = next(iter(self.find_named("iteration_shift", "data_stall"))).begin_ns

    def find_named(self, *names: str) -> list[Finding]:
        recording = Recording.open(self.folder)
        return [finding for finding in detect_findings(recording, recording.end_ns) if finding.name in names]

    def read_table(self, table: str) -> tuple[Path, dict[str, Any], Rows]:
        (path,) = self.folder.glob(f"{table}-node-*.rec")
        header, _, records = path.read_bytes().partition(b"\n")
        facts = json.loads(header)
        return path, facts, np.frombuffer(records, [tuple(field) for field in facts["dtype"]]).copy()

    def add_columns(self, table: str, *more: Rows, **columns: tuple[float, float]) -> None:
        """Give each column a value before the shift and another one, or a rate (s), since then; add ``more`` rows."""
        path, facts, rows = self.read_table(table)
        offset_ns = Recording.open(self.folder).sources[table][0].offset_ns
        fields = {field.name: field.dtype for field in TABLES[table].fields if field.name not in (rows.dtype.names or ())}
        wide = recfunctions.append_fields(
            rows, list(fields), [np.zeros(len(rows), kind) for kind in fields.values()], usemask=False
        )
        wide = np.sort(np.concatenate([wide, *(one.astype(wide.dtype) for one in more)]), order="time_ns", kind="stable")
        later_s = (wide["time_ns"] + offset_ns - self.since_ns) / 1e9
        for name, (before, after) in columns.items():
            is_counter = np.issubdtype(wide.dtype[name], np.integer) and name not in ("loader_workers", "child_processes")
            wide[name] = np.where(later_s > 0, later_s * after if is_counter else after, before)
        facts["dtype"] = [list(field) for field in wide.dtype.descr]
        path.write_bytes(json.dumps(facts).encode() + b"\n" + wide.tobytes())


def plant_neighbour(planted: Planted, before: float, after: float, *, of_job: bool = False) -> None:
    """Another process on the rank's GPU, which computes so much before and after the shift (percent)."""
    _, _, rows = planted.read_table("gpu_processes")
    other = rows[rows["gpu"] == 0].copy()
    other["pid"], other["used_bytes"] = 3343, 2 << 30
    offset_ns = Recording.open(planted.folder).sources["gpu_processes"][0].offset_ns
    percent = np.where(other["time_ns"] + offset_ns > planted.since_ns, after, before).astype("<f4")
    nothing = np.zeros(len(other), "<u4")
    planted.add_columns(
        "gpu_processes", recfunctions.append_fields(other, ["sm_percent", "pad"], [percent, nothing], usemask=False)
    )
    (events,) = planted.folder.glob("events-node-*.jsonl")
    facts = {"event": "gpu_process", "pid": 3343, "program": "python train.py", "user": "ann", "of_job": of_job}
    with events.open("a") as file:
        file.write(json.dumps({"time_ns": int(rows["time_ns"][0]), **facts}) + "\n")


def test_a_process_that_computes_on_the_same_gpu(tmp_path: Path) -> None:
    planted = Planted("gpu-offload-110", tmp_path)
    plant_neighbour(planted, 0, 40)
    shift = planted.find_named("iteration_shift")[0]
    assert "at the same time process 3343 (python train.py of ann) uses 40 % of GPU 0" in shift.details
    assert shift.fix == "ps -o user,lstart,cmd -p 3343"
    assert shift.confidence == 0.85
    # What a process computes is sampled once a second; four slow steps take 1.7 s.
    assert shift.known_ns > shift.begin_ns + 3.5e9


def test_a_process_of_the_job_that_computes_on_the_same_gpu(tmp_path: Path) -> None:
    planted = Planted("gpu-offload-110", tmp_path)
    plant_neighbour(planted, 0, 40, of_job=True)
    shift = planted.find_named("iteration_shift")[0]
    assert "at the same time the job's own process 3343 (python train.py of ann) uses 40 % of GPU 0" in shift.details
    assert "on another GPU" in shift.advice
    assert shift.fix == ""
    assert shift.kind is not None
    assert shift.kind.measured_cause == "own_process_on_gpu"


def test_a_process_that_computes_as_much_as_before_is_no_cause(tmp_path: Path) -> None:
    planted = Planted("gpu-offload-110", tmp_path)
    plant_neighbour(planted, 40, 40)
    assert "3343" not in planted.find_named("iteration_shift")[0].details


def test_a_process_that_has_left_the_gpu_is_no_cause(tmp_path: Path) -> None:
    planted = Planted("gpu-offload-110", tmp_path)
    plant_neighbour(planted, np.nan, np.nan)
    assert "3343 (python train.py of ann) is on GPU 0 too" in planted.find_named("iteration_shift")[0].details
    (path,) = planted.folder.glob("gpu_processes-node-*.rec")
    header, _, records = path.read_bytes().partition(b"\n")
    rows = np.frombuffer(records, [tuple(field) for field in json.loads(header)["dtype"]])
    offset_ns = Recording.open(planted.folder).sources["gpu_processes"][0].offset_ns
    is_left = (rows["pid"] == 3343) & (rows["time_ns"] + offset_ns > planted.since_ns)
    path.write_bytes(header + b"\n" + rows[~is_left].tobytes())
    assert "3343" not in planted.find_named("iteration_shift")[0].details


def test_a_process_that_begins_to_compute_where_the_loop_waits_for_the_gpu_between_the_phases(tmp_path: Path) -> None:
    shift = find_one(recordings.unpack_to_folder("gpu-neighbour", tmp_path), "iteration_shift")
    assert (
        "of it between the phases (data, forward, backward, step); at the same time process 2042 (python3 of root) uses 20 %"
        " of GPU 0" in shift.details
    )


def test_a_process_that_computed_before_is_no_cause_of_time_between_the_phases(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-neighbour", tmp_path)
    (path,) = folder.glob("gpu_processes-node-*.rec")
    header, _, records = path.read_bytes().partition(b"\n")
    rows = np.frombuffer(records, [tuple(field) for field in json.loads(header)["dtype"]]).copy()
    others = rows["pid"] == 2042
    rows["sm_percent"][others] = np.maximum(rows["sm_percent"][others], 10)
    path.write_bytes(header + b"\n" + rows.tobytes())
    recording = Recording.open(folder)
    # Without a cause the change may be within the job's own wandering, and no finding.
    assert all("2042" not in finding.details for finding in detect_findings(recording, recording.end_ns))


def test_pages_that_come_back_from_swap(tmp_path: Path) -> None:
    planted = Planted("gpu-offload-110", tmp_path)
    planted.add_columns("processes", major_faults=(0, 3000))
    planted.add_columns("hosts", swap_in_bytes=(0, 100 << 20))
    shift = planted.find_named("iteration_shift")[0]
    assert "at the same time the lead rank waits for 30" in shift.details
    assert "MiB a second come from swap" in shift.details


def test_a_few_pages_are_always_read(tmp_path: Path) -> None:
    planted = Planted("gpu-offload-110", tmp_path)
    planted.add_columns("processes", major_faults=(0, 30))
    assert "pages" not in planted.find_named("iteration_shift")[0].details


def test_cores_that_slow_down(tmp_path: Path) -> None:
    planted = Planted("gpu-offload-110", tmp_path)
    planted.add_columns("hosts", cpu_mhz=(3000, 2000))
    assert "the clock of the node's cores fell from 3000 to 2000 MHz" in planted.find_named("iteration_shift")[0].details


@pytest.mark.parametrize(("after", "is_named"), [(0.08, True), (0.16, False)])
def test_more_processes_share_the_cores_that_others_had_before(tmp_path: Path, after: float, is_named: bool) -> None:
    planted = Planted("gpu-offload-110", tmp_path)
    cores = read_cores(planted)
    # Of each of three ranks.
    planted.add_columns("processes", cores_used=(0.32, after), waiting_cores=(0.5 * cores, 0.9 * cores))
    planted.add_columns("hosts", cores_used=(cores, cores))
    text = f"the ranks got {3 * after:.2f} cores instead of 0.96, as other processes used {cores - 3 * after:.1f}"
    details = [finding.details for finding in planted.find_named("iteration_shift")]
    assert any(text in detail for detail in details) == is_named


@pytest.mark.parametrize(("times", "is_named"), [(1.15, True), (2.0, False), (0.9, False)])
def test_ranks_that_get_fewer_cores_than_before(tmp_path: Path, times: float, is_named: bool) -> None:
    """They lack little of a large node, but iterations became longer about as they get less."""
    planted = Planted("gpu-offload-110", tmp_path)
    cores, shift = read_cores(planted), planted.find_named("iteration_shift")[0]
    slower = shift.evidence["after_s"] / shift.evidence["before_s"]
    # Of each of three ranks.
    planted.add_columns("processes", cores_used=(0.2 * slower * times, 0.2), waiting_cores=(0.0, 0.1))
    planted.add_columns("hosts", cores_used=(0.5 * cores, cores))
    details = [finding.details for finding in planted.find_named("iteration_shift")]
    assert any("; at the same time the ranks got 0.60 cores instead of" in one for one in details) == is_named


@pytest.mark.parametrize(
    ("ranks", "waiting", "after_s", "is_noise"),
    [
        (0.4, 1.9, 0.148, True),
        (0.4, 1.9, 0.3, True),
        (0.4, 1.9, 0.4, False),
        (1.0, 0.8, 0.148, False),
        (1.0, 0.8, 0.08, True),
        (1.0, 0.0, 0.05, False),
    ],
)
def test_iterations_vary_more_where_ranks_get_less_of_the_cores(
    ranks: float, waiting: float, after_s: float, is_noise: bool
) -> None:
    """Of two cores, of which others use what the ranks leave, before and after; iterations took 44 ms."""
    load = CoreLoad(ranks, waiting, 2 - ranks, 2)
    assert may_be_noise(0.044, after_s, [load, load]) == is_noise
    assert may_be_noise(after_s, 0.044, [load, load]) == is_noise


def test_iterations_as_long_as_some_before_are_noise_where_others_use_the_cores() -> None:
    starved, free = CoreLoad(0.6, 1.4, 1.4, 2), CoreLoad(1.0, 0.0, 0.0, 2)
    assert may_be_noise(0.05, 0.6, [starved, starved], longest_s=0.65)
    assert not may_be_noise(0.05, 0.6, [starved, starved], longest_s=0.5)
    assert not may_be_noise(0.05, 0.6, [free, free], longest_s=0.65)


def read_cores(planted: Planted) -> int:
    """Return the cores of the recording's node."""
    (path,) = planted.folder.glob("events-node-*.jsonl")
    return int(next(facts["cores"] for line in path.read_text().splitlines() if "cores" in (facts := json.loads(line))))


def plant_compiling(planted: Planted, steps: int, seconds: float) -> None:
    """A graph that is compiled in each of so many steps from the first shift on."""
    shift = planted.find_named("iteration_shift")[0]
    (process,) = (source for source in Recording.open(planted.folder).sources["spans"] if source.rank == 0)
    begin_ns, step_ns = shift.begin_ns - process.offset_ns, round(shift.evidence["after_s"] * 1e9)
    (path,) = planted.folder.glob("events-rank0-*.jsonl")
    with path.open("a") as file:
        for at_ns in range(begin_ns, begin_ns + steps * step_ns, step_ns):
            facts = {"step": 0, "begin_ns": at_ns, "graphs": 1, "seconds": seconds}
            file.write(json.dumps({"time_ns": at_ns + step_ns, "event": "compiled", **facts}) + "\n")


def test_graphs_that_are_compiled_again(tmp_path: Path) -> None:
    planted = Planted("gpu-slow", tmp_path)
    plant_compiling(planted, 10, 0.05)
    shift = planted.find_named("iteration_shift")[0]
    assert "at the same time torch.compile compiled 4 graphs in 4 steps" in shift.details
    assert shift.fix.startswith("TORCH_LOGS=recompiles ")  # all batches have the same shape


def test_steps_that_compile_have_one_finding_with_its_end(tmp_path: Path) -> None:
    """Of this recording steps 18 to 37 are slow."""
    planted = Planted("held-there-and-back", tmp_path)
    plant_compiling(planted, 20, 0.08)
    (shift,) = planted.find_named("iteration_shift")
    assert "torch.compile compiled " in shift.details
    assert "from step 18 to 37" in shift.headline


@pytest.mark.parametrize(
    ("cores", "waiting", "blocked", "told", "fix"),
    [
        (0.1, 0.0, 3.8, "3.8 of 4 loader workers wait for the disk", "/dev/shm/"),
        (1.5, 2.0, 0.0, "4 loader workers use 1.5 cores and wait for more", "num_workers=1"),
        (0.3, 0.1, 0.0, "4 loader workers use 0.3 cores, and hardly run", "py-spy dump"),
    ],
)
def test_the_finding_names_the_work_of_loader_workers_during_a_wait(
    tmp_path: Path, cores: float, waiting: float, blocked: float, told: str, fix: str
) -> None:
    planted = Planted("cpu-stall", tmp_path)
    use = {"loader_cores": cores, "loader_waiting_cores": waiting, "loader_blocked": blocked, "loader_workers": 4}
    planted.add_columns("processes", **{name: (value, value) for name, value in use.items()})
    (stall,) = planted.find_named("data_stall")
    assert stall.details.endswith(f"; {told}.")
    assert fix in stall.fix


@pytest.mark.parametrize(("spare", "fix"), [(8, "num_workers=2"), (0.97, "num_workers=2"), (0.5, ""), (0, "")])
def test_a_late_rank_gets_as_many_workers_as_have_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: float, fix: str
) -> None:
    planted = Planted("unseen-late-data", tmp_path)
    planted.add_columns("processes", loader_cores=(0.97, 0.97), loader_workers=(1, 1))
    monkeypatch.setattr(loader_causes, "measure_spare_cores", lambda *_: spare)
    (straggler,) = planted.find_named("straggler")
    assert straggler.advice.startswith("Give each rank the same amount of data, of similar length")
    assert straggler.fix == fix


@pytest.mark.parametrize(
    ("node_cores", "bound", "workers", "advice", "fix"),
    [
        (64, "", 4, "Start more workers", "num_workers=8"),
        (2, "", 4, "the job has no core for more workers.", ""),
        (64, "0-3", 4, "the job has no core for more workers.", ""),
        (64, "", 0, "Raise the DataLoader's num_workers", "num_workers=4"),
        (2, "", 0, "Raise the DataLoader's num_workers: the loading hardly computes", "num_workers=2"),
    ],
)
def test_more_loader_workers_need_cores_that_the_job_may_use(
    tmp_path: Path, node_cores: int, bound: str, workers: int, advice: str, fix: str
) -> None:
    planted = Planted("cpu-stall", tmp_path)
    use = {"loader_cores": 0.97 * workers, "loader_workers": workers}
    planted.add_columns("processes", **{name: (value, value) for name, value in use.items()})
    (events,) = planted.folder.glob("events-node-*.jsonl")
    lines = events.read_text().replace('"cores": 2', f'"cores": {node_cores}').splitlines()
    for source in Recording.open(planted.folder).sources["spans"]:
        affinity = {"time_ns": planted.since_ns - source.offset_ns, "event": "affinity", "pid": source.pid, "cpus": bound}
        lines += [json.dumps(affinity | {"threads": {}})] if bound else []
    events.write_text("\n".join(lines) + "\n")
    (stall,) = planted.find_named("data_stall")
    assert advice in stall.advice
    assert stall.fix == fix


@pytest.mark.parametrize(
    ("computed", "advice", "fix"),
    [
        (0.1, "Raise the DataLoader's num_workers: the loading hardly computes", "num_workers=2"),
        (0.6, "Try the DataLoader's num_workers: workers help if the loading waits for files or a server.", "num_workers=2"),
        (0.95, "Prepare the data once, before the training: the job has no core for workers.", ""),
    ],
)
def test_workers_need_no_core_if_the_loading_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computed: float, advice: str, fix: str
) -> None:
    """The rank loads its data itself, for most of each iteration; its thread computes for a share of all the time."""
    planted = Planted("cpu-stall", tmp_path)
    planted.add_columns("processes", loader_workers=(0, 0))
    monkeypatch.setattr(loader_causes, "measure_spare_cores", lambda *_: 0.0)

    def measure_use(_: object, begin_ns: int, end_ns: int, *, known_ns: int) -> ThreadUse:
        return ThreadUse(computed * (end_ns - begin_ns) / 1e9, 0.0)

    monkeypatch.setattr(loader_causes, "measure_thread_use", measure_use)
    (stall,) = planted.find_named("data_stall")
    assert stall.advice.startswith(advice)
    assert stall.fix == fix
    assert ("computes for at most" in stall.details) == (computed < 0.5)


def test_a_loader_without_workers_is_compared_with_the_one_before(tmp_path: Path) -> None:
    planted = Planted("cpu-stall", tmp_path)
    planted.add_columns("processes", loader_workers=(3, 0))
    (stall,) = planted.find_named("data_stall")
    assert stall.details.endswith("; it has no loader worker any more, and had 3 before.")
    assert (stall.advice, stall.fix) == ("Give this loader the workers that the one before it had.", "num_workers=3")


WORKER = [
    ("libc.so.6", 0, "flock", False),
    ("index.py", 9, "Items.lookup", True),
    ("torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch", False),
    ("torch/utils/data/_utils/worker.py", 374, "_worker_loop", False),
    ("train.py", 30, "main", True),
]


@pytest.mark.parametrize(
    ("frames", "when_s", "told"),
    [
        ([0, 1, 2, 3, 4], 0.1, "; py-spy shows index.py:9 in Items.lookup (calls flock)."),
        ([0, 2, 3, 4], 0.1, "and hardly run."),  # no line of the job's own: that of the rank says nothing
        ([0, 1, 2, 3, 4], -60.0, "and hardly run."),
        ([0, 1, 2, 3, 4], 6.0, "; py-spy shows index.py:9 in Items.lookup (calls flock)."),  # after the finding was told
    ],
    ids=["a line", "a library's", "long before", "later"],
)
def test_the_line_of_loader_workers(tmp_path: Path, frames: list[int], when_s: float, told: str) -> None:
    planted = Planted("cpu-stall", tmp_path)
    columns = {"loader_cores": 0.3, "loader_waiting_cores": 0.1, "loader_blocked": 0.0, "loader_workers": 4}
    planted.add_columns("processes", **{name: (value, value) for name, value in columns.items()})
    offset_ns = Recording.open(planted.folder).sources["processes"][0].offset_ns
    (path,) = planted.folder.glob("events-node-*.jsonl")
    named = [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in WORKER]
    stacks = [{"count": 1, "call": "flock", "frames": frames}]
    facts = {"event": "loader_stacks", "rank": 0, "pid": 1, "worker": 2, "frames": named, "stacks": stacks}
    with path.open("a") as file:
        file.write(json.dumps({"time_ns": planted.since_ns - offset_ns + int(when_s * 1e9), **facts}) + "\n")
    (stall,) = planted.find_named("data_stall")
    assert stall.details.endswith(told)
    assert ("read at index.py:9 without that lock" in stall.advice) is ("index.py" in told)


IDLE = [("selectors.py", 415, "_PollLikeSelector.select", False), *WORKER[3:]]


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        (["iLii"] * 3, "worker 2 of 4 is slow: the others wait for it, and py-spy shows it at index.py:9"),
        (["iLii", "iLLi", "iLii"], "worker 2 of 4 is slow"),  # others load their batches, too
        (["iLii"] * 2, "and hardly run"),
        (["iL"] * 3, "and hardly run"),  # of two, it may be chance
        (["iL"] * 5, "worker 2 of 2 is slow"),
        (["iLii", "Liii", "iiLi"], "and hardly run"),
        (["LLLL"] * 3, "and hardly run"),
        (["iLLi"] * 3, "and hardly run"),
        (["iLii", "iLii", "iLi"], "and hardly run"),  # the last look is not over
    ],
)
def test_one_loader_worker_for_which_the_others_wait(tmp_path: Path, looks: list[str], told: str) -> None:
    planted = Planted("cpu-stall", tmp_path)
    columns = {"loader_cores": 0.3, "loader_waiting_cores": 0.1, "loader_blocked": 0.0, "loader_workers": 4}
    planted.add_columns("processes", **{name: (value, value) for name, value in columns.items()})
    source = Recording.open(planted.folder).sources["processes"][0]
    (path,) = planted.folder.glob("events-node-*.jsonl")
    pids = [one.pid for one in Recording.open(planted.folder).sources["spans"]]
    with path.open("a") as file:
        for (at, look), pid in product(enumerate(looks), pids):
            for worker, state in enumerate(look):
                frames = WORKER if state == "L" else IDLE
                named = [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in frames]
                stacks = [{"count": 1, "call": "poll", "frames": list(range(len(frames)))}]
                time_ns = planted.since_ns - source.offset_ns + int((0.1 + 0.3 * at + 0.01 * worker) * 1e9)
                facts = {"event": "loader_stacks", "rank": 0, "pid": pid, "worker": 50 + worker, "frames": named}
                file.write(json.dumps({"time_ns": time_ns, **facts, "stacks": stacks}) + "\n")
    (stall,) = planted.find_named("data_stall")
    assert told in stall.details
    assert ("batches come in order" in stall.advice) is ("is slow" in told)


@contextmanager
def start_python(code: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, *options, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


BUSY_LOADER = """
import time
import torch
class Items(torch.utils.data.Dataset):
    def __len__(self): return 10**9
    def __getitem__(self, index):
        end = time.process_time() + 0.02
        while time.process_time() < end: pass
        return index
for number, _ in enumerate(torch.utils.data.DataLoader(Items(), num_workers=2)):
    if not number: print("ready", flush=True)
"""


SPINNING_CHILD = """
import multiprocessing, os, time
def spin(parent):
    while os.getppid() == parent: pass
multiprocessing.get_context("fork").Process(target=spin, args=(os.getpid(),), daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""


def test_other_children_are_counted_apart_from_workers() -> None:
    with start_python(SPINNING_CHILD) as child:
        workers = LoaderWorkers(child.pid)
        first = workers.measure_use(time.monotonic_ns())
        assert (first.workers, first.children) == (0, 1)
        time.sleep(0.2)
        use = wait_for(lambda: (use := workers.measure_use(time.monotonic_ns())).child_cores > 0.1 and use)
        assert use.child_cores < 1.5
        assert use.workers == 0


def test_busy_workers_of_a_real_loader() -> None:
    with start_python(BUSY_LOADER) as child:
        workers = LoaderWorkers(child.pid)
        first = workers.measure_use(time.monotonic_ns())
        if torch_version() < (2, 6):
            assert first.workers == -1  # they have no name of their own: none is not what is said
            return
        assert first.workers == 2
        assert np.isnan(first.cores)
        time.sleep(0.2)  # the kernel counts their time in ticks of 10 ms
        use = wait_for(lambda: (use := workers.measure_use(time.monotonic_ns())).cores > 0.1 and use)
        assert use.workers == 2
        assert use.blocked <= 2
    assert LoaderWorkers(child.pid).measure_use(time.monotonic_ns()).workers <= 0


COMPILING = """
import json, torch
from zerotop_probe.inside.interpreter.compiled_graphs import CompilationCounter
counter = CompilationCounter()
model = torch.compile(torch.nn.Linear(4, 4), backend="eager", dynamic=False)
seen = [counter.take_graphs(0)]
for rows in (2, 2, 3, 4):
    model(torch.ones(rows, 4))
    seen.append(counter.take_graphs(rows))
torch._dynamo.utils.counters.clear()
model(torch.ones(5, 4))
seen.append(counter.take_graphs(9))
class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * (self.times if self.mode else 1)
scaled = Scaled(4, 4)
model = torch.compile(scaled, backend="eager", dynamic=False)
counter.name_file = lambda path: "train.py" if path == "<string>" else None
for change in ({"times": 1, "mode": "secret"}, {"times": 2}, {"mode": "hidden"}, {}):
    vars(scaled).update(change)
    model(torch.ones(2, 4))
    seen.append(counter.take_graphs(9))
print("ready", flush=True)
print(json.dumps(seen), flush=True)
import time; time.sleep(600)
"""


def test_compilations_of_torch_are_counted() -> None:
    with start_python(COMPILING) as child:
        assert child.stdout is not None
        seen = json.loads(child.stdout.readline())
    seen, scaled = seen[:6], seen[6:]
    assert [found and found[1] for found in seen] == [None, 1, None, 1, 1, 1]
    assert all(found[2] > 0 for found in seen if found is not None and found is not seen[-1])
    assert [len(found[3]) for found in seen if found is not None] == [0, 1, 1, 1]
    assert "size mismatch at index 0. expected 2, actual 3" in seen[3][3][0]["guard"]
    assert [found and len(found[3]) for found in scaled] == [0, 1, 1, None]
    (times,), (mode,) = scaled[1][3], scaled[2][3]
    assert (times["guard"], times["setting"], times["file"]) == (
        "self.times == 1",
        "allow_unspec_int_on_nn_module",
        "train.py",
    )
    assert mode["guard"] == "self.mode == ..."  # no texts of the job


def test_a_program_is_named_without_its_code() -> None:
    with start_python("print('ready', flush=True); import time; time.sleep(600)", "-u", "-B", "-E", "-s") as child:
        assert procfs.read_program(child.pid) == Path(sys.executable).name
        assert procfs.read_user_name(child.pid)
    assert procfs.read_program(child.pid) == ""


@pytest.mark.parametrize(("workers", "is_mentioned"), [(0, False), (2, True)])
def test_growing_memory_mentions_workers_only_where_there_are_some(tmp_path: Path, workers: int, is_mentioned: bool) -> None:
    planted = Planted("held-grows", tmp_path)
    planted.add_columns("processes", loader_workers=(workers, workers), shared_bytes=(0, 1 << 30))
    growth = planted.find_named("host_growth")[-1]
    assert growth.advice.startswith("Keep less shared memory")
    assert ("batches of DataLoader workers" in growth.advice) is is_mentioned


_POPEN, _START = ("multiprocessing/popen_fork.py", "Popen._launch"), ("multiprocessing/process.py", "BaseProcess.start")


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"loader_workers": (8.0, 8.0), "loader_cores": (0.5, 15.0)}, "its 8 DataLoader workers used 15.0 of"),
        ({"child_processes": (0.0, 5.0), "child_cores": (0.0, 15.0)}, "5 processes that the job had started used 15.0 of"),
        ({"child_processes": (5.0, 5.0), "child_cores": (1.0, 1.0)}, "other processes used"),
    ],
    ids=["loader workers", "started processes", "others"],
)
@pytest.mark.parametrize("check", ["check_others", "check_crowding"])
def test_cores_are_taken_by_the_jobs_own_processes_or_by_others(
    tmp_path: Path, own: dict[str, tuple[float, float]], said: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Planted("gpu-offload-110", tmp_path)
    cores = read_cores(planted)
    planted.add_columns("processes", cores_used=(0.32, 0.08), waiting_cores=(0.0, 0.9 * cores), **own)
    planted.add_columns("hosts", cores_used=(2.0, cores))
    found: list[Any] = []
    monkeypatch.setattr(causes, "_CHECKS", (lambda change: found.append(getattr(host_causes, check)(change)),))
    planted.find_named("iteration_shift")
    texts = [str(cause.text) for cause in found if cause is not None]
    assert any(said in text for text in texts), texts


@pytest.mark.parametrize(
    ("library", "who"),
    [
        ([_POPEN, _START], "processes that the job had started at shards.py:75 in main used"),
        ([_POPEN, _START, ("torch/utils/data/dataloader.py", "_Iter.__init__")], "other processes used"),
        ([("subprocess.py", "Popen.__init__"), ("subprocess.py", "run")], "other processes used"),
    ],
    ids=["processes", "loader workers", "a program that has ended"],
)
def test_cores_that_the_jobs_own_processes_take(tmp_path: Path, library: list[tuple[str, str]], who: str) -> None:
    planted = Planted("gpu-offload-110", tmp_path)
    cores, shift = read_cores(planted), planted.find_named("iteration_shift")[0]
    unknown = (float("nan"), float("nan"))
    planted.add_columns("processes", cores_used=(0.32, 0.08), waiting_cores=(0.0, 0.9 * cores), child_cores=unknown)
    planted.add_columns("hosts", cores_used=(1.0, cores))
    events = next(planted.folder.glob("events-rank0-*.jsonl"))
    clock = json.loads(events.read_text().partition("\n")[0])["clock"]
    frames = [{"file": file, "line": 9, "function": name, "own": False} for file, name in library]
    frames.append({"file": "shards.py", "line": 75, "function": "main", "own": True})
    times = dict.fromkeys(("time_ns", "begin_ns", "end_ns"), shift.begin_ns - clock["unix_ns"] + clock["monotonic_ns"])
    stacks = [{"count": 9, "seconds": 0.3, "frames": list(range(len(frames)))}]
    facts = {"where": "between phases", "why": "slow", "step": shift.step, "last_step": shift.step, "samples": 9}
    with events.open("a") as file:
        file.write(json.dumps({"event": "stacks", **times, **facts, "frames": frames, "stacks": stacks}) + "\n")
    details = [str(finding.details) for finding in planted.find_named("iteration_shift")]
    assert any(who in detail for detail in details), details


@pytest.mark.parametrize(("busy_after", "told"), [(0.95, True), (0.1, False), (float("nan"), True)])
def test_a_clock_that_falls_as_the_gpu_has_less_to_do_is_no_cause(busy_after: float, told: bool) -> None:
    def make_samples(mhz: float) -> SimpleNamespace:
        return SimpleNamespace(rows=np.array([(mhz,)] * 5, dtype=[("sm_clock_mhz", "f8")]))

    change = SimpleNamespace(
        process=SimpleNamespace(gpu_samples=None),
        read_samples=lambda records: (make_samples(1980), make_samples(600)),
        before=np.array([(0.1,)] * 5, dtype=[("iteration_s", "f8")]),
        added_s=0.2,
        measure_gpu_uses=lambda process: (0.9, busy_after),
    )
    cause = check_slower_clock(cast(StepChange, change))
    assert (cause is not None and "from 1980 to 600 MHz" in cause.text) is told
