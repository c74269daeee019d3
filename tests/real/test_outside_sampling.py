"""What an agent sees of real processes: which are ranks, what they use, which of their threads run."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agents import build_python_command, read_node_events, read_node_records, wait_for
from zerotop_probe.outside.job import agent, job_control
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording.writer import EventWriter, Identity

ALONE = pytest.mark.alone  # how busy the machine is changes what these see

# A launcher of two ranks, as torchrun and deepspeed are. Ranks run argv[1]; each has a worker, which inherits
# its variables.
LAUNCHER = """
import os, subprocess, sys
def start(rank):
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return subprocess.Popen([sys.executable, *sys.argv[2:], "-c", sys.argv[1]], env=environment)
sys.exit(max(rank.wait() for rank in [start(0), start(1)]))
"""
WORKER = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""
SLEEP = "import time; time.sleep(600)"

Start = Callable[..., ProcessHandle]


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Start]:
    """Starts a job in the background; it is killed afterwards."""
    started: list[ProcessHandle] = []

    def launch_command(*command: str) -> ProcessHandle:
        started.append(agent.launch_in_background(str(tmp_path), command, grace_s=(0.0, 0.0)))
        return started[-1]

    yield launch_command
    if any(process.is_alive() for process in started):
        job_control.request_stop(str(tmp_path))
    wait_for(lambda: not any(process.is_alive() for process in started))


def rows_of(recording: Path, name: str, least: int, **wanted: int) -> NDArray[Any]:
    """Waits for at least so many rows with these values."""

    def select_rows() -> NDArray[Any]:
        rows = read_node_records(recording, name)
        for field, value in wanted.items():
            rows = rows[rows[field] == value]
        return rows

    wait_for(lambda: len(select_rows()) >= least)
    return select_rows()


def test_ranks_are_found_below_a_launcher_and_their_workers_are_not(tmp_path: Path, start_job: Start) -> None:
    start_job(*build_python_command(LAUNCHER), WORKER)
    events = wait_for(
        lambda: len(read_node_events(tmp_path, "rank_found")) == 2 and read_node_events(tmp_path, "rank_found")
    )
    assert sorted((event["rank"], event["local_rank"]) for event in events) == [(0, 0), (1, 1)]
    assert all(ProcessHandle(event["pid"], event["start"]).is_alive() for event in events)
    rows_of(tmp_path, "processes", 15, rank=1)
    table = read_node_records(tmp_path, "processes")
    (root,) = read_node_events(tmp_path, "job_started")
    assert set(table["pid"].tolist()) == {root["pid"], *(event["pid"] for event in events)}
    assert set(table["rank"][table["pid"] == root["pid"]].tolist()) == {-1}
    assert len(read_node_events(tmp_path, "rank_found")) == 2
    assert read_node_events(tmp_path, "rank_silent") == []


@ALONE
def test_all_rows_of_a_tick_share_its_time(tmp_path: Path, start_job: Start) -> None:
    start_job(*build_python_command(LAUNCHER), SLEEP)
    rows_of(tmp_path, "processes", 10, rank=1)
    table = read_node_records(tmp_path, "processes")
    times = [set(table["time_ns"][table["rank"] == rank].tolist()) for rank in (0, 1)]
    common = times[0] & times[1]
    assert len(common) >= min(map(len, times)) - 1  # the last tick may be half written
    assert common & set(read_node_records(tmp_path, "hosts")["time_ns"].tolist())
    steps = np.diff(sorted(common)) / 1e9
    assert 0.08 < np.median(steps) < 0.4  # ten a second, fewer on a busy machine


def test_compilers_below_a_rank_are_reported_once(tmp_path: Path, start_job: Start) -> None:
    compiler = tmp_path / "cc1plus"
    compiler.symlink_to("/bin/sleep")
    code = f"import subprocess; subprocess.run(['/bin/sh', '-c', '{compiler} 600; true'])"
    start_job(*build_python_command(LAUNCHER), code)
    (events,) = wait_for(lambda: read_node_events(tmp_path, "compiling"))
    assert (events["rank"], events["pid"]) in {(e["rank"], e["pid"]) for e in read_node_events(tmp_path, "rank_found")}
    rows_of(tmp_path, "processes", 15, rank=1)
    assert len(read_node_events(tmp_path, "compiling")) == 1


def test_a_rank_that_dies_is_gone(tmp_path: Path, start_job: Start) -> None:
    start_job(*build_python_command(LAUNCHER), SLEEP)
    events = wait_for(
        lambda: len(read_node_events(tmp_path, "rank_found")) == 2 and read_node_events(tmp_path, "rank_found")
    )
    first = next(event for event in events if event["rank"] == 0)
    rows_of(tmp_path, "processes", 2, rank=0)
    os.kill(first["pid"], 9)
    (gone,) = wait_for(lambda: read_node_events(tmp_path, "rank_gone"))
    assert (gone["rank"], gone["pid"]) == (0, first["pid"])
    last = read_node_records(tmp_path, "processes")
    assert last["time_ns"][last["rank"] == 0].max() <= gone["time_ns"]


def test_a_rank_that_a_signal_stops_is_reported_until_it_goes_on(tmp_path: Path, start_job: Start) -> None:
    start_job(*build_python_command(LAUNCHER), SLEEP)
    events = wait_for(
        lambda: len(read_node_events(tmp_path, "rank_found")) == 2 and read_node_events(tmp_path, "rank_found")
    )
    rows_of(tmp_path, "processes", 2, rank=1)
    (pid,) = (event["pid"] for event in events if event["rank"] == 1)
    for sent, name in ((signal.SIGSTOP, "rank_stopped"), (signal.SIGCONT, "rank_continued")):
        assert not read_node_events(tmp_path, name)
        os.kill(pid, sent)
        (told,) = wait_for(functools.partial(read_node_events, tmp_path, name))
        assert (told["rank"], told["pid"]) == (1, pid)


def test_a_plain_python_becomes_a_rank_when_its_engine_reports(tmp_path: Path, start_job: Start) -> None:
    """What an engine's making leaves is the file that its process writes."""
    code = f"""
import time
from zerotop_probe.recording.writer import EventWriter, Identity
time.sleep(0.8)
EventWriter({str(tmp_path)!r}, Identity.for_this_process("rank", 0))
time.sleep(600)
"""
    start_job(*build_python_command(code))
    (events,) = wait_for(lambda: read_node_events(tmp_path, "rank_found"))
    (root,) = read_node_events(tmp_path, "job_started")
    assert (events["rank"], events["pid"], events["start"]) == (0, root["pid"], root["start"])
    rows_of(tmp_path, "processes", 3, rank=0)
    ranks = read_node_records(tmp_path, "processes")["rank"]
    assert (np.diff(ranks) >= 0).all()  # sampled from the start on, as -1
    assert set(ranks.tolist()) == {-1, 0}


