"""The cost of sampling a node with 8 rank-like processes of 200 threads each, beside psutil, and with its GPUs.

Real child processes: most of their threads sleep, ``--busy`` of each work for 1 % of the time. The figures:

- our sampler of processes, threads and the host, writing its tables to a directory, in this process;
- the same facts read with psutil at the same rate and written nowhere, in this process, in turns with ours;
- our sampler of all GPUs of this machine, idle, and (where torch can) while bytes are copied both ways on each of them;
- a whole agent beside the same processes as a job: finding ranks, output, NVML where there is one, and all;
- where there are GPUs, the cost of each query, and from these and the agent's what 8 GPUs and 8 ranks would cost.

The same sum from what was measured on different machines. Without GPUs the agent takes 1.05 to 1.19 % of a core beside 8
silent ranks of 200 threads, and 1.35 to 1.41 % if it reads each rank at every tick, as it does with few ranks (in turns on
a virtual machine with 2 cores of an EPYC, where merely waking up costs 0.1 ms, 26 November 2026); writing the records of 8
ranks, as `draining_cost.py` measures it, takes 0.33 % more. On an H100, driver 580: 0.33 ms a look at both byte counters,
0.08 ms a list of processes, 0.02 ms a row. A second has for each GPU 10 rows, 1 list while memory in use stays as it is,
and a look at each direction, 2 within half a minute after bytes flowed, 4 while they flow. That is for 8 GPUs 0.5 % in a
job that does not offload, 0.9 % while bytes flow one way, 1.3 % both ways without pause: 1.9, 2.3 and 2.7 % of a core in
all.

    python benchmarks/sampler_cost.py [--processes 8] [--threads 200] [--busy 2] [--seconds 5] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from zerotop_probe.outside.job.agent import launch_in_background
from zerotop_probe.outside.job.job_control import read_facts, request_stop
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling import nvml, pcie
from zerotop_probe.outside.sampling.cgroup import ControlGroup
from zerotop_probe.outside.sampling.gpu_sampler import GpuSampler
from zerotop_probe.outside.sampling.host_sampler import HostSampler
from zerotop_probe.outside.sampling.process_sampler import ProcessSampler, SampledMember
from zerotop_probe.recording.writer import Identity

HERTZ = 10
TICKS_PER_HOST = 5
WHOLE_NODE = 8

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

LAUNCHER = """
import os, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "-c", *sys.argv[2:]], env={**os.environ, "RANK": str(rank)})
    for rank in range(int(sys.argv[1]))
]
for rank in ranks: rank.wait()
"""

# Copies 256 MiB to and from a GPU, both at once, again and again.
COPIER = """
import sys
import torch
device = torch.device("cuda", int(sys.argv[1]))
there = [torch.empty(256 << 20, dtype=torch.uint8, device=device) for _ in range(2)]
here = [torch.empty(256 << 20, dtype=torch.uint8).pin_memory() for _ in range(2)]
streams = [torch.cuda.Stream(device) for _ in range(2)]
print("ready", flush=True)
while True:
    with torch.cuda.stream(streams[0]): there[0].copy_(here[0], non_blocking=True)
    with torch.cuda.stream(streams[1]): here[1].copy_(there[1], non_blocking=True)
    torch.cuda.synchronize(device)
