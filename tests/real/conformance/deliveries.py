"""Signals, and how often each reaches the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from conformance.experiment import make_experiment
from conformance.places import Place, describe_ending, name_signal, small_python, summarize_observations, wait_until

# The kernel delivers neither to a handler; 32 and 33 are the C library's own.
UNCATCHABLE = {signal.SIGKILL, signal.SIGSTOP, 32, 33}
# With these zerotop's own processes ask each other for something, with the first for a stop of the job.
OWN_REQUESTS = [signal.SIGRTMIN + 3, signal.SIGRTMIN + 4]
STOP_REQUEST = OWN_REQUESTS[0]
JOB_CONTROL = [signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT]
GROUPS: dict[str, list[int]] = {
    "SIGHUP, INT, QUIT, TERM, USR1, USR2": [*map(int, (1, 2, 3, 15, 10, 12))],
    "SIGTSTP, TTIN, TTOU, CONT": [*map(int, JOB_CONTROL)],
    "SIGCHLD, URG, WINCH": [signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH],
    "29 real-time signals": [n for n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if n not in OWN_REQUESTS],
}
GROUPS["the 16 other ones"] = [
    number for number in range(1, 32) if number not in UNCATCHABLE and not any(number in group for group in GROUPS.values())
]
# How often a new job is started after a signal that ended the command, and seconds to wait for a delivery.
_ATTEMPTS, _PATIENCE_S = 4, 3.0
ALL = [number for group in GROUPS.values() for number in group]

# Counts deliveries, not calls of Python's handlers: the wakeup descriptor gets a byte for each delivery.
COUNTER = """
import json, os, select, signal, sys
numbers, counts = json.loads(sys.argv[1]), {}
reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.set_wakeup_fd(writing)
for number in numbers: signal.signal(number, lambda *_: None)
def report():
    with open("counts.new", "w") as file: json.dump([os.getpid(), counts], file)
    os.replace("counts.new", "counts")
report()
while not os.path.exists("end"):
    if select.select([reading], [], [], 0.05)[0]:
        for number in os.read(reading, 4096): counts[number] = counts.get(number, 0) + 1
        report()
raise SystemExit(7)
"""
Send = Callable[[Place, subprocess.Popen[bytes], int], None]


def send_to_group(place: Place, process: subprocess.Popen[bytes], number: int) -> None:
    """As a terminal, or ``kill -- -PGID``."""
    os.killpg(process.pid, number)


def send_to_tree(place: Place, process: subprocess.Popen[bytes], number: int) -> None:
    """As schedulers that signal every process of a job."""
    for pid in list_descendants(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def send_to_process(place: Place, process: subprocess.Popen[bytes], number: int) -> None:
    """As a supervisor that knows only the process that it started."""
    os.kill(process.pid, number)


WAYS: dict[str, Send] = {
    "the process group": send_to_group,
    "every process of the tree": send_to_tree,
    "the started process alone": send_to_process,
}


def list_descendants(root: int) -> list[int]:
    """Return a process and all that descend from it."""
    parents = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def read_counts(place: Place) -> dict[int, int]:
    """Return how often each signal reached the job."""
    with suppress(OSError):
        return {int(number): count for number, count in json.loads((place.work / "counts").read_text())[1].items()}
    return {}


def count_deliveries(place: Place, send: Send, numbers: list[int]) -> tuple[dict[int, str], str]:
    """Send each signal once to a job that handles all; return how often each came, and how the job ended.

    After a signal that ends what was started, the others are sent to a new job; after some of these no more are sent.
    """
    seen: dict[int, str] = {}
    ending = ""
    for _ in range(_ATTEMPTS):
        left = [number for number in numbers if number not in seen]
        if not left:
            break
        for name in ("counts", "end"):
            (place.work / name).unlink(missing_ok=True)
        with place.start_job(*small_python(COUNTER, json.dumps(numbers)), stdout=None, stderr=None) as process:
            sent = send_in_turn(place, process, send, left)
            counts = read_counts(place)
            seen |= {number: describe_count(counts.get(number, 0)) for number in sent}
            if process.poll() is not None:
                seen[sent[-1]] = f"the command ends, deliveries: {counts.get(sent[-1], 0)}"
            (place.work / "end").touch()
            wait_until(lambda: process.poll() is not None)
            ending = "not ended" if process.returncode is None else describe_ending(process.returncode)
    return {number: seen.get(number, "not sent, as others end the command") for number in numbers}, ending


def send_in_turn(place: Place, process: subprocess.Popen[bytes], send: Send, numbers: list[int]) -> list[int]:
    """Send signals until one ends what was started; return those sent."""
    wait_until((place.work / "counts").exists)
    for index, number in enumerate(numbers, 1):
        send(place, process, number)
        wait_until(has_answered, _PATIENCE_S, place, process, number)
        if process.poll() is not None:
            return numbers[:index]
    # Time for second deliveries.
    wait_until(lambda: any(count > 1 for count in read_counts(place).values()), 0.5)
    return numbers


def has_answered(place: Place, process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether a signal has reached the job, or has ended what was started."""
    return count_of(place, number) > 0 or process.poll() is not None


