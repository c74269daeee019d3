"""What watching costs beside programs that are liked: processor time of zerotop, nvitop and memray's live view.

Each runs in a real pseudo-terminal of the same size, one after another: zerotop on a recording of 8 ranks and 8 GPUs that
grows, nvitop on this machine's GPUs (4 pictures a second too; left out where there are none), memray on a loop that
allocates. Only the process on the terminal counts, not what it watches. nvitop samples too, which for zerotop another
process does: see ``sampler_cost.py`` for that.

    pip install -e '.[bench]'; python benchmarks/peers.py [--seconds 20] [--size 200x50] [--ranks 8]
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from viewer_cost import WRITER, Terminal, attach, machine_s

LOOP = "import time\nkept = []\nwhile True:\n    kept = [bytearray(1000) for _ in range(1000)]\n    time.sleep(0.02)\n"
PEERS = {
    "nvitop": ["-m", "nvitop", "--monitor", "full", "--interval", "0.25"],
    "memray": ["-m", "memray", "run", "--live", "--quiet"],
}


def share(command: list[str], options: argparse.Namespace) -> str:
    """One line of figures."""
    width, height = (int(part) for part in options.size.split("x"))
    terminal = Terminal(command, width, height)
    try:
        terminal.watch(options.warm_up)
        before, machine, since, written = terminal.processor_s(), machine_s(), time.monotonic(), terminal.written
        terminal.watch(options.seconds)
        passed = time.monotonic() - since
        own = (terminal.processor_s() - before) / passed
        others = (machine_s() - machine) / passed - own
        rate = (terminal.written - written) / 1e3 / passed
        memory = terminal.memory_mb("VmRSS")
    except OSError:
        return "ended by itself: nothing to watch here?"
    finally:
        terminal.close()
    return f"{own:7.1%} {others:7.0%} {memory:8.0f} {rate:8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--size", default="200x50")
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    print(f"{'':>10} {'1 core':>7} {'others':>7} {'RSS MB':>8} {'kB/s':>8}")
    with tempfile.TemporaryDirectory() as folder:
        path, loop = Path(folder) / "session", Path(folder) / "loop.py"
        loop.write_text(LOOP)
        writer = subprocess.Popen(
            [sys.executable, str(WRITER), str(path), "--ranks", str(options.ranks)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline()
            time.sleep(1.0)
            print(f"{'zerotop':>10} {share(attach(path), options)}", flush=True)
        finally:
            writer.kill()
            writer.wait()
        for name, arguments in PEERS.items():
            if importlib.util.find_spec(name) is None:
                print(f"{name:>10} is not installed")
                continue
            target = [str(loop)] if name == "memray" else []
            print(f"{name:>10} {share([sys.executable, *arguments, *target], options)}", flush=True)


if __name__ == "__main__":
    main()
