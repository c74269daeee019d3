"""The cost of the viewer with 1,024 ranks on 128 nodes, and the time until a key answers while their records come in.

``zerotop attach`` runs in a real pseudo-terminal on a recording that another process writes meanwhile with the real writers:
ten samples a second of every rank and GPU, a step of each rank in a few seconds, a progress bar that never rests. Processor
time and memory are the kernel's figures for the viewer's process. A key has answered when what it does is drawn: the space
bar halts the picture, ``f`` lets it go on.

"others" is what everything else on the machine used meanwhile, the writer and this program included.

    python benchmarks/many_ranks.py [--seconds 20] [--warm-up 20] [--ranks 1024] [--hosts 128] [--screens 1 6]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from viewer_cost import WRITER, Terminal, build_attach_command, read_machine_seconds

KEYS = 20  # how often each is pressed
LONGEST_S = 5.0


def answers_ms(terminal: Terminal) -> list[float]:
    """Return the milliseconds until each of some keys was answered."""
    found: list[float] = []
    for _ in range(KEYS):
        for key, answer in ((b" ", b"PAUSED"), (b"f", b"LIVE")):
            found.append(terminal.measure_key(key, answer, LONGEST_S) * 1e3)
            terminal.collect_facts(0.13)
    return found


def measure_screen(terminal: Terminal, screen: str, options: argparse.Namespace) -> str:
    """Return a line of figures for a screen, named by its key."""
    terminal.measure_key(screen.encode(), b"\x1b", 1.0)
    terminal.collect_facts(3.0)
    before, machine, since = terminal.processor_s(), read_machine_seconds(), time.monotonic()
    terminal.collect_facts(options.seconds)
    passed = time.monotonic() - since
    share = (terminal.processor_s() - before) / passed
    others = (read_machine_seconds() - machine) / passed - share
    memory = terminal.memory_mb("VmRSS"), terminal.memory_mb("RssAnon")
    answers = answers_ms(terminal)
    return (
        f"{screen:>6} {share:7.1%} {others:7.0%} {memory[0]:8.0f} {memory[1]:8.0f} {statistics.median(answers):9.0f}"
        f" {statistics.quantiles(answers, n=20)[-1]:6.0f} {max(answers):6.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=128)
    parser.add_argument("--slower", type=float, default=8.0, help="a step takes 0.42 s times this")
    parser.add_argument("--size", default="200x50")
    parser.add_argument("--screens", nargs="*", default=["1"])
    options = parser.parse_args()
    width, height = (int(part) for part in options.size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        command = [sys.executable, str(WRITER), str(path), "--hertz", "10", "--slower", str(options.slower)]
        command += ["--ranks", str(options.ranks), "--hosts", str(options.hosts)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline()
        time.sleep(15.0)
        terminal = Terminal(build_attach_command(path), width, height)
        try:
            opened = terminal.measure_key(b"", b"LIVE", 60.0)
            terminal.collect_facts(options.warm_up)
            print(f"{options.ranks} ranks on {options.hosts} nodes, {options.size}; first picture after {opened:.1f} s")
            print("screen  1 core  others   RSS MB  anon MB  key p50 ms  p95  worst")
            for screen in options.screens:
                print(measure_screen(terminal, screen, options), flush=True)
        finally:
            terminal.close()
            writer.kill()
            writer.wait()


if __name__ == "__main__":
    main()
