"""Python jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from conformance.experiment import make_experiment
from conformance.places import Place, read_soon, wait_until
from loop_runs import LOOPS

# Without what differs from run to run.
STATE = """
import json, os, signal, sys, threading, gc, atexit
print(json.dumps({
    "path": [entry for entry in sys.path],
    "flags": str(sys.flags),
    "hooks": [str(sys.excepthook), str(sys.displayhook), str(sys.gettrace()), str(sys.getprofile())],
    "threads": len(threading.enumerate()),
    "handlers": str([signal.getsignal(number) for number in range(1, 32)]),
    "encodings": [sys.stdout.encoding, sys.stdout.errors, sys.getfilesystemencoding(), sys.stdin.encoding],
    "main": sorted(vars(sys.modules["__main__"])),
    "thresholds": gc.get_threshold(),
    "recursion": sys.getrecursionlimit(),
    "switch": sys.getswitchinterval(),
    "argv": sys.argv,
}))
"""


@make_experiment(
    "sys.path",
    "sys.flags",
    "excepthook, displayhook, trace and profile functions",
    "threads",
    "signal handlers",
    "encodings of the streams",
    "names in __main__",
    "garbage collector, recursion limit, switch interval",
    "python -E, -I and -S",
    "LD_PRELOAD reaches the job",
)
def observe_state(place: Place) -> Iterator[str]:
    (place.work / "state.py").write_text(STATE)
    plain = place.run_shell("python state.py one two").output
    job = place.run_shell("Z python state.py one two").output
    caller, seen = json.loads(plain), json.loads(job)
    for names in (
        ["path"],
        ["flags"],
        ["hooks"],
        ["threads"],
        ["handlers"],
        ["encodings"],
        ["main"],
        ["thresholds", "recursion", "switch", "argv"],
    ):
        yield (
            "as alone" if all(caller[name] == seen[name] for name in names) else f"others: {[seen[name] for name in names]}"
        )
    codes = [
        place.run_shell(f"Z python {option} -c 'import json; raise SystemExit(7)'").ending for option in ("-E", "-I", "-S")
    ]
    yield ", ".join(codes)
    done = place.run_shell(
        "LD_PRELOAD=libm.so.6 Z bash -c 'echo $LD_PRELOAD; grep -c libm.so /proc/self/maps > /dev/null && echo loaded'"
    )
    yield ", ".join(done.output.decode().split())


@make_experiment(
    "the user's sitecustomize is run, once",
    "a module in the user's PYTHONPATH is imported",
    "print() to a pipe arrives at once",
    "PYTHONUNBUFFERED that the user has set to empty",
    "an uncaught exception's traceback",
    "Ctrl-C (SIGINT) ends it by KeyboardInterrupt, once",
    "children by subprocess, fork and spawn print",
    "the locale",
    "warnings as errors (-W error)",
    "modules that are loaded at start besides its own",
)
def observe_programs(place: Place) -> Iterator[str]:
    (place.work / "lib").mkdir()
    (place.work / "lib" / "sitecustomize.py").write_text("print('site')")
    (place.work / "lib" / "own.py").write_text("WORD = 'own'")
    environment = place.environment | {"PYTHONPATH": f"{place.work}/lib:{place.environment.get('PYTHONPATH', '')}"}

    def run_script(script: str, **options: dict[str, str]) -> str:
        done = place.run_shell(script, **options)
        return ", ".join((*done.output.decode().splitlines(), done.ending))

    yield run_script("Z python -c 'print(3)'", env=environment)
    yield run_script("Z python -c 'import own; print(own.WORD)' | tail -1", env=environment)
    late = "import time; print('first'); open('printed', 'w').close(); time.sleep(3)"
    with place.start_job("python", "-c", late) as process:
        wait_until((place.work / "printed").exists)
        at_once = read_soon(process.stdout, 5, 1)
        later = at_once or read_soon(process.stdout, 5)
        yield "at once" if at_once else "when its buffer is full or it ends" if later else "never"
    yield run_script("PYTHONUNBUFFERED= Z python -c 'import os; print([os.environ[\"PYTHONUNBUFFERED\"]])'")
    done = place.run_shell("Z python -c 'def f(): raise ValueError(3)\nf()'")
    yield f"{done.errors.decode().splitlines()[0]} ... {done.errors.decode().splitlines()[-1]}, {done.ending}"
    code = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)"
    (place.work / "interrupted").write_text(code)
    done = place.run_shell("Z python interrupted")
    yield f"{done.errors.count(b'KeyboardInterrupt')} KeyboardInterrupt, {done.ending}"
    (place.work / "children.py").write_text(
        "import multiprocessing, subprocess, sys\n"
        "if __name__ == '__main__':\n"
        "    subprocess.run([sys.executable, '-c', 'print(1)'])\n"
        "    for way in ('fork', 'spawn'):\n"
        "        child = multiprocessing.get_context(way).Process(target=print, args=(way,))\n"
        "        child.start(); child.join()\n"
    )
    yield run_script("Z python children.py")
    yield run_script("LC_ALL=C Z python -c 'import locale, sys; print(locale.setlocale(0), sys.stdout.encoding)'")
    yield run_script("Z python -W error -c 'print(3)'")
    code = 'import sys; print(len([name for name in sys.modules if "zerotop" in name]), "of zerotop")'
    yield run_script(f"Z python -c '{code}'")


@make_experiment(
    "exceptions that signal handlers and other threads raise in its training steps",
    "and their tracebacks",
)
def observe_exceptions(place: Place) -> Iterator[str]:
    """In loops of PyTorch, under zerotop with the probe inside."""
    done = place.run_shell(f"Z python {LOOPS}/interrupted.py loop alarm,kill_thread,interrupt_main,set_exception 30")
    line = next((line for line in done.output.decode().splitlines() if line.startswith("COUNTED ")), "")
    facts = json.loads(line.partition(" ")[2] or '{"raised": {}, "shown": []}')
    counts = list(facts["raised"].values())
    yield "each is caught once" if counts and all(raised == caught > 0 for raised, caught in counts) else str(counts)
    yield ", ".join(facts["shown"]) or "only PyTorch's frames and its own"
