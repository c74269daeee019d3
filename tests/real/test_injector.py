"""What entering a Python leaves as it was: how long it sleeps in C, its wide registers, and all of it if we are killed."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from agents import wait_for
from zerotop_probe.outside.attaching.entry_limits import read_status
from zerotop_probe.outside.attaching.injector import PlantedCode, State, plant_code
from zerotop_probe.outside.attaching.ptrace import tracing
from zerotop_probe.outside.attaching.python_process import REMOTE_EXEC_VERSION, CannotEnter, examine_process
from zerotop_probe.outside.procfs import ProcessHandle

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.version_info >= REMOTE_EXEC_VERSION, reason="this Python is asked itself, without an injector"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no machine of ours"),
]

SLEEP_S = 5
WAYS = {
    "nanosleep": "libc.nanosleep(ctypes.byref(Span(5, 0)), None)",
    "clock_nanosleep": "libc.clock_nanosleep(1, 0, ctypes.byref(Span(5, 0)), None)",
    "poll": "libc.poll(None, 0, 5000)",
    "time.sleep": "time.sleep(5)",
    "select": "select.select([], [], [], 5)",
    "lock": "threading.Event().wait(5)",
}
SLEEPS = """
import ctypes, select, threading, time
libc = ctypes.CDLL(None)
class Span(ctypes.Structure): _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
print("ready", flush=True)
began = time.monotonic()
WAY
print(time.monotonic() - began, flush=True)
"""
# A function f(rounds) that fills a wide register, counts down, and returns 0 if all of it is still there.
WIDE = {
    # vpcmpeqd ymm15, ymm15, ymm15; dec rdi; jne; vpmovmskb eax, ymm15; not eax; vzeroupper; ret
    "x86_64": ("avx2", "c4410576ff48ffcf75fbc4c17dd7c7f7d0c5f877c3"),
    # ptrue p0.b; mov z31.b, 7; subs x0, x0, 1; b.ne; cmpeq p1.b, p0/z, z31.b, 7; cntp x0, p0, p1.b; rdvl x1, 1;
    # sub x0, x1, x0; ret
    "aarch64": ("sve", "e0e31825ffc03825000400f1e1ffff54e1830725208020252150bf04200000cbc0035fd6"),
}
COMPUTES = """
import ctypes, mmap, select
code = bytes.fromhex("CODE")
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory[:len(code)] = code
intact = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
print("ready", flush=True)
harmed = 0
while not select.select([0], [], [], 0)[0]: harmed += intact(10_000_000) != 0
print(harmed, flush=True)
"""
# Starts a program whose input nobody writes to yet: meanwhile the kernel neither returns nor stops for anybody.
IN_THE_KERNEL = """
import os
print("ready", flush=True)
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, FIFO, os.O_RDONLY, 0)])
print("back", flush=True)
while True: pass
"""
# Enters a process, and kills itself before or after the ptrace call with this number. Prints the number of calls.
KILLED = """
import os, signal, sys
from zerotop_probe.outside.attaching.injector import plant_code
from zerotop_probe.outside.attaching.ptrace import tracing
from zerotop_probe.outside.attaching.python_process import examine_process
from zerotop_probe.outside.procfs import ProcessHandle
number, when, calls, call_ptrace = int(sys.argv[2]), sys.argv[3], 0, tracing._call_ptrace
def call_counted(*arguments, **named):
    global calls
    if (calls, when) == (number, "before"): os.kill(os.getpid(), signal.SIGKILL)
    call_ptrace(*arguments, **named)
    if (calls, when) == (number, "after"): os.kill(os.getpid(), signal.SIGKILL)
    calls += 1
tracing._call_ptrace = call_counted
plant_code(examine_process(ProcessHandle.from_pid(int(sys.argv[1]))), "pass")
print(calls)
"""
WORKS = {
    "in wide registers": """
import ctypes, mmap
code = bytes.fromhex("CODE")
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory[:len(code)] = code
intact = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
def work(): assert intact(3_000_000) == 0
""",
    "in a call with a timeout": """
import ctypes
libc = ctypes.CDLL(None)
def work(): assert libc.poll(None, 0, 100) == 0
""",
    "with a pipe and signals": """
import itertools, os, threading, time
reader, writer = os.pipe()
numbers, seen = itertools.count(), [0]
signal.signal(signal.SIGALRM, lambda *_: seen.__setitem__(0, seen[0] + 1))
signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
def feed():
    for number in range(1 << 60): os.write(writer, number.to_bytes(8, "little")); time.sleep(0.002)
threading.Thread(target=feed, daemon=True).start()
def work(): assert int.from_bytes(os.read(reader, 8), "little") == next(numbers)
""",
}
WORKER = """
import faulthandler, select, signal
faulthandler.enable()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
WORK
print("ready", flush=True)
while not select.select([0], [], [], 0)[0]: work()
signal.setitimer(signal.ITIMER_REAL, 0)
print("end", flush=True)
"""
IN_A_HANDLER = "runs a signal handler or a coroutine on a stack of its own"
MASK = 1 << (signal.SIGUSR2 - 1)


@contextmanager
def at_work(program: str) -> Iterator[tuple[subprocess.Popen[str], ProcessHandle]]:
    """A Python that executes this and has said so."""
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        target = ProcessHandle.from_pid(process.pid)
        assert target is not None
        try:
            yield process, target
        finally:
            process.kill()


def state_of(process: ProcessHandle) -> str:
    """One letter, see proc(5)."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until_done(planted: PlantedCode) -> None:
    """Until the text has been executed."""
    wait_for(lambda: planted.read_state() is State.DONE)


