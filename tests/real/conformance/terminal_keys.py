"""Keys, sizes and modes of a terminal."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

from conformance.console import Console, interactive_shell, open_console
from conformance.experiment import make_experiment
from conformance.places import Place, small_python, wait_until

from .deliveries import COUNTER, count_of, describe_count
from .interruptions import WAITING, await_ready, has_ended, is_running

# What a terminal sends, and the key that makes it do so.
KEYS = {
    signal.SIGINT: b"\x03",
    signal.SIGQUIT: b"\x1c",
    signal.SIGTSTP: b"\x1a",
    signal.SIGWINCH: b"",
    signal.SIGHUP: b"",
}


@make_experiment(
    "Ctrl-C: deliveries",
    "Ctrl-\\: deliveries",
    "Ctrl-Z, which the job handles: deliveries",
    "a window of another size: the job is told",
    "a terminal that hangs up: deliveries",
    "and the job that handles all this ends by itself",
)
def observe_keys(place: Place) -> Iterator[str]:
    with open_console(place, *place.build_command(*small_python(COUNTER, json.dumps([*KEYS])))) as console:
        wait_until((place.work / "counts").exists)
        for number, key in KEYS.items():
            if key:
                console.type_keys(key)
            elif number == signal.SIGWINCH:
                console.resize(30, 90)
            else:
                console.hang_up()
            wait_until(count_of, 3.0, place, number)
            wait_until(count_of, 0.3, place, number, 2)
            # Two changes of size in a row, or one told twice, are the same to a job.
            count = count_of(place, number)
            yield describe_count(count) if number != signal.SIGWINCH else "yes" if count else "no"
        (place.work / "end").touch()
        yield console.read_to_end()


@make_experiment("Ctrl-C ends a job that does not handle it", "Ctrl-\\ does too", "a hangup does too")
def keys_that_end(place: Place) -> Iterator[str]:
    for key in (b"\x03", b"\x1c", b""):
        with open_console(place, *place.build_command(*WAITING)) as console:
            pid = await_ready(place)
            if key:
                console.type_keys(key)
            else:
                console.hang_up()
            ending = console.read_to_end()
            wait_until(has_ended, 2.0, pid)
            yield f"{ending}, the job {'goes on' if is_running(pid) else 'has ended'}"


LOOP = 'i=0; while [ ! -e end ]; do i=$((i+1)); echo turn $i; echo $i > turn; sleep 0.05; done; echo turns en""ded; exit 5'


@make_experiment(
    "Ctrl-Z in an interactive shell stops the job, which the shell tells",
    "a stopped job prints nothing",
    "fg continues it",
    "bg continues it, and fg brings it back",
    "Ctrl-C then ends it and the shell goes on",
)
def job_control(place: Place) -> Iterator[str]:
    (place.work / "loop").write_text(LOOP)
    with interactive_shell(place) as shell:
        shell.type_keys(place.fill_script("Z bash loop\n").encode())
        shell.wait_for_pattern(rb"turn 3\r")
        shell.type_keys(b"\x1a")
        yield "stopped" if shell.wait_for_pattern(rb"Stopped", 5) else "not stopped"
        before = (place.work / "turn").read_text()
        wait_until(lambda: (place.work / "turn").read_text() != before, 0.5)
        yield "nothing" if (place.work / "turn").read_text() == before else "it goes on"
        shell.forget_output()
        shell.type_keys(b"fg\n")
        yield "goes on" if shell.wait_for_pattern(rb"turn \d+\r", 5) else "no output"
        shell.type_keys(b"\x1a")
        shell.wait_for_pattern(rb"Stopped", 5)
        shell.forget_output()
        shell.type_keys(b"bg\n")
        in_background = shell.wait_for_pattern(rb"turn \d+\r", 5)
        shell.type_keys(b"fg\n")
        shell.forget_output()
        yield "goes on" if in_background and shell.wait_for_pattern(rb"turn \d+\r", 5) else "no output"
        shell.type_keys(b"\x03")
        shell.forget_output()
        shell.type_keys(b"echo code $?.\n")
        yield "code 130" if shell.wait_for_pattern(rb"code 130\.", 5) else f"{shell.output[-40:]!r}"


@make_experiment(
    "what the job writes to a terminal arrives byte for byte",
    "isatty of the three descriptors",
    "the terminal's size, seen at stdout",
    "its new size, seen at stdout after a change",
    "the name of the terminal: stdin's and stdout's",
    "/dev/tty opens",
    "modes set through stdout are soon the terminal's",
    "an interactive prompt is answered",
    "modes after the job has ended are those before",
)
def on_a_terminal(place: Place) -> Iterator[str]:
    code = r"""
import os, signal, sys, termios, time
os.write(1, b"one\ntwo\r50%\r100%\n\x1b[31mred\x1b[0m \xff\xfe\ttab\n")
print("ISATTY", *(os.isatty(number) for number in range(3)), flush=True)
print("SIZE", *os.get_terminal_size(1), flush=True)
while os.get_terminal_size(1).lines == 24: time.sleep(0.01)
print("NEW", *os.get_terminal_size(1), flush=True)
same = os.path.samestat(os.fstat(0), os.fstat(1)) and os.path.samestat(os.fstat(1), os.fstat(2))
print("NAMES", "the same" if same and os.ttyname(0) == os.ttyname(1) else "not the same", flush=True)
print("TTY", "yes" if os.path.exists("/dev/tty") and os.open("/dev/tty", os.O_RDWR) else "no", flush=True)
modes = termios.tcgetattr(1)
modes[3] &= ~termios.ECHO
termios.tcsetattr(1, termios.TCSANOW, modes)
for _ in range(100):
    if not termios.tcgetattr(0)[3] & termios.ECHO: break
    time.sleep(0.01)
