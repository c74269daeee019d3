"""What the viewer itself costs: processor time, memory, frames, and how late a fact is on screen.

The program runs in a real pseudo-terminal on a made-up job with 8 ranks and 8 GPUs in which everything
changes all the time, which is the worst case. Reading a recording is not part of it. Every EVENT_S a fact
becomes known; when its mark leaves the terminal's other end, it is on screen.

    python benchmarks/viewer_cost.py [--seconds 20] [--size 120x40 ...]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_S = 4.0
EVENT_S = 0.0371  # not a divisor of the viewer's own rhythm


def child(seconds: float, report: int) -> None:
    """The viewer; writes its figures as one JSON line to the descriptor ``report``."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from fake_source import FakeSource, offload_story
    from zerotop.analysis.view import LiveView
    from zerotop.ui.app import ZerotopApp

    class Marked(FakeSource):
        """The last output line names the last event that is known."""

        def view(self, cursor_ns: int | None) -> LiveView:
            view = super().view(cursor_ns)
            return replace(view, output=(*view.output, f"event {int(time.monotonic() / EVENT_S):012d}"))

    start = time.monotonic()
    source = Marked(offload_story(), lambda: 60.0 + time.monotonic() - start)
    app = ZerotopApp(source)
    figures: dict[str, float] = {}

    def begin() -> None:
        figures.update(cpu=time.process_time(), at=time.monotonic(), frames=source.views)

    def end() -> None:
        passed = time.monotonic() - figures["at"]
        status = Path("/proc/self/status").read_text()
        result = {
            "cpu_percent": 100 * (time.process_time() - figures["cpu"]) / passed,
            "fps": (source.views - figures["frames"]) / passed,
            "rss_mb": int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) * 1024 / 1e6,
        }
        os.write(report, json.dumps(result).encode())
        app.exit()

    app.call_later(app.set_timer, WARM_UP_S, begin)
    app.call_later(app.set_timer, WARM_UP_S + seconds, end)
    app.run()


def measure(width: int, height: int, seconds: float) -> dict[str, float]:
    """Runs the viewer in a pseudo-terminal of this size and adds what its other end saw."""
    receive, send = os.pipe()
    pid, terminal = pty.fork()
    if pid == 0:
        os.set_inheritable(send, True)
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
        command = [sys.executable, __file__, "--child", str(seconds), str(send)]
        time.sleep(0.2)  # until the size is set
        os.execve(sys.executable, command, environment)
    os.close(send)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    seen, written, began = _watch(terminal, time.monotonic() + WARM_UP_S)
    os.waitpid(pid, 0)
    figures: dict[str, float] = json.loads(os.read(receive, 4096))
    os.close(receive)
    os.close(terminal)
    return {**figures, **_lateness(seen), "kb_per_s": written / 1e3 / (time.monotonic() - began)}


def _watch(terminal: int, warm: float) -> tuple[list[tuple[int, float]], int, float]:
    """((event, when its mark was seen) in order, bytes written, since when), after the warm-up."""
    seen: list[tuple[int, float]] = []
    tail, written = b"", 0
    while True:
        select.select([terminal], [], [])
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            return seen, written, warm
        now = time.monotonic()
        marks = [int(mark) for mark in re.findall(rb"event (\d{12})", tail + data)]
        tail = (tail + data)[-18:]
        if now > warm:
            written += len(data)
            seen.extend((mark, now) for mark in marks[-1:])


def _lateness(seen: list[tuple[int, float]]) -> dict[str, float]:
    """How late events were on screen: each counts when it or a later one was seen first."""
    late: list[float] = []
    last = seen[0][0] if seen else 0
    for event, when in seen:
        late.extend(when - number * EVENT_S for number in range(last + 1, event + 1))
        last = max(last, event)
    late.sort()
    if not late:
        return {}
    return {"late_p50_ms": 1000 * late[len(late) // 2], "late_p99_ms": 1000 * late[int(len(late) * 0.99)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--size", nargs="*", default=["80x24", "120x40", "200x50"])
    parser.add_argument("--child", nargs=2, metavar=("SECONDS", "FD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(float(arguments.child[0]), int(arguments.child[1]))
        return
    print(f"{'size':>8} {'CPU %':>7} {'RSS MB':>7} {'fps':>5} {'late p50 ms':>12} {'p99':>6} {'kB/s':>6}")
    for size in arguments.size:
        width, height = (int(part) for part in size.split("x"))
        figures = measure(width, height, arguments.seconds)
        print(
            f"{size:>8} {figures['cpu_percent']:7.1f} {figures['rss_mb']:7.0f} {figures['fps']:5.1f} "
            f"{figures['late_p50_ms']:12.0f} {figures['late_p99_ms']:6.0f} {figures['kb_per_s']:6.1f}"
        )


if __name__ == "__main__":
    main()
