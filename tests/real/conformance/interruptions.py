"""Signals that end or stop the job, or are ignored."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from conformance.experiment import make_experiment
from conformance.places import Place, describe_ending, name_signal, small_python, summarize_observations, wait_until

from .deliveries import WAYS, list_descendants, send_to_group, send_to_process

ENDING = (
    *(signal.Signals[f"SIG{name}"] for name in ["HUP", "INT", "QUIT", "TERM", "USR1", "ALRM", "XCPU"]),
    signal.SIGRTMIN,
)
WAITING = small_python("import os, time\nopen('ready', 'w').write(str(os.getpid()))\ntime.sleep(15)")


def await_ready(place: Place, name: str = "ready") -> int:
    """Wait until the job of WAITING, or another that writes its PID to a file, runs; return its PID."""
    ready = place.work / name
    wait_until(lambda: ready.exists() and ready.read_text())
    pid = int(ready.read_text())
    ready.unlink()
    return pid


def end_by_way(place: Place, way: str, number: int) -> str:
    """Send a signal to a job that does not handle it; describe what its caller sees."""
    with place.start_job(*WAITING) as process:
        pid = await_ready(place)
        WAYS[way](place, process, number)
        if not wait_until(lambda: process.poll() is not None, 8):
            return "the job goes on"
        if not wait_until(has_ended, 2.0, pid):
            return f"{describe_ending(process.returncode)}, and the job goes on unseen"
        ending = describe_ending(process.returncode)
        return "end it" if ending == describe_ending(-number) else ending


def is_running(pid: int) -> bool:
    """Whether a process runs; not as a zombie."""
    return read_state(pid) not in ("", "Z", "X")


def has_ended(pid: int) -> bool:
    """Whether a process has ended, perhaps as a zombie."""
    return not is_running(pid)


def are_stopped(*pids: int) -> bool:
    return all(read_state(pid) == "T" for pid in pids)


def are_running(*pids: int) -> bool:
    return all(read_state(pid) != "T" for pid in pids)


def read_state(pid: int) -> str:
    """Return the state letter of a process; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


@make_experiment(*(f"signals that the job does not handle, sent to {way}" for way in WAYS))
def unhandled_signals(place: Place) -> Iterator[str]:
    for way in WAYS:
        yield summarize_observations([(name_signal(number), end_by_way(place, way, number)) for number in ENDING], "end it")


@make_experiment("SIGKILL to the process group", "SIGKILL to the started process alone")
def observe_kill(place: Place) -> Iterator[str]:
    for send in (send_to_group, send_to_process):
        with place.start_job(*WAITING) as process:
            pid = await_ready(place)
            send(place, process, signal.SIGKILL)
            wait_until(lambda: process.poll() is not None)
            gone = wait_until(has_ended, 1.0, pid)
            yield f"{describe_ending(process.returncode)}, the job {'has ended' if gone else 'goes on'}"


def describe_stop(process: subprocess.Popen[bytes], pid: int) -> str:
    """Describe whether the job is stopped, and whether its caller is told so."""
    stopped = wait_until(lambda: read_state(pid) == "T", 1.0)
    told = wait_until(lambda: os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None, 1.0)
    return f"the job {'stops' if stopped else 'goes on'}, its caller is {'told' if told else 'not told'}"


def describe_state(pid: int) -> str:
    """Describe a process that may be stopped."""
    return {"T": "is stopped", "": "has ended", "Z": "has ended"}.get(read_state(pid), "runs")


@make_experiment(
    "SIGSTOP to the process group",
    "SIGTSTP to the process group",
    "SIGTSTP to the started process alone",
    "and then SIGCONT to it alone",
    "SIGSTOP to the started process alone",
)
def observe_stop(place: Place) -> Iterator[str]:
    with place.start_job(*WAITING) as process:
        pid = await_ready(place)
        send_to_group(place, process, signal.SIGSTOP)
        yield describe_stop(process, pid)
    # An orphaned process group, as of a session leader, never stops by SIGTSTP: it needs a parent in the same session.
    for send in (os.killpg, os.kill):
        script = f"set -m; Z {shlex.join(WAITING)} & echo $!; sleep 15"
        with place.start_command("bash", "-c", place.fill_script(script)) as process:
            assert process.stdout is not None
            started, pid = int(process.stdout.readline()), await_ready(place)
            send(started, signal.SIGTSTP)
            wait_until(are_stopped, 2.0, started, pid)
            yield f"the job {describe_state(pid)}, what was started {describe_state(started)}"
            if send is os.kill:
                send(started, signal.SIGCONT)
                wait_until(are_running, 2.0, started, pid)
                yield f"the job {describe_state(pid)}, what was started {describe_state(started)}"
            place.end_everything()
    with place.start_job(*WAITING) as process:
        pid = await_ready(place)
        send_to_process(place, process, signal.SIGSTOP)
        yield describe_stop(process, pid)


# Prints for a while; says whether its reader has left meanwhile.
PRINTING = "trap 'echo SIGPIPE >&2' PIPE; echo $$ > ready; for i in {1..12}; do echo line $i; sleep 0.1; done; exit 6"
# Seconds for which it is stopped: longer than anything that zerotop waits for meanwhile.
STOPPED_S = 0.8


