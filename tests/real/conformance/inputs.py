"""Standard input."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

from conformance.console import interactive_shell
from conformance.experiment import make_experiment
from conformance.places import Place, read_soon, wait_until


@make_experiment(
    "input from a pipe is read to its end",
    "binary input arrives byte for byte",
    "input from a file",
    "input from /dev/null",
    "input that the caller has closed",
    "input from a here-document",
)
def inputs_of_each_kind(place: Place) -> Iterator[str]:
    yield f"{len(place.run_job('cat', typed=b'x' * 300_000).output):,} bytes"
    everything = bytes(range(256)) * 10
    yield "the same bytes" if place.run_job("cat", typed=everything).output == everything else "others"
    (place.work / "input").write_text("one\ntwo\nthree\n")
    yield f"{place.run_shell('Z wc -l < input').output.decode().strip()} lines"
    yield f"{len(place.run_shell('Z cat < /dev/null').output)} bytes"
    closed = place.run_shell("Z bash -c '[ -e /proc/self/fd/0 ] && echo open || echo closed; exit 4' <&-")
    yield f"{closed.output.decode().strip()}, {closed.ending}"
    yield place.run_shell("Z cat <<END\nword\nEND").output.decode().strip()


@make_experiment("what a job leaves of a file, the next command reads", "what it leaves of a pipe too")
def partly_read(place: Place) -> Iterator[str]:
    (place.work / "input").write_text("one\ntwo\nthree\n")
    both = "{ Z bash -c 'read x; echo job $x'; echo next $(cat); }"
    for script in (f"{both} < input", f"cat input | {both}"):
        yield place.run_shell(script).output.decode().replace("\n", " ").strip()


@make_experiment("input that comes late is waited for", "a job that reads nothing ends while its input stays open")
def observe_late_input(place: Place) -> Iterator[str]:
    with place.start_job("bash", "-c", "echo asks; read x; echo got $x", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        first = read_soon(process.stdout, 5)
        process.stdin.write(b"word\n")
        process.stdin.flush()
        yield f"{first.decode().strip()}, {read_soon(process.stdout, 9).decode().strip()}"
    reading, writing = os.pipe()
    with place.start_job("true", stdin=reading) as process:
        ended = wait_until(lambda: process.poll() is not None, 10)
        yield "ends" if ended else "waits"
    os.close(reading)
    os.close(writing)


@make_experiment(
    "what a job in the background prints before it reads from the terminal",
    "and that it then reads",
    "and after fg",
)
def from_a_terminal_in_background(place: Place) -> Iterator[str]:
    with interactive_shell(place) as shell:
        shell.type_keys(place.fill_script("Z bash -c 'echo re\"\"ady; read x; echo got $x' &\n").encode())
        yield "is seen" if shell.wait_for_pattern(rb"ready\r", 3) else "is not seen"
        for _ in range(50):
            shell.type_keys(b"jobs\n")
            if shell.wait_for_pattern(rb"Stopped", 0.1):
                break
        yield "stopped" if b"Stopped" in shell.output else "not stopped"
        shell.type_keys(b"fg\n")
        time.sleep(0.1)
        shell.type_keys(b"word\n")
        yield "it reads" if shell.wait_for_pattern(rb"got word\r", 5) else "it does not read"