def test_reports_of_other_recordings_and_machines_make_no_rank(tmp_path: Path, start_job: Start) -> None:
    start_job(*build_python_command(SLEEP))
    (root,) = wait_for(lambda: read_node_events(tmp_path, "job_started"))
    here = Identity.for_this_process("rank", 7)
    EventWriter(str(tmp_path), here._replace(host="elsewhere", pid=root["pid"], start=root["start"])).close()
    EventWriter(str(tmp_path), here._replace(pid=root["pid"], start=root["start"] + 1)).close()
    rows_of(tmp_path, "processes", 12, rank=-1)
    assert read_node_events(tmp_path, "rank_found") == []


@pytest.mark.parametrize("option", ["-E", "-I", "-uS"])
def test_ranks_that_do_not_load_the_probe_are_reported(tmp_path: Path, start_job: Start, option: str) -> None:
    start_job(
        *build_python_command(LAUNCHER),
        f"import mmap\nfile = open({fake_torch(tmp_path)!r})\nmemory = mmap.mmap(file.fileno(), 0, prot=1)\n{SLEEP}",
        option,
    )
    missing = wait_for(
        lambda: len(read_node_events(tmp_path, "probe_missing")) == 2 and read_node_events(tmp_path, "probe_missing")
    )
    assert {event["rank"] for event in missing} == {0, 1}
    assert {(event["reason"], event["by"], event["is_rank"]) for event in missing} == {("option", f"-{option[-1]}", True)}


def fake_torch(folder: Path) -> str:
    """A file that is mapped as PyTorch's library is."""
    path = folder.parent / f"{folder.name}-libtorch.so"
    path.write_bytes(b"x")
    return str(path)


SPIN = """
import ctypes, threading, time
name = ctypes.CDLL(None).pthread_setname_np
name.argtypes = [ctypes.c_ulong, ctypes.c_char_p]
def spin():
    name(threading.get_ident(), b"burner")
    import hashlib
    while True: hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)  # releases the GIL
def idle():
    name(threading.get_ident(), b"idler")
    time.sleep(600)
for target in [spin, spin] + [idle] * 40: threading.Thread(target=target, daemon=True).start()
time.sleep(600)
"""