"""


@contextmanager
def start_programs(code: str, arguments: list[list[str]]) -> Iterator[list[subprocess.Popen[str]] | None]:
    """Start programs; yield them once all are ready, or None if one is not. Kill them at the end of the block."""
    command = [sys.executable, "-c", code]
    started = [
        subprocess.Popen([*command, *own], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for own in arguments
    ]
    try:
        ready = [child.stdout is not None and child.stdout.readline() == "ready\n" for child in started]
        yield started if all(ready) else None
    finally:
        for child in started:
            child.kill()
            child.communicate()


def measure_agent(processes: int, threads: int, busy: int, seconds: float) -> float:
    """Return the share of a core that a whole agent uses beside such a job."""
    with tempfile.TemporaryDirectory() as recording:
        command = [sys.executable, "-c", LAUNCHER, *map(str, (processes, CHILD, threads, busy))]
        agent = launch_in_background(recording, command, grace_s=(1.0, 1.0))
        while len(read_facts(recording).ranks) < processes:
            time.sleep(0.1)
        time.sleep(3.0)  # all threads are started and known
        clock = (~agent.pid << 3) | 2  # the kernel's id of that process's processor clock
        before, began = time.clock_gettime_ns(clock), time.monotonic_ns()
        time.sleep(seconds)
        share = (time.clock_gettime_ns(clock) - before) / (time.monotonic_ns() - began)
        request_stop(recording)
        while agent.is_alive():
            time.sleep(0.1)
    return share


def measure_sampler(sample: Callable[[int], object], seconds: float, hertz: int = HERTZ) -> tuple[float, float]:
    """Return the share of a core that sampling uses, and the median time of a sample in milliseconds."""
    times = []
    cpu_before, began = time.process_time_ns(), time.monotonic_ns()
    for tick in range(int(seconds * hertz)):
        before = time.perf_counter_ns()
        sample(tick)
        times.append(time.perf_counter_ns() - before)
        time.sleep(max(0.0, (tick + 1) / hertz - (time.monotonic_ns() - began) / 1e9))
    used = time.process_time_ns() - cpu_before
    return used / (time.monotonic_ns() - began), statistics.median(times) / 1e6


def make_our_sampler(pids: list[int], folder: str) -> tuple[Callable[[int], object], Callable[[], object]]:
    """Return our sampler of these processes and the host, and a function that closes it."""
    identity = Identity.for_this_process("node")
    processes = ProcessSampler(folder, identity, lambda *_, **__: None)
    hosts = HostSampler(folder, identity, ControlGroup(pids[0]))
    members = [SampledMember(process, rank) for rank, pid in enumerate(pids) if (process := ProcessHandle.from_pid(pid))]

    def sample_ours(tick: int) -> None:
        time_ns = time.monotonic_ns()
        processes.take_sample(time_ns, tick, members)
        if tick % TICKS_PER_HOST == 0:
            hosts.take_sample(time_ns)

    return sample_ours, processes.close


def with_psutil(pids: list[int]) -> Callable[[int], object]:
    """Return a sampler that reads the same figures with psutil."""
    processes = [psutil.Process(pid) for pid in pids]

    def sample_psutil(tick: int) -> None:
        for process in processes:
            process.memory_info()
            process.cpu_times()
            process.threads()
        if tick % TICKS_PER_HOST == 0:
            psutil.virtual_memory()
            psutil.swap_memory()
            psutil.cpu_times()

    return sample_psutil


def measure_gpus(seconds: float) -> float:
    """Return the share of a core that sampling all GPUs of this machine uses now."""
    with tempfile.TemporaryDirectory() as folder:
        identity = Identity.for_this_process("node")
        sampler = GpuSampler(folder, identity, on_seen=lambda seen: None, on_lost=print, on_neighbour=print)
        sampler.prepare_sampling()

        def half_tick(number: int) -> None:
            if sampler.is_due(number):
                sampler.take_sample(time.monotonic_ns(), number)

        share, _ = measure_sampler(half_tick, seconds, 2 * HERTZ)
        sampler.close()
    return share


def query_costs(devices: list[nvml.GpuDevice]) -> dict[str, float]:
    """Return the processor seconds of each query of a GPU, the mean over all GPUs."""

    def measure_cost(body: Callable[[nvml.GpuDevice], object], times: int = 100) -> float:
        before = time.thread_time_ns()
        for _ in range(times):
            for device in devices:
                body(device)
        return (time.thread_time_ns() - before) / 1e9 / times / len(devices)

    for device in devices:
        device.read_row(0, 0)
    plain = measure_cost(lambda device: device.read_row(0, 1))
    return {
        "row": plain,
        "what changes slowly": measure_cost(lambda device: device.read_row(0, 0)) - plain,
        "look at the byte counters, both ways": statistics.mean(device.measure_read_cost() for device in devices),
        "list of processes": measure_cost(lambda device: device.read_process_rows(0, refresh=True)),
    }


def print_gpus(seconds: float, agent: float) -> None:
    """Print the cost of sampling this machine's GPUs, and the estimate for a whole node."""
    seen, devices = nvml.discover_gpus()
    if not devices:
        print(f"  GPUs     {seen.notice}")
        return
    count = len(devices)
    print(f"  GPUs     {100 * (idle := measure_gpus(seconds)) / count:6.2f} % of a core for each of {count}, idle")
    with start_programs(COPIER, [[str(index)] for index in range(count)]) as copiers:
        if copiers:
            busy = measure_gpus(seconds)
            print(f"           {100 * busy / count:6.2f} % of a core for each of {count}, bytes flowing both ways")
    costs = query_costs(devices)
    for name, cost in costs.items():
        print(f"           {1e6 * cost:6.0f} us a {name}")
    row, slow, look, processes = costs.values()
    pace = pcie.choose_pace(WHOLE_NODE, look)
    rest = agent - idle
    for what, looks in _looks_a_second(pace).items():
        gpus = WHOLE_NODE * (HERTZ * row + 2 * slow + looks * look + processes)
        print(f"           {100 * (gpus + rest):6.2f} % of a core for {WHOLE_NODE} GPUs and the ranks: {what}")


def _looks_a_second(pace: pcie.ReadPace) -> dict[str, float]:
    """Return the reads of a GPU's two byte counters per second, by the traffic; a read of one of them counts half."""
    idle, flowing = 20 / pace.idle_ticks, 20 / pace.flowing_ticks
    return {"nothing flows": idle, "bytes flow one way": (idle + flowing) / 2, "both ways": flowing}


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=200)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    shares: dict[str, list[float]] = {"zerotop": [], "psutil": []}
    times: dict[str, list[float]] = {"zerotop": [], "psutil": []}
    arguments = [[str(options.threads), str(options.busy)]] * options.processes
    with start_programs(CHILD, arguments) as started, tempfile.TemporaryDirectory() as folder:
        assert started is not None
        pids = [child.pid for child in started]
        sample, close = make_our_sampler(pids, folder)
        for _ in range(options.rounds):
            for name, body in (("zerotop", sample), ("psutil", with_psutil(pids))):
                share, milliseconds = measure_sampler(body, options.seconds)
                shares[name].append(share)
                times[name].append(milliseconds)
        close()
    what = f"{options.processes} processes x {options.threads} threads, {options.busy} of each at work"
    print(f"{what}, {HERTZ} Hz")
    for name in shares:
        share, milliseconds = statistics.median(shares[name]), statistics.median(times[name])
        print(f"  {name:8} {100 * share:6.2f} % of a core, {milliseconds:7.3f} ms a sample")
    ratio = statistics.median(shares["psutil"]) / statistics.median(shares["zerotop"])
    print(f"  ratio    {ratio:6.1f} x (psutil / zerotop)")
    agent = measure_agent(options.processes, options.threads, options.busy, options.seconds)
    print(f"  agent    {100 * agent:6.2f} % of a core, all included")
    print_gpus(options.seconds, agent)


if __name__ == "__main__":
    main()
