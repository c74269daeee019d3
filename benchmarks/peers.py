"""The cost of watching beside popular programs: processor time of zerotop, nvitop and memray's live view.

Each runs in a real pseudo-terminal of the same size, one after another, ``--rounds`` times: zerotop on a recording that
grows, of as many ranks and GPUs as this machine has GPUs; nvitop on those GPUs, with a process on each that holds memory and
works as a rank does; memray on a loop that allocates. Where there is no NVIDIA driver nvitop is left out.

Rates: zerotop draws four and a half times a second. nvitop's loop draws five times a second whatever it is told, and reads
its devices once a second and processes every two seconds; ``--interval 0.25``, its shortest, has it read all of them four
times a second, which is the same rate. Both figures are printed. memray's live view reads once a second.

Only the process on the terminal counts, not what it watches. nvitop samples too, which for zerotop another process does: see
``sampler_cost.py`` for that.

    pip install -e '.[bench]'; python benchmarks/peers.py [--seconds 20] [--rounds 2] [--size 120x40] [--ranks N]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from viewer_cost import WRITER, Terminal, build_attach_command, read_machine_seconds

LOOP = "import time\nkept = []\nwhile True:\n    kept = [bytearray(1000) for _ in range(1000)]\n    time.sleep(0.02)\n"
# A context and memory on one GPU, with the driver alone, and a little work: what a rank is to who looks from outside.
HOLDER = """
import ctypes, sys, time
cuda, context, held = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert not cuda.cuInit(0)
assert not cuda.cuCtxCreate_v2(ctypes.byref(context), 0, int(sys.argv[1]))
assert not cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(4 << 30))
print("holding", flush=True)
while True:
    assert not cuda.cuMemsetD8_v2(held, 1, ctypes.c_size_t(1 << 30))
    sum(range(10000))
    time.sleep(0.02)
"""
OUR_RANKS = 8  # where there are no GPUs


def count_gpus() -> int:
    """Return the number of GPUs of this machine, 0 without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # no package, no driver or no right to ask it: nothing to compare with
        return 0


@contextlib.contextmanager
def start_programs(commands: list[list[str]]) -> Iterator[None]:
    """Start programs; yield once each has printed a line, and kill them at the end of the block."""
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        for process in started:
            assert process.stdout is not None
            if not process.stdout.readline():
                sys.exit(f"{process.args!r} ended by itself")
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure_program(command: list[str], options: argparse.Namespace) -> tuple[float, float, float, float] | None:
    """Return the figures of a program's row, or None if the program ended.

    They are its processor seconds a minute, those of all other processes, its memory in MB and its output in kB/s."""
    width, height = (int(part) for part in options.size.split("x"))
    terminal = Terminal(command, width, height)
    try:
        terminal.collect_facts(options.warm_up)
        before, machine, since, written = terminal.processor_s(), read_machine_seconds(), time.monotonic(), terminal.written
        terminal.collect_facts(options.seconds)
        passed = time.monotonic() - since
        own = (terminal.processor_s() - before) / passed
        others = (read_machine_seconds() - machine) / passed - own
        return 60 * own, 60 * others, terminal.memory_mb("VmRSS"), (terminal.written - written) / 1e3 / passed
    except OSError:
        return None
    finally:
        terminal.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--ranks", type=int, help="of the recording; otherwise as many as there are GPUs")
    options = parser.parse_args()
    devices = count_gpus()
    ranks = options.ranks or devices or OUR_RANKS
    nvitop = [sys.executable, "-m", "nvitop", "--monitor", "full"]
    with tempfile.TemporaryDirectory() as folder:
        loop = Path(folder) / "loop.py"
        loop.write_text(LOOP)
        holders = [[sys.executable, "-c", HOLDER, str(device)] for device in range(devices)]
        print(f"{options.size}, {devices} GPUs, {ranks} ranks in the recording; seconds of processor time a minute")
        print(f"{'':>16} {'own':>7} {'others':>7} {'RSS MB':>8} {'kB/s':>8}")
        told: dict[str, list[float]] = {}
        for number in range(options.rounds):
            path = Path(folder) / f"recording{number}"
            programs = {
                "zerotop": (build_attach_command(path), [[sys.executable, str(WRITER), str(path), "--ranks", str(ranks)]]),
                "nvitop -i 0.25": ([*nvitop, "--interval", "0.25"], holders),
                "nvitop": (nvitop, holders),
                "memray": ([sys.executable, "-m", "memray", "run", "--live", "--quiet", str(loop)], []),
            }
            for name, (command, beside) in programs.items():
                package = name.partition(" ")[0]
                if package == "nvitop" and not devices:
                    continue
                if importlib.util.find_spec(package) is None:
                    print(f"{name:>16} is not installed")
                    continue
                with start_programs(beside):
                    found = measure_program(command, options)
                if found is None:
                    print(f"{name:>16} ended by itself")
                    continue
                told.setdefault(name, []).append(found[0])
                print(f"{name:>16} {found[0]:7.2f} {found[1]:7.1f} {found[2]:8.0f} {found[3]:8.1f}", flush=True)
    zerotop = statistics.median(told.get("zerotop", [float("nan")]))
    for name, figures in told.items():
        if name != "zerotop":
            print(f"zerotop's is {zerotop / statistics.median(figures):.2f} of that of {name}")


if __name__ == "__main__":
    main()