@pytest.fixture(scope="module")
def sleep_seconds() -> dict[str, float]:
    """The seconds that a sleep lasted although it was entered three times, by way; all sleep at the same time."""
    lasted = {}
    with ExitStack() as stack:
        sleepers = {way: stack.enter_context(at_work(SLEEPS.replace("WAY", call))) for way, call in WAYS.items()}
        for _, found in sleepers.values():
            wait_for(lambda found=found: state_of(found) == "S")  # type: ignore[misc]
        # Begun anew, it would last these two seconds longer.
        time.sleep(2)
        for _, found in sleepers.values():
            for _ in range(3):
                plant_code(examine_process(found), "pass")
        for way, (process, _) in sleepers.items():
            assert process.stdout is not None
            lasted[way] = float(process.stdout.readline())
    return lasted


@pytest.mark.parametrize("way", WAYS)
def test_a_sleep_ends_when_it_would_have(sleep_seconds: dict[str, float], way: str) -> None:
    assert SLEEP_S - 0.1 < sleep_seconds[way] < SLEEP_S + 1


@pytest.mark.parametrize("keep_lock_s", [60.0, 0.0])
def test_a_stop_is_noticed_before_the_next_look(monkeypatch: pytest.MonkeyPatch, keep_lock_s: float) -> None:
    poll_s = 0.9
    monkeypatch.setattr(tracing, "_POLL_S", poll_s)
    monkeypatch.setattr(tracing, "_KEEP_LOCK_S", keep_lock_s)
    with at_work("import time; print('ready', flush=True)\nwhile True: time.sleep(0.01)") as (_, found):
        held = [plant_code(examine_process(found), "pass") for _ in range(5)]
    assert min(planted.stopped_s for planted in held) < poll_s


def test_one_that_did_not_stop_in_time_is_let_go(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with at_work(IN_THE_KERNEL.replace("FIFO", repr(str(fifo)))) as (process, found):
        wait_for(lambda: state_of(found) == "D")
        with pytest.raises(CannotEnter, match="did not stop in time"):
            plant_code(examine_process(found), "raise SystemExit")
        wait_for(lambda: read_status(found.pid)["TracerPid"] == "0")

        fifo.open("w").close()
        assert process.stdout is not None
        assert process.stdout.readline() == "back\n"
        wait_until_done(plant_code(examine_process(found), "pass"))


def test_one_that_ended_after_it_was_looked_at() -> None:
    with at_work("print('ready', flush=True); input()") as (process, found):
        target = examine_process(found)
        process.communicate("")
        with pytest.raises(CannotEnter, match="has ended"):
            plant_code(target, "pass")


def test_one_who_is_ending_enters_nobody() -> None:
    """As when the screen is left while ranks are being entered."""
    late = (
        "import atexit, sys\nfrom zerotop_probe.outside.attaching.injector import CannotEnter, plant_code\n"
        "from zerotop_probe.outside.attaching.python_process import examine_process\n"
        "from zerotop_probe.outside.procfs import ProcessHandle\n"
        "def enter():\n    try: plant_code(examine_process(ProcessHandle.from_pid(int(sys.argv[1]))), 'pass')\n"
        "    except CannotEnter as error: print(error)\n"
        "atexit.register(enter)"
    )
    with at_work("print('ready', flush=True); input()") as (_, found):
        done = subprocess.run([sys.executable, "-c", late, str(found.pid)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"No thread could be started to enter process {found.pid}. Try again.\n", "")


def test_wide_registers_are_what_they_were() -> None:
    feature, code = WIDE[platform.machine()]
    if feature not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {feature}")

    with at_work(COMPUTES.replace("CODE", code)) as (process, found):
        for _ in range(30):
            wait_until_done(plant_code(examine_process(found), "pass"))
        said, _ = process.communicate("end\n")
        assert said == "0\n"


def has_its_mask(process: ProcessHandle) -> bool:
    """Whether only the signal is blocked that the worker blocks; Python itself blocks others now and then."""
    return int(read_status(process.pid)["SigBlk"], 16) == MASK


def plant_between_handlers(process: ProcessHandle) -> PlantedCode:
    """Plant code, again where a signal's handler ran, which is refused: faulthandler gives handlers a stack of their own."""
    while True:
        try:
            return plant_code(examine_process(process), "pass")
        except CannotEnter as error:
            if IN_A_HANDLER not in str(error):
                raise


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("work", WORKS)
def test_a_rank_restores_itself(work: str, when: str) -> None:
    feature, code = WIDE[platform.machine()]
    if "CODE" in WORKS[work] and feature not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {feature}")
    number, is_over = 0, False
    while not is_over:
        with at_work(WORKER.replace("WORK", WORKS[work].replace("CODE", code))) as (process, found):
            time.sleep(0.02)
            command = [sys.executable, "-c", KILLED, str(found.pid), str(number), when]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            while IN_A_HANDLER in done.stderr:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            is_over = done.returncode == 0
            assert is_over or done.returncode == -signal.SIGKILL, done.stderr
            wait_for(lambda found=found: has_its_mask(found))  # type: ignore[misc]
            wait_until_done(plant_between_handlers(found))
            said, _ = process.communicate("end\n", timeout=30)
            assert (said, process.returncode) == ("end\n", 0), f"killed {when} call {number}"
        number += 1
    assert number - 1 == int(done.stdout) > 14