def count_of(place: Place, number: int, least: int = 0) -> int:
    """Return how often a signal has reached the job; 0 if less often than ``least``."""
    count = read_counts(place).get(number, 0)
    return count if count >= least else 0


def describe_count(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def make_title(group: str, way: str) -> str:
    """Return the behaviour's name."""
    return f"{group}, sent to {way}: deliveries"


def observe_deliveries(place: Place, way: str) -> Iterator[str]:
    """Yield an observation for each group of signals, and how the job ended."""
    seen, ending = count_deliveries(place, WAYS[way], ALL)
    for group in GROUPS.values():
        yield summarize_observations([(name_signal(number), seen[number]) for number in group], "once")
    yield ending


def make_titles(way: str) -> list[str]:
    """Return the behaviours of one way."""
    return [*(make_title(group, way) for group in GROUPS), f"the job handled every signal sent to {way}, and ends"]


@make_experiment(*make_titles("the process group"))
def to_the_group(place: Place) -> Iterator[str]:
    yield from observe_deliveries(place, "the process group")


@make_experiment(*make_titles("every process of the tree"))
def to_the_tree(place: Place) -> Iterator[str]:
    yield from observe_deliveries(place, "every process of the tree")


@make_experiment(*make_titles("the started process alone"))
def to_the_process(place: Place) -> Iterator[str]:
    yield from observe_deliveries(place, "the started process alone")


@make_experiment(*(f"SIGRTMIN+3, sent to {way}: deliveries of it and of SIGINT" for way in WAYS))
def own_request(place: Place) -> Iterator[str]:
    for send in WAYS.values():
        (place.work / "counts").unlink(missing_ok=True)
        numbers = [STOP_REQUEST, signal.SIGINT]
        with place.start_job(*small_python(COUNTER, json.dumps(numbers)), stdout=None, stderr=None) as process:
            send_in_turn(place, process, send, [STOP_REQUEST])
            wait_until(lambda: signal.SIGINT in read_counts(place), 1)
            yield ", ".join(describe_count(read_counts(place).get(number, 0)) for number in numbers)


# Prints what came with the first signal; signals that kill() and sigqueue() send name their sender.
INFORMED = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
open("ready", "w").close()
info = signal.sigwaitinfo([signal.SIGUSR1])
print("from its caller" if info.si_pid == int(os.environ["CALLER"]) else "from another", "code", info.si_code)
"""


@make_experiment("a signal names its sender, sent to the process group", "and sent to the started process alone")
def observe_senders(place: Place) -> Iterator[str]:
    for send in (send_to_group, send_to_process):
        (place.work / "ready").unlink(missing_ok=True)
        environment = place.environment | {"CALLER": str(os.getpid())}
        with place.start_job(*small_python(INFORMED), env=environment) as process:
            wait_until((place.work / "ready").exists)
            send(place, process, signal.SIGUSR1)
            output, _ = process.communicate(timeout=20)
        yield output.decode().strip()
