"""The delay until the demo shows its first step: the output in a terminal, against the end of the step in the recording.

Starts ``zerotop demo`` in a terminal of its own, as ``make demo`` does, and prints the delays of the first steps that were
drawn, on a GPU also those of the first GPU's row. Needs no peer: both times are of one clock.
"""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import sys
import tempfile
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pyte

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording

STEPS = 6
ROWS, COLUMNS = 40, 120


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        process, master = pty.fork()
        if process == 0:
            os.environ.update(TERM="xterm-256color", LANG="C.UTF-8", XDG_STATE_HOME=folder)
            ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            os.execv(sys.executable, [sys.executable, "-m", "zerotop", "demo", "--steps", str(STEPS)])
        drawn, gpu_ns = read_times(master)
        os.waitpid(process, 0)
        (recording,) = Path(folder, "zerotop", "sessions").iterdir()
        ends = RecordingSource(Recording.open(recording)).rank_steps[0].recorded_steps["end_unix_ns"]
        for number, shown_ns in sorted(drawn.items()):
            print(f"step {number}: shown {(shown_ns - int(ends[number - 1])) / 1e9:.2f} s after its end")
        print(f"GPU: shown {(gpu_ns - int(ends[0])) / 1e9:+.2f} s from the end of the first step" if gpu_ns else "no GPU")


def read_times(master: int) -> tuple[dict[int, int], int]:
    """Return when each number of finished steps was first drawn, and the first GPU's row (0: never), in unix ns."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    drawn: dict[int, int] = {}
    gpu_ns = 0
    leave_at = float("inf")
    while True:
        if select.select([master], [], [], 0.05)[0]:
            try:
                stream.feed(os.read(master, 1 << 16))
            except OSError:
                return drawn, gpu_ns
        text = "\n".join(screen.display)
        if (match := re.search(rf"\b(\d+)/{STEPS} steps", text)) is not None and int(match[1]):
            drawn.setdefault(int(match[1]), time.time_ns())
        if not gpu_ns and re.search(r"GPU 0 .*\d", text):
            gpu_ns = time.time_ns()
        if "EXIT 0" in text and leave_at == float("inf"):
            leave_at = time.monotonic() + 1.0
        if time.monotonic() > leave_at:
            os.write(master, b"q")
            leave_at = time.monotonic() + 1.0


if __name__ == "__main__":
    main()