print("ECHO", "off" if not termios.tcgetattr(0)[3] & termios.ECHO else "still on", flush=True)
modes[3] |= termios.ECHO
termios.tcsetattr(1, termios.TCSANOW, modes)
sys.stdout.write("your name? "); sys.stdout.flush()
print("HELLO", input(), flush=True)
"""
    with open_console(place, *place.build_command(*small_python(code))) as console:
        before = console.read_modes()
        console.wait_for_pattern(rb"SIZE \d+ \d+\r")
        console.resize(33, 99)
        console.wait_for_pattern(rb"NEW \d+ \d+\r", 4)
        if console.wait_for_pattern(rb"your name\? ", 5):
            console.type_keys(b"ann\n")
        console.wait_for_pattern(rb"HELLO \w+\r", 3)
        console.read_to_end()
        yield repr(console.output.split(b"ISATTY")[0].decode("latin1"))
        lines = console.output.decode(errors="replace").replace("\r", "").splitlines()
        for word in ("ISATTY", "SIZE", "NEW", "NAMES", "TTY", "ECHO", "HELLO"):
            yield next((line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")), "nothing")
        yield "the same" if console.read_modes() == before else "others"


# Answers keys that are typed without Enter, and are not echoed.
CURSES = """
import curses
def run(window):
    window.addstr(0, 0, "is ready")
    window.refresh()
    for number in range(3):
        key = window.getkey()
        window.addstr(number + 1, 0, f"key {number} is {key}.")
        window.refresh()
curses.wrapper(run)
raise SystemExit(5)
"""


@make_experiment(
    "a program that uses the whole terminal (curses)",
    "and in an interactive shell, when it was stopped and continued in between",
    "less",
    "less, and under zerotop run --no-record-output",
)
def full_screen(place: Place) -> Iterator[str]:
    (place.work / "curses_program").write_text(CURSES)
    program = ("python", "-S", "-E", "curses_program")
    with open_console(place, *place.build_command(*program)) as console:
        console.wait_for_pattern(rb"is ready")
        yield f"{answer_keys(console)}, {console.read_to_end()}"
    with interactive_shell(place) as shell:
        shell.type_keys(place.fill_script(f"Z {' '.join(program)}\n").encode())
        shell.wait_for_pattern(rb"is ready")
        shell.type_keys(b"\x1a")
        shell.wait_for_pattern(rb"Stopped")
        shell.type_keys(b"fg\n")
        shell.forget_output()
        shell.wait_for_pattern(rb"\x1b", 5)
        keys = answer_keys(shell)
        shell.type_keys(b"echo code $?.\n")
        yield f"{keys}, {'code 5' if shell.wait_for_pattern(rb'code 5.', 5) else 'another code'}"
    (place.work / "lines").write_text("".join(f"line {number}\n" for number in range(100)))
    for options in ((), ("--no-record-output",)):
        with open_console(place, *place.build_command("less", "lines", options=options)) as console:
            console.wait_for_pattern(rb"line 20")
            console.type_keys(b" ")
            next_page = console.wait_for_pattern(rb"line 40", 3)
            console.type_keys(b"q")
            has_ended = wait_until(lambda: console.process.poll() is not None, 3)
            yield f"turns pages, {console.read_to_end()}" if next_page and has_ended else "does not see keys"


def answer_keys(console: Console) -> str:
    """Type three keys, each when the one before was answered; return how many were."""
    seen = 0
    for number, key in enumerate("xyz"):
        console.type_keys(key.encode())
        # The last may be gone with the program's screen.
        seen += console.wait_for_pattern(rb"key %d is %s\." % (number, key.encode()), 3)
    return f"{seen} keys answered"


@make_experiment("an interactive shell as the job", "and Ctrl-C there ends only its command")
def shell_as_job(place: Place) -> Iterator[str]:
    with open_console(place, *place.build_command("bash", "--norc", "--noprofile", "--noediting", "-i")) as shell:
        shell.type_keys(b"PS1=nex''t; stty -echo; echo is re''ady\n")
        shell.wait_for_pattern(rb"is ready\r\nnext")
        # Not before the command runs: a shell that is about to start it is not interrupted.
        shell.type_keys(b"bash -c 'echo be\"\"gun; exec sleep 20'\n")
        shell.wait_for_pattern(rb"begun\r")
        yield "no job control" if b"no job control" in shell.output else "has job control"
        shell.forget_output()
        shell.type_keys(b"\x03")
        shell.wait_for_pattern(rb"next", 5)
        shell.type_keys(b"echo code $?\n")
        interrupted = shell.wait_for_pattern(rb"code 130\r\nnext", 5)
        shell.type_keys(b"exit 9\n")
        yield f"{'interrupted' if interrupted else 'not interrupted'}, {shell.read_to_end()}"
