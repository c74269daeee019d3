"""Variables and modules that are meant for the job's Python, or for no Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from conformance.experiment import make_experiment
from conformance.places import Place, join_output, small_python, summarize_observations

# Modules that Python itself loads before it runs anything: with another one it does not start, and no job would.
LOADED_FIRST = {"abc", "codecs", "encodings", "io", "os", "posixpath", "genericpath", "site", "stat", "_collections_abc"}
# Packages that zerotop uses.
OTHERS = ("argcomplete", "numpy", "polars", "psutil", "pynvml", "rich", "textual", "attr", "IPython")
NAMES = sorted({*sys.stdlib_module_names, *OTHERS, "zerotop", "zerotop_probe", "usercustomize"} - LOADED_FIRST)
VARIABLES = {
    "PYTHONINSPECT": "1",
    "PYTHONHOME": "/nowhere",
    "PYTHONEXECUTABLE": "/nowhere/python",
    "PYTHONSTARTUP": "/nowhere/start.py",
    "PYTHONWARNINGS": "error",
    "PYTHONSAFEPATH": "1",
    "PYTHONPLATLIBDIR": "nowhere",
    "PYTHONDEVMODE": "1",
    "PYTHONVERBOSE": "1",
    "PYTHONOPTIMIZE": "2",
    "PYTHONIMPORTTIME": "1",
    "PYTHONPROFILEIMPORTTIME": "1",
    "PYTHONMALLOC": "nonsense",
    "PYTHONHASHSEED": "nonsense",
    "PYTHONUTF8": "nonsense",
    "PYTHONINTMAXSTRDIGITS": "nonsense",
    "PYTHONTRACEMALLOC": "nonsense",
    "PYTHONIOENCODING": "nonsense",
    "PYTHONPYCACHEPREFIX": "/nowhere",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@make_experiment(
    "a job of bash, with modules named as those of the standard library and of zerotop on PYTHONPATH",
    "the same in the working directory",
    "a sitecustomize that prints, with a job of bash",
    "and with a job of Python",
    "a usercustomize that prints, in the user's site-packages",
    f"{len(VARIABLES)} variables that Python reads, each with a job of bash",
)
def observe_own_python(place: Place) -> Iterator[str]:
    for name in ("modules", "site"):
        (place.work / name).mkdir()
    for name in NAMES:
        (place.work / "modules" / f"{name}.py").write_text(f"print('the module {name}')\nraise SystemExit(f'{name}')")
    (place.work / "site" / "sitecustomize.py").write_text("print('site')")
    yield join_output(place.run_shell("PYTHONPATH=$PWD/modules Z bash -c 'echo word; exit 3'"))
    yield join_output(place.run_shell("cd modules; Z bash -c 'echo word; exit 3'"))
    yield join_output(place.run_shell("PYTHONPATH=$PWD/site Z bash -c 'echo word; exit 3'"))
    yield join_output(place.run_shell("PYTHONPATH=$PWD/site Z python -c 'print(3); raise SystemExit(3)'"))
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    user_site = place.folder / "home" / ".local" / "lib" / version / "site-packages"
    user_site.mkdir(parents=True)
    (user_site / "usercustomize.py").write_text("print('user')")
    yield join_output(place.run_shell("Z bash -c 'echo word; exit 3'"))
    seen = [
        (name, join_output(place.run_shell("Z bash -c 'echo word; exit 3'", env=place.environment | {name: value})))
        for name, value in VARIABLES.items()
    ]
    yield summarize_observations(seen, "word, exit 3")


# Prints the environment as the kernel has it, without what zerotop adds for the probe.
PRINT_ENVIRONMENT = """
for entry in open("/proc/self/environ", "rb").read().split(b"\\0"):
    if entry and not entry.startswith((b"PYTHONZEROTOP_", b"PYTHONPATH=", b"CONFORMANCE_PLACE=")): print(entry)
"""


@make_experiment(
    "the environment without any locale, entry by entry",
    "with odd names and values",
    "without any variable",
    "with a variable that has no name: the job runs",
)
def observe_environment(place: Place) -> Iterator[str]:
    mark = {"CONFORMANCE_PLACE": str(place.folder)}
    done = place.run_job(*small_python(PRINT_ENVIRONMENT), env=mark | {"PATH": "/usr/bin:/bin"})
    yield join_output(done)
    odd = {
        b"A-B": b"1",
        b"\xff": b"\xfe",
        b"a.b": b"x\n\ty",
        b"EMPTY": b"",
        b"LC_CTYPE": b"C.UTF-8",
        b"BASH_FUNC_f%%": b"() { :; }",
    }
    given = {os.fsencode(name): os.fsencode(value) for name, value in mark.items()}
    yield join_output(place.run_job(*small_python(PRINT_ENVIRONMENT), env=given | odd))
    done = place.run_shell("env -i Z /usr/bin/env")
    yield ", ".join(line for line in done.output.decode().splitlines() if not line.startswith("PYTHON")) or "nothing"
    yield join_output(place.run_shell("env -i =value PATH=/usr/bin:/bin Z sh -c 'echo word; exit 3'"))
