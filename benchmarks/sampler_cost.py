"""What sampling costs on a node with 8 rank-like processes of 200 threads each, beside psutil.

Real child processes: most of their threads sleep, ``--busy`` of each work for 1 % of the time. Three figures:

- our sampler of processes, threads and the host, writing its tables to a directory, in this process;
- the same facts read with psutil at the same rate and written nowhere, in this process, in turns with ours;
- a whole agent beside the same processes as a job: finding ranks, output, NVML where there is one, and all.

    python benchmarks/sampler_cost.py [--processes 8] [--threads 200] [--busy 2] [--seconds 5] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import psutil

from zerotop_probe.outside.agent import launch_in_background
from zerotop_probe.outside.cgroup import ControlGroup
from zerotop_probe.outside.control import read_facts, request_stop
from zerotop_probe.outside.hosts import HostSampler
from zerotop_probe.outside.proc import Process
from zerotop_probe.outside.processes import Member, ProcessSampler
from zerotop_probe.recording.writer import Identity

HERTZ = 10
TICKS_PER_HOST = 5

CHILD = """
import hashlib, sys, threading, time
def work():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)
        time.sleep(0.03)
threading.stack_size(64 << 10)
for number in range(int(sys.argv[1]) - 1):
    target, arguments = (work, ()) if number < int(sys.argv[2]) else (time.sleep, (1e6,))
    threading.Thread(target=target, args=arguments, daemon=True).start()
print("ready", flush=True)
time.sleep(1e6)
"""


def start_children(processes: int, threads: int, busy: int) -> list[subprocess.Popen[str]]:
    """Starts the processes and waits until all their threads run."""
    command = [sys.executable, "-c", CHILD, str(threads), str(busy)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    return children


LAUNCHER = """
import os, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "-c", *sys.argv[2:]], env={**os.environ, "RANK": str(rank)})
    for rank in range(int(sys.argv[1]))
]
for rank in ranks: rank.wait()
"""


def measure_agent(processes: int, threads: int, busy: int, seconds: float) -> float:
    """Share of a core that a whole agent used beside such a job."""
    with tempfile.TemporaryDirectory() as session:
        command = [sys.executable, "-c", LAUNCHER, *map(str, (processes, CHILD, threads, busy))]
        agent = launch_in_background(session, command, grace_s=(1.0, 1.0))
        while len(read_facts(session).ranks) < processes:
            time.sleep(0.1)
        time.sleep(3.0)  # all threads are started and known
        clock = (~agent.pid << 3) | 2  # the kernel's id of that process's processor clock
        before, began = time.clock_gettime_ns(clock), time.monotonic_ns()
        time.sleep(seconds)
        share = (time.clock_gettime_ns(clock) - before) / (time.monotonic_ns() - began)
        request_stop(session)
        while agent.alive():
            time.sleep(0.1)
    return share


def measure(sample: Callable[[int], object], seconds: float) -> tuple[float, float]:
    """Share of a core that sampling at 10 Hz used, and the median time of a sample in milliseconds."""
    times = []
    cpu_before, began = time.process_time_ns(), time.monotonic_ns()
    for tick in range(int(seconds * HERTZ)):
        before = time.perf_counter_ns()
        sample(tick)
        times.append(time.perf_counter_ns() - before)
        time.sleep(max(0.0, (tick + 1) / HERTZ - (time.monotonic_ns() - began) / 1e9))
    used = time.process_time_ns() - cpu_before
    return used / (time.monotonic_ns() - began), statistics.median(times) / 1e6


def ours(pids: list[int], folder: str) -> tuple[Callable[[int], object], Callable[[], object]]:
    """Our sampler of these processes and the host, and what closes it."""
    identity = Identity.of_this_process("node")
    processes = ProcessSampler(folder, identity)
    hosts = HostSampler(folder, identity, ControlGroup(pids[0]))
    members = [Member(process, rank) for rank, pid in enumerate(pids) if (process := Process.of(pid))]

    def sample(tick: int) -> None:
        time_ns = time.monotonic_ns()
        processes.sample(time_ns, tick, members)
        if tick % TICKS_PER_HOST == 0:
            hosts.sample(time_ns)

    return sample, processes.close


def with_psutil(pids: list[int]) -> Callable[[int], object]:
    """The same facts by psutil."""
    processes = [psutil.Process(pid) for pid in pids]

    def sample(tick: int) -> None:
        for process in processes:
            process.memory_info()
            process.cpu_times()
            process.threads()
        if tick % TICKS_PER_HOST == 0:
            psutil.virtual_memory()
            psutil.swap_memory()
            psutil.cpu_times()

    return sample


def main() -> None:
    """Prints both and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=200)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    children = start_children(options.processes, options.threads, options.busy)
    shares: dict[str, list[float]] = {"zerotop": [], "psutil": []}
    times: dict[str, list[float]] = {"zerotop": [], "psutil": []}
    try:
        pids = [child.pid for child in children]
        with tempfile.TemporaryDirectory() as folder:
            sample, close = ours(pids, folder)
            for _ in range(options.rounds):
                for name, body in (("zerotop", sample), ("psutil", with_psutil(pids))):
                    share, milliseconds = measure(body, options.seconds)
                    shares[name].append(share)
                    times[name].append(milliseconds)
            close()
    finally:
        for child in children:
            child.kill()
            child.communicate()
    what = f"{options.processes} processes x {options.threads} threads, {options.busy} of each at work"
    print(f"{what}, {HERTZ} Hz")
    for name in shares:
        share, milliseconds = statistics.median(shares[name]), statistics.median(times[name])
        print(f"  {name:8} {100 * share:6.2f} % of a core, {milliseconds:7.3f} ms a sample")
    agent = measure_agent(options.processes, options.threads, options.busy, options.seconds)
    ratio = statistics.median(shares["psutil"]) / statistics.median(shares["zerotop"])
    print(f"  ratio    {ratio:6.1f} x (psutil / zerotop)")
    print(f"  agent    {100 * agent:6.2f} % of a core, all included")


if __name__ == "__main__":
    main()