@ALONE
def test_cores_and_busiest_threads(tmp_path: Path, start_job: Start) -> None:
    start_job(*build_python_command(SPIN))
    rows = rows_of(tmp_path, "processes", 40, rank=-1)[20:]
    spent = np.diff(rows["cpu_ns"][[0, -1]])[0] / np.diff(rows["time_ns"][[0, -1]])[0]
    # Two threads that want a core each: what they do not get of it, they wait for.
    wanted = rows["cores_used"].mean() + rows["waiting_cores"].mean()
    assert 1.8 < wanted < 2.3
    assert abs(rows["cores_used"].mean() - spent) < 0.15
    assert set(rows["thread_count"].tolist()) == {43}
    assert rows["busy_threads"].max() <= 2
    if spent > 1.7:  # nobody else was busy
        assert np.median(rows["busy_threads"]) == 2
    threads = read_node_records(tmp_path, "threads")
    threads = threads[threads["time_ns"] >= rows["time_ns"][0]]
    assert set(threads["name"].tolist()) == {b"burner"}
    assert len(set(threads["tid"].tolist())) == 2
    assert threads["cores_used"].sum() / len(set(threads["time_ns"].tolist())) == pytest.approx(spent, abs=0.3)
    assert set(threads["processor"].tolist()) <= set(range(os.cpu_count() or 1))


def test_memory_is_what_the_process_has(tmp_path: Path, start_job: Start) -> None:
    code = """
import mmap, time
private = bytearray(64 << 20)
shared = mmap.mmap(-1, 32 << 20)
shared.write(b"x" * (32 << 20))
time.sleep(600)
"""
    start_job(*build_python_command(code))
    row = rows_of(tmp_path, "processes", 8, rank=-1)[-1]
    assert 96 << 20 < row["rss_bytes"] < 160 << 20
    assert 32 << 20 <= row["shared_bytes"] < 40 << 20
    assert row["locked_bytes"] == row["pinned_bytes"] == row["swap_bytes"] == 0


def test_the_host_is_sampled(tmp_path: Path, start_job: Start) -> None:
    start_job(*build_python_command(SLEEP))
    row = rows_of(tmp_path, "hosts", 3)[2]
    assert row["memory_total_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < row["memory_available_bytes"] < row["memory_total_bytes"]
    assert 0 <= row["cores_used"] <= (os.cpu_count() or 1) * 1.2
    assert 1 <= row["cores"] <= len(os.sched_getaffinity(0))
    (node,) = wait_for(lambda: read_node_events(tmp_path, "node"))
    assert node["memory_bytes"] == row["memory_total_bytes"]
    assert node["cores"] == row["cores"]
    assert (node["driver"] is None) == bool(node["gpu_notice"] and not node["gpus"])


def test_ten_thousand_threads_of_which_few_files_can_be_kept_open(tmp_path: Path) -> None:
    """Sampling goes on, slower; the job ends as it would have."""
    code = """
import threading, time
go = threading.Event()
threading.stack_size(64 << 10)
for _ in range(10_000): threading.Thread(target=go.wait, daemon=True).start()
time.sleep(5)
"""
    script = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
from zerotop_probe.outside.job.agent import run_in_foreground
sys.exit(run_in_foreground({str(tmp_path)!r}, [sys.executable, "-c", {code!r}]).exit_code)
"""
    done = subprocess.run(build_python_command(script), capture_output=True, check=False, timeout=120)
    if b"can't start new thread" in done.stderr:
        pytest.skip("this machine does not allow 10,000 threads")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert read_node_records(tmp_path, "processes")["thread_count"].max() == 10_001
    assert read_node_events(tmp_path, "sampler_error") == []


def test_a_rank_that_we_have_ourselves_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within an sbatch script every process carries a Slurm rank."""
    monkeypatch.setenv("SLURM_PROCID", "0")
    started = agent.launch_in_background(str(tmp_path), build_python_command("import time; time.sleep(1.5)"))
    wait_for(lambda: not started.is_alive())
    assert read_node_events(tmp_path, "rank_found") == []
    assert (read_node_records(tmp_path, "processes")["rank"] == -1).all()


@ALONE
def test_the_agent_itself_costs_little(tmp_path: Path, start_job: Start) -> None:
    """A guard against a busy loop, not a benchmark: see benchmarks/sampler_cost.py."""
    started = start_job(*build_python_command(SLEEP))
    rows_of(tmp_path, "processes", 5)
    clock = (~started.pid << 3) | 2
    before, began = time.clock_gettime_ns(clock), time.monotonic_ns()
    rows_of(tmp_path, "processes", len(read_node_records(tmp_path, "processes")) + 20)
    share = (time.clock_gettime_ns(clock) - before) / (time.monotonic_ns() - began)
    assert share < 0.2, f"{share:.1%} of a core, on {sys.version}"
