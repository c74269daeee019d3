"""Limits and groups of the job."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from conformance.experiment import make_experiment
from conformance.places import Place, describe_ending, join_output, small_python, wait_until

from .interruptions import WAITING, await_ready


@make_experiment(
    "ulimit -f 64 and 300 KB to a pipe",
    "ulimit -f 64 and 300 KB to a file of the job",
    "ulimit -f 64 and 300 KB to stdout, a file",
    "ulimit -f 0 and a line to a pipe",
    "ulimit -n 32",
    "ulimit -n 16",
    "ulimit -c 0",
)
def of_files(place: Place) -> Iterator[str]:
    write = "import os\nfor _ in range(300): os.write({}, b'x' * 1000)"
    (place.work / "to_stdout").write_text(write.format(1))
    (place.work / "to_file").write_text(write.format("os.open('own', os.O_WRONLY | os.O_CREAT | os.O_APPEND)"))
    done = place.run_shell("ulimit -f 64; Z python -S -E to_stdout")
    yield f"{len(done.output):,} bytes, {done.ending}"
    yield place.run_shell("ulimit -f 64; Z python -S -E to_file").ending
    done = place.run_shell("(ulimit -f 64; Z python -S -E to_stdout > file); echo code $?; stat -c '%s bytes' file")
    yield ", ".join(done.output.decode().splitlines())
    done = place.run_shell("ulimit -f 0; Z echo word")
    yield f"{done.output.decode().strip() or 'nothing'}, {done.ending}"
    for number in (32, 16):
        done = place.run_shell(f"ulimit -n {number}; Z bash -c 'ulimit -n; exec {number - 1}< /dev/null && echo has them'")
        yield ", ".join((*done.output.decode().splitlines(), done.ending))
    yield place.run_shell("ulimit -c 0; Z bash -c 'ulimit -c'").output.decode().strip()


@make_experiment(
    "a recording's folder that cannot be made: the job runs",
    "one that has something in it already",
    "one that is a file",
)
def of_recordings(place: Place) -> Iterator[str]:
    (place.work / "file").touch()
    for folder in ("/proc/no-such-folder/recording", str(place.work), str(place.work / "file")):
        yield join_output(place.run_command(*place.build_command("bash", "-c", "echo word; exit 3", recording=folder)))


@make_experiment("ulimit -v 60000 and a job that fits into it", "ulimit -v 3000000 and a job that wants 4 GB")
def of_memory(place: Place) -> Iterator[str]:
    done = place.run_shell("ulimit -v 60000; Z sh -c 'echo word; exit 3'")
    error_lines = done.raw_errors.decode().strip().splitlines()
    yield f"{done.output.decode().strip() or 'no output'}, {done.ending}" + (
        ", a sentence" if len(error_lines) == 1 and done.ending != "exit 3" else ""
    )
    (place.work / "big").write_text("try: bytearray(4 << 30)\nexcept MemoryError: raise SystemExit(9)")
    yield place.run_shell("ulimit -v 3000000; Z python -S -E big").ending


@make_experiment("ulimit -t 1: the job ends by SIGXCPU", "and when it gets it")
def of_time(place: Place) -> Iterator[str]:
    (place.work / "burn").write_text("while True: pass")
    yield place.run_shell("ulimit -c 0; ulimit -S -t 1; Z python -S -E burn").ending
    handle = "lambda *_: (print(round(time.process_time()), 's of its own time'), sys.exit(3))"
    (place.work / "burn").write_text(f"import signal, sys, time\nsignal.signal(24, {handle})\nwhile True: pass")
    done = place.run_shell("ulimit -S -t 1; Z python -S -E burn")
    yield f"after {done.output.decode().strip()}, {done.ending}"


@make_experiment(
    "kill 0 in the job, with its caller in another group",
    "a job that makes itself a group or session leader",
    "a job that becomes the leader of its own group is signalled there",
)
def observe_process_groups(place: Place) -> Iterator[str]:
    yield place.run_job("bash", "-c", "trap 'exit 4' TERM; sleep 20 & kill 0; wait").ending
    code = "import os\nif os.fork() == 0: os.setsid(); print(os.getsid(0) == os.getpid(), flush=True)\nelse: os.wait()"
    yield "yes" if place.run_job(*small_python(code)).output == b"True\n" else "no"
    leader = small_python("import os\nif os.getpgrp() != os.getpid(): os.setpgid(0, 0)\n" + WAITING[-1])
    with place.start_job(*leader) as process:
        pid = await_ready(place)
        os.killpg(pid, signal.SIGTERM)
        wait_until(lambda: process.poll() is not None)
        yield describe_ending(process.returncode)