def pause_printing(place: Place, send: Callable[[int, int, int], None], stop: int) -> str:
    """Stop a job that prints and continue it; describe its end. ``send`` gets what was started, the job and the signal."""
    # As above, a parent in the same session; bash would not wait for a job that is stopped.
    parent = """
import os, sys
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, setpgroup=0)
open("started", "w").write(str(child))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    with place.start_command(*small_python(parent, *place.build_command("bash", "-c", PRINTING))) as process:
        started, pid = await_ready(place, "started"), await_ready(place)
        send(started, pid, stop)
        time.sleep(STOPPED_S)
        send(started, pid, signal.SIGCONT)
        try:
            output, errors = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            return "not ended"
        finally:
            place.end_everything()
        told = ", SIGPIPE" * (b"SIGPIPE" in errors)
        return f"{output.count(b'line')} lines, {describe_ending(process.returncode)}{told}"


def signal_tree(started: int, _pid: int, number: int) -> None:
    """As schedulers that suspend every process of a job."""
    for pid in list_descendants(started):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


PAUSES: dict[str, Callable[[int, int, int], None]] = {
    "the process group": lambda started, _pid, number: os.killpg(started, number),
    "every process of the tree": signal_tree,
    "the started process alone": lambda started, _pid, number: os.kill(started, number),
    "the job itself alone": lambda _started, pid, number: os.kill(pid, number),
}


@make_experiment(
    *(f"{name} and a second later SIGCONT to {who}: the job ends" for name in ("SIGSTOP", "SIGTSTP") for who in PAUSES)
)
def pause(place: Place) -> Iterator[str]:
    for stop in (signal.SIGSTOP, signal.SIGTSTP):
        for send in PAUSES.values():
            yield pause_printing(place, send, stop)


@make_experiment(
    "signals that the caller ignores are ignored in the job",
    "and do not end it, sent to the process group",
    "SIGCHLD ignored by the caller is ignored in the job",
    "signals that the caller blocks are blocked in the job",
)
def inherited_dispositions(place: Place) -> Iterator[str]:
    ignored = ["HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM"]
    done = place.run_shell(f"trap '' {' '.join(ignored)}; Z grep SigIgn /proc/self/status")
    wanted = sum(1 << signal.Signals[f"SIG{name}"] - 1 for name in ignored)
    found = int(done.output.split()[1], 16)
    yield "all" if found & wanted == wanted else f"{found & wanted:x} of {wanted:x}"
    script = f"trap '' {' '.join(ignored)}; echo ready; Z bash -c 'sleep 1; exit 6'"
    with place.start_command("bash", "-c", place.fill_script(script)) as process:
        wait_until(lambda: len(place.list_processes()) > 1)
        for name in ignored:
            os.killpg(process.pid, signal.Signals[f"SIG{name}"])
        process.communicate(timeout=20)
        yield describe_ending(process.returncode)
    exec_with = "import os, signal, sys\n{}\nos.execvp(sys.argv[1], sys.argv[1:])"
    for setting, field, number in (
        ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "SigIgn", signal.SIGCHLD),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])", "SigBlk", signal.SIGUSR1),
    ):
        job = place.build_command("grep", field, "/proc/self/status")
        process = place.start_command(*small_python(exec_with.format(setting), *job))
        output, _ = process.communicate(timeout=20)
        yield "yes" if int(output.split()[1], 16) >> number - 1 & 1 else "no"


@make_experiment("SIGTERM to the process group while the command starts, at 12 moments")
def while_starting(place: Place) -> Iterator[str]:
    seen = []
    for moment in range(12):
        with place.start_job("sleep", "10") as process:
            # Under zerotop its helper process is there before the job.
            wait_until(lambda: len(place.list_processes()) > int(place.recorded))
            time.sleep(moment / 100)
            send_to_group(place, process, signal.SIGTERM)
            ended = wait_until(lambda: process.poll() is not None, 3)
            seen.append((f"{10 * moment} ms", describe_ending(process.returncode) if ended else "the job goes on"))
    yield summarize_observations(seen, describe_ending(-signal.SIGTERM))


@make_experiment("an alarm that the caller has set ends the job", "a caller's death signal (PR_SET_PDEATHSIG) ends the job")
def observe_alarms(place: Place) -> Iterator[str]:
    code = "import os, signal, sys\nsignal.alarm(2)\nos.execvp(sys.argv[1], sys.argv[1:])"
    with place.start_command(*small_python(code, *place.build_command(*WAITING))) as process:
        pid = await_ready(place)
        wait_until(lambda: process.poll() is not None, 6)
        process.poll()
        ending = "not ended" if process.returncode is None else describe_ending(process.returncode)
        yield f"{ending}, the job {'goes on' if is_running(pid) else 'has ended'}"
        place.end_everything()
    code = "import ctypes, os, signal, sys\nctypes.CDLL(None).prctl(1, signal.SIGTERM)\nos.execvp(sys.argv[1], sys.argv[1:])"
    parent = "import subprocess, sys\nsubprocess.Popen(sys.argv[1:])\nsys.stdin.read()"
    starter = small_python(parent, *small_python(code, *place.build_command(*WAITING)))
    with place.start_command(*starter, stdin=subprocess.PIPE) as process:
        pid = await_ready(place)
        assert process.stdin is not None
        process.stdin.close()
        ended = wait_until(has_ended, 5.0, pid)
        yield "the job has ended" if ended else "the job goes on"
        place.end_everything()
