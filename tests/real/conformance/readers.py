"""Readers of the output that are slow, stop or leave."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress

from conformance.experiment import make_experiment
from conformance.places import Place, describe_ending, read_soon, small_python, summarize_observations, wait_until

# Prints, after each write, how many bytes it has written so far.
WRITER = """
import os
written = 0
while written < 1 << 28:
    written += os.write(1, b"x" * 65536)
    with open("written.new", "w") as file: file.write(str(written))
    os.replace("written.new", "written")
"""


def read_written(place: Place) -> int:
    """Return how many bytes WRITER has written."""
    with suppress(OSError):
        return int((place.work / "written").read_text())
    return 0


def wait_while_growing(place: Place, seconds: float = 6.0) -> int:
    """Return how many bytes were written once that has not changed for half a second, or after some seconds."""
    deadline, size, since = time.monotonic() + seconds, -1, time.monotonic()
    while time.monotonic() < deadline and (time.monotonic() - since < 0.5 or size == 0):
        if read_written(place) != size:
            size, since = read_written(place), time.monotonic()
        time.sleep(0.02)
    return size


@make_experiment(
    "yes | head -1", "and how soon it ends", "a job that prints now and then, when its reader has left", alone=True
)
def observe_closed_pipes(place: Place) -> Iterator[str]:
    done = place.run_shell("Z yes | head -1; echo ${PIPESTATUS[@]}")
    yield done.output.decode().replace("\n", " ").strip()
    yield "at once" if done.seconds < 5 else f"after {done.seconds:.0f} s"
    done = place.run_shell("Z bash -c 'while echo word; do sleep 0.05; done; exit 8' | head -1; echo ${PIPESTATUS[@]}")
    yield done.output.decode().replace("\n", " ").strip()


@make_experiment("a reader that has left before the job starts, 4 times")
def observe_missing_readers(place: Place) -> Iterator[str]:
    script = "Z bash -c 'exit 7' | true; echo exit ${PIPESTATUS[0]}"
    seen = [place.run_shell(script).output.decode().strip() for _ in range(4)]
    yield summarize_observations([(str(number), ending) for number, ending in enumerate(seen)], "exit 7")


@make_experiment("a job that ignores SIGPIPE, when its reader has left", "a Python job, when its reader has left")
def observe_handled_signals(place: Place) -> Iterator[str]:
    for ignoring in (True, False):
        code = """
import os, signal, sys, time
if {}: signal.signal(signal.SIGPIPE, signal.SIG_IGN)
try:
    for _ in range(400): print("word", flush=True); time.sleep(0.01)
except BrokenPipeError:
    os.write(2, b"told")
    os._exit(5)
"""
        with place.start_job(*small_python(code.format(ignoring))) as process:
            assert process.stdout is not None
            read_soon(process.stdout, 5)
            process.stdout.close()
            errors = read_soon(process.stderr, 4).decode()
            wait_until(lambda: process.poll() is not None)
            yield f"{errors if errors == 'told' else 'not told'}, {describe_ending(process.returncode)}"


@make_experiment(
    "a reader that reads nothing stops the job within 2 MiB",
    "a reader that goes on lets the job go on",
    "a reader that leaves then ends the job",
    "SIGTERM to a job whose reader reads nothing",
    "and once its reader has read the rest",
)
def observe_slow_readers(place: Place) -> Iterator[str]:
    with place.start_job(*small_python(WRITER)) as process:
        assert process.stdout is not None
        before = wait_while_growing(place)
        yield "yes" if 0 < before <= 2 << 20 else f"no, {before >> 20} MiB are written"
        read_soon(process.stdout, 2 << 20)
        after = wait_while_growing(place)
        yield "yes" if after - before >= 1 << 20 else "no"
        process.stdout.close()
        ended = wait_until(lambda: process.poll() is not None, 8)
        yield describe_ending(process.returncode) if ended else "it goes on"
    with place.start_job(*small_python(WRITER)) as process:
        assert process.stdout is not None
        wait_while_growing(place)
        process.terminate()
        has_ended = wait_until(lambda: process.poll() is not None, 10)
        yield "ends" if has_ended else "waits for its reader"
        while os.read(process.stdout.fileno(), 1 << 16):
            pass
        wait_until(lambda: process.poll() is not None)
        yield describe_ending(process.returncode)


@make_experiment("a job that closes its stdout and goes on: its reader sees the end", "and the job ends as it wants")
def closed_by_the_job(place: Place) -> Iterator[str]:
    with place.start_job("bash", "-c", "echo word; exec >&-; until [ -e end ]; do sleep 0.02; done; exit 6") as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        received: list[bytes] = []

        def has_ended() -> bool:
            with suppress(BlockingIOError):
                received.append(os.read(process.stdout.fileno(), 100))  # type: ignore[union-attr]
            return bool(received) and received[-1] == b""

        yield "at once" if wait_until(has_ended, 4) else "only when the job ends"
        (place.work / "end").touch()
        wait_until(lambda: process.poll() is not None)
        yield describe_ending(process.returncode)


@make_experiment("a job that waits for its reader to leave is told (poll)")
def observe_polling(place: Place) -> Iterator[str]:
    code = """
import os, select
waiting = select.poll()
waiting.register(1, 0)
print("word", flush=True)
os._exit(5 if waiting.poll(5000) else 6)
"""
    with place.start_job(*small_python(code)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        wait_until(lambda: process.poll() is not None)
        yield "told" if process.returncode == 5 else "not told"
