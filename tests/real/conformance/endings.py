"""How a job ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from conformance.experiment import make_experiment
from conformance.places import Place, describe_ending, name_signal, small_python, summarize_observations

EXIT_CODES = (0, 1, 2, 126, 127, 255, 300)
ENDING_SIGNALS = [signal.Signals[f"SIG{name}"] for name in ["HUP", "INT", "QUIT", "TERM", "KILL", "ABRT", "SEGV", "PIPE"]]
OTHER_SIGNALS = [
    *(
        signal.Signals[f"SIG{name}"]
        for name in [
            "ILL",
            "TRAP",
            "BUS",
            "FPE",
            "USR1",
            "USR2",
            "ALRM",
            "STKFLT",
            "XCPU",
            "XFSZ",
            "VTALRM",
            "IO",
            "PWR",
            "SYS",
        ]
    ),
    signal.SIGRTMIN,
    signal.SIGRTMAX,
]
KILL_ITSELF = """
import os, resource, signal, sys
number = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if number != signal.SIGKILL: signal.signal(number, signal.SIG_DFL)
os.kill(os.getpid(), number)
"""


def end_by(place: Place, number: int) -> str:
    """Run a job that kills itself by a signal."""
    return place.run_job(*small_python(KILL_ITSELF, str(number))).ending


@make_experiment(*(f"the job exits with {code}" for code in EXIT_CODES))
def exit_codes(place: Place) -> Iterator[str]:
    for code in EXIT_CODES:
        yield place.run_job("bash", "-c", f"exit {code}").ending


@make_experiment(*(f"the job dies of {number.name}" for number in ENDING_SIGNALS))
def observe_deaths(place: Place) -> Iterator[str]:
    for number in ENDING_SIGNALS:
        yield end_by(place, number)


@make_experiment("the job dies of any other signal")
def other_deaths(place: Place) -> Iterator[str]:
    seen = []
    for number in OTHER_SIGNALS:
        ending = end_by(place, number)
        seen.append((name_signal(number), "killed by that signal" if ending == describe_ending(-number) else ending))
    yield summarize_observations(seen, "killed by that signal")


@make_experiment(
    "the command does not exist",
    "the command is not executable",
    "the command is a directory",
    "the command is a script without #!",
)
def impossible_commands(place: Place) -> Iterator[str]:
    (place.work / "plain").touch(0o644)
    for command in ("no-such-command", "./plain", "/"):
        yield place.run_shell(f"Z {command}").ending
    (place.work / "script").write_text("exit 4")
    (place.work / "script").chmod(0o755)
    yield place.run_shell("Z ./script").ending


@make_experiment("a script goes on after a job that failed", "a script ends when its job dies of SIGINT")
def in_scripts(place: Place) -> Iterator[str]:
    yield place.run_shell("Z bash -c 'exit 3' || echo code $?").output.decode().strip()
    # Bash ends if, while it waits, it gets SIGINT and its child dies of it.
    script = "Z bash -c 'kill -INT $CALLER $$; sleep 5'; echo the script goes on"
    done = place.run_shell(f"export CALLER=$$; {script}")
    yield f"{done.ending}, {done.output.decode().strip() or 'nothing printed'}"


@make_experiment("a job that ends prints its last words", "and when it dies at once after them")
def last_words(place: Place) -> Iterator[str]:
    code = "import os\nfor i in range(3000): os.write(1, b'%099d\\n' % i)\n"
    for last in ("pass", "os.kill(os.getpid(), 9)"):
        yield f"{len(place.run_job(*small_python(code + last)).output):,} bytes"
