"""Wrappers, shells and schedulers around the job."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from conformance.console import open_console
from conformance.experiment import make_experiment
from conformance.places import Place, small_python, wait_until

from .interruptions import WAITING, await_ready, has_ended, is_running


@make_experiment(
    "timeout 1, before and after: exit code",
    "timeout 1: what is left",
    "timeout -s INT 1 with a job that saves for a moment",
    "timeout -s KILL 1",
)
def observe_timeouts(place: Place) -> Iterator[str]:
    outer = place.run_shell("timeout 1 Z sleep 20; echo $?").output.decode().strip()
    left = place.count_left()
    place.end_everything()
    inner = place.run_shell("Z timeout 1 sleep 20; echo $?").output.decode().strip()
    yield f"{outer} and {inner}"
    yield left
    # A timeout whose time is over for SIGALRM ends what it runs as soon as that is ready. It sends the signal twice, to the
    # process and to the group, which are one delivery where both have arrived before the first is handled.
    save = """
import os, signal, time
try:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    os.kill(int(open("pid").read()), signal.SIGALRM)
    while signal.SIGINT not in signal.sigpending(): time.sleep(0.01)
    time.sleep(0.5)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    time.sleep(20)
except KeyboardInterrupt:
    try:
        time.sleep(0.5)
        print("saved")
    except KeyboardInterrupt: print("interrupted while saving")
"""
    (place.work / "save").write_text(save)
    yield (
        place.run_shell("bash -c 'echo $$ > pid; exec timeout -s INT 60 Z python -S -E save'; echo $?")
        .output.decode()
        .replace("\n", ", ")
        .strip(", ")
    )
    yield place.run_shell("timeout -s KILL 1 Z sleep 20; echo $?").output.decode().strip()


@make_experiment(
    "nohup before, a hangup of the terminal", "and nohup.out", "nohup after, a hangup of the terminal", "and nohup.out then"
)
def observe_hangups(place: Place) -> Iterator[str]:
    (place.work / "job").write_text(f"print('word', flush=True)\n{WAITING[-1]}".replace("15", "2"))
    for script in ("nohup Z python -S -E job", "Z nohup python -S -E job"):
        with open_console(place, "bash", "-c", place.fill_script(f"{script}; exit")) as console:
            pid = await_ready(place)
            console.hang_up()
            wait_until(has_ended, 0.7, pid)
            yield "the job goes on" if is_running(pid) else "the job has ended"
            wait_until(has_ended, 8, pid)
        kept = place.work / "nohup.out"
        yield "has the output" if kept.exists() and "word" in kept.read_text() else "has not the output"
        kept.unlink(missing_ok=True)


@make_experiment(
    "env VARIABLE=value before",
    "stdbuf -oL before",
    "setsid --wait before",
    "exec in a script",
    "xargs",
    "process substitution",
    "in the middle of a pipeline, with pipefail",
    "&& and ||",
    "in the background, then wait",
    "script(1) records it on a terminal",
    "a lock that the caller holds in a descriptor is free afterwards",
    "time counts the job's CPU seconds",
)
def observe_shells(place: Place) -> Iterator[str]:
    def run_script(script: str) -> str:
        done = place.run_shell(script)
        return ", ".join((*done.output.decode().replace("\r", "").splitlines(), done.ending))

    yield run_script("env WORD=value Z bash -c 'echo $WORD'")
    yield run_script("stdbuf -oL Z bash -c 'echo $_STDBUF_O'")
    yield run_script("setsid --wait Z bash -c 'echo word; exit 3'")
    yield run_script("exec Z bash -c 'echo word; exit 3'")
    yield run_script("printf '1\\n2\\n' | xargs Z echo got")
    yield run_script("Z cat <(echo word)")
    yield run_script(
        "set -o pipefail; echo word | Z tr a-z A-Z | cat; echo $?; echo x | Z bash -c 'cat; exit 3' | cat; echo $?"
    )
    yield run_script("Z false && echo yes || echo no")
    yield run_script("Z bash -c 'sleep 0.2; exit 7' & wait $!; echo $?")
    yield run_script("script -q -e -c \"Z bash -c 'echo word; exit 3'\" /dev/null")
    yield run_script("exec 9> lock; flock 9; Z true; flock 9 -c true; exec 9>&-; flock -n lock echo free")
    burn = "import time\nwhile time.process_time() < 2: pass"
    (place.work / "burn").write_text(burn)
    code = "TIMEFORMAT='%U %S'; time Z python -S -E burn"
    seconds = sum(map(float, place.run_shell(code).errors.split()[-2:]))
    yield "yes" if seconds >= 1.9 else "no"  # more than zerotop itself takes


@make_experiment("a job that stops at a slow save when a scheduler ends it (SIGTERM, then SIGKILL after 2 s)")
def observe_scheduler(place: Place) -> Iterator[str]:
    code = """
import signal, sys, time
def save(*_): time.sleep(0.7); print("saved", flush=True); sys.exit(3)
signal.signal(signal.SIGTERM, save)
open("ready", "w").write("1")
time.sleep(20)
"""
    with place.start_job(*small_python(code)) as process:
        await_ready(place)
        process.send_signal(signal.SIGTERM)
        if not wait_until(lambda: process.poll() is not None, 8):
            process.kill()
        output, _ = process.communicate()
        yield f"{output.decode().strip()}, exit {process.returncode}"
