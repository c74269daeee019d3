"""Processes that outlive the one that was started."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from conformance.experiment import make_experiment
from conformance.places import Place, describe_ending, small_python, wait_until

# A daemon: in a session of its own, without the caller's files; it leaves a file when it has worked for a while.
DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
null = os.open("/dev/null", os.O_RDWR)
for number in range(3): os.dup2(null, number)
time.sleep(3)
open("worked", "w").close()
"""


@make_experiment(
    "a daemon does its work",
    "the command returns before its daemon ends",
    "wait for children",
    "a child that outlives the first process: its output arrives",
    "when that command returns",
    "the exit code is the first process's",
)
def observe_outliving(place: Place) -> Iterator[str]:
    done = place.run_job(*small_python(DAEMON))
    early = not (place.work / "worked").exists()
    yield "yes" if wait_until((place.work / "worked").exists, 8) else "no"
    yield "yes" if early and done.ending == "exit 0" else f"no, {done.ending}"
    yield place.run_job("bash", "-c", "(sleep 0.2; echo late) & wait; exit 5").output.decode().strip()
    job = "(sleep 1; echo late; touch done) & echo early; exit 5"
    with place.start_job("bash", "-c", job) as process:
        assert process.stdout is not None
        returned = wait_until(lambda: process.poll() is not None or (place.work / "done").exists())
        early = returned and not (place.work / "done").exists()
        output = process.stdout.read()
        yield ", ".join(output.decode().split())
        wait_until(lambda: process.poll() is not None)
        yield "at once" if early else "once the child has ended"
        yield describe_ending(process.returncode)


@make_experiment(
    "a rank in the background (bash -c 'rank &'): its output arrives",
    "and when that command returns",
    "a launcher that is killed leaves its ranks: their output arrives",
)
def observe_ranks(place: Place) -> Iterator[str]:
    code = "import time\nfor i in range(20): print('step', i, flush=True); time.sleep(0.1)\nopen('done', 'w').close()"
    (place.work / "train.py").write_text(code)
    for job in (
        "RANK=0 WORLD_SIZE=1 python train.py & sleep 0.7",
        "RANK=0 WORLD_SIZE=1 python train.py & sleep 0.7; kill -9 $$",
    ):
        (place.work / "done").unlink(missing_ok=True)
        with place.start_job("bash", "-c", job) as process:
            assert process.stdout is not None
            wait_until(lambda: process.poll() is not None or (place.work / "done").exists())
            early = not (place.work / "done").exists()
            yield f"{process.stdout.read().count(b'step')} lines"
            if "kill" not in job:
                yield "at once" if early else "once the rank has ended"


@make_experiment(
    "who adopts an orphan of the job",
    "zombies that the job leaves to it are gone",
    "a job that replaces itself (exec)",
    "a job with 200 processes",
    "nothing of the job or of zerotop is left after its end",
    "files left in the working, temporary and home directory",
)
def observe_processes(place: Place) -> Iterator[str]:
    code = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        parent = os.getppid()
        while os.getppid() == parent: time.sleep(0.01)
        known = {os.environ["ROOT"]: "another of the job", os.environ["STARTER"]: "what started the job"}
        print(known.get(str(os.getppid()), "neither the job nor what started it"), flush=True)
        open("orphan", "w").write(str(os.getpid()))
        os._exit(0)
    time.sleep(0.1)
    os._exit(0)
os.wait()
while not os.path.exists("orphan") or not open("orphan").read(): time.sleep(0.01)
"""
    job = 'export ROOT=$$ STARTER=$PPID; exec "$@"'
    yield place.run_job("bash", "-c", job, "bash", *small_python(code)).output.decode().strip()
    orphan = Path("/proc", (place.work / "orphan").read_text())
    yield "yes" if wait_until(lambda: not orphan.exists(), 3) else "no"
    done = place.run_job("bash", "-c", "echo first; exec bash -c 'echo second; exit 6'")
    yield ", ".join((*done.output.decode().split(), done.ending))
    done = place.run_job("bash", "-c", "for i in {1..200}; do sleep 0.1 & done; wait; echo $(jobs -p | wc -l) left; exit 2")
    yield f"{done.output.decode().strip()}, {done.ending}"
    yield place.count_left()
    begin = time.time()
    place.run_job("bash", "-c", "echo word > made")
    new = [
        path.name
        for name in ("work", "tmp", "home")
        for path in (place.folder / name).rglob("*")
        if path.is_file() and path.stat().st_mtime >= begin
    ]
    yield ", ".join(new) or "none"
