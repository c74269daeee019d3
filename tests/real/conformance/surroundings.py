"""What the job finds: limits, identity, environment, open files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from conformance.experiment import make_experiment
from conformance.places import Place, small_python

# Reports what a process can know of itself.
REPORTER = r"""
import json, os, resource, sys
status = dict(line.rstrip("\n").split(":", 1) for line in open("/proc/self/status"))
def read(path):
    try: return open(path).read().strip()
    except OSError as error: return error.strerror
def link(path):
    try: return os.readlink(path)
    except OSError as error: return error.strerror
stat = read("/proc/self/stat").rsplit(")", 1)[1].split()
names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
namespaces = "cgroup ipc mnt net pid time user uts".split()
descriptors = {}
for number in sorted(map(int, os.listdir("/proc/self/fd"))):
    target = link(f"/proc/self/fd/{number}")
    if number > 2 and not target.startswith("/proc/"): descriptors[number] = target
json.dump({
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
    "folder": os.getcwd(),
    "mask": os.umask(0),
    "nice": os.nice(0),
    "policy": os.sched_getscheduler(0),
    "cores": sorted(os.sched_getaffinity(0)),
    "oom": read("/proc/self/oom_score_adj"),
    "slack": read("/proc/self/timerslack_ns"),
    "personality": read("/proc/self/personality"),
    "core filter": read("/proc/self/coredump_filter"),
    "user": [status[name].split() for name in ("Uid", "Gid", "Groups")],
    "rights": [status.get(name) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")],
    "namespaces": [link(f"/proc/self/ns/{name}") for name in namespaces],
    "control group": read("/proc/self/cgroup"),
    "signals": [int(status[name], 16) & ~(3 << 31) for name in ("SigBlk", "SigIgn", "SigCgt")],
    "session": os.getsid(0), "group": os.getpgrp(), "parent": os.getppid(), "terminal": stat[4], "pid": os.getpid(),
    "arguments": sys.argv, "words": read("/proc/self/cmdline").split("\0"), "program": link("/proc/self/exe"),
    "descriptors": descriptors,
    "environment": dict(os.environ),
}, open(sys.argv[1], "w"))
"""
SETTINGS = (
    "ulimit -S -n 777; ulimit -S -c 0; ulimit -S -s 7000; ulimit -S -f 100000; ulimit -S -u 5000; ulimit -S -t 300;"
    " ulimit -S -v 3000000; ulimit -S -l 32; umask 037; cd /; exec 3< /etc/passwd 5> /dev/null;"
    " echo 300 > /proc/self/oom_score_adj; exec nice -n 3 chrt --batch 0 taskset -c 0 "
)
PLAIN = {
    "soft and hard limits (ulimit -a)": "limits",
    "working directory": "folder",
    "umask": "mask",
    "nice value": "nice",
    "scheduling policy": "policy",
    "CPU affinity": "cores",
    "OOM score adjustment": "oom",
    "timer slack": "slack",
    "personality": "personality",
    "core dump filter": "core filter",
    "user and groups": "user",
    "capabilities, no_new_privs, seccomp": "rights",
    "namespaces": "namespaces",
    "control group": "control group",
    "signal mask and dispositions": "signals",
    "arguments": "arguments",
    "the kernel's command line": "words",
    "program": "program",
    "descriptors from 3 on that the caller passes, and no others": "descriptors",
}


def read_facts(place: Place, name: str) -> dict[str, Any]:
    """Read what a reporter has written; its own file name is left out."""
    content = json.loads((place.work / name).read_text())
    assert isinstance(content, dict)
    words = json.dumps(content).replace(name, "FILE")
    found = json.loads(words)
    assert isinstance(found, dict)
    return found


def compare_facts(caller: Any, job: Any) -> str:
    """Return "the caller's", or how the job's differ."""
    if caller == job:
        return "the caller's"
    if isinstance(caller, dict) and isinstance(job, dict):
        differing = sorted(key for key in caller | job if caller.get(key) != job.get(key))
        return f"others: {', '.join(map(str, differing))}"
    return f"others: {job}"


@make_experiment(
    *PLAIN,
    "session",
    "process group",
    "parent",
    "variables of the environment that differ from the caller's",
)
def observe_inherited(place: Place) -> Iterator[str]:
    reporter = shlex.join(small_python(REPORTER))
    # The first reporter is what the caller itself starts.
    script = f"echo $$ > shell; ({SETTINGS} {reporter} {place.work}/caller); ({SETTINGS} Z {reporter} {place.work}/job)"
    place.run_shell(script, env=place.environment | {"RANK_OF_USER": "7", "EMPTY": "", "ODD_ÄÖ": "a b\nc"})
    caller, job = read_facts(place, "caller"), read_facts(place, "job")
    shell = int((place.work / "shell").read_text())
    for name in PLAIN.values():
        yield compare_facts(caller[name], job[name])
    yield "the caller's" if job["session"] == shell else "another"
    yield "the caller's" if job["group"] == shell else "another"
    yield "the caller" if job["parent"] == shell else "zerotop"
    before, after = caller["environment"], job["environment"]
    yield ", ".join(sorted(name for name in before | after if before.get(name) != after.get(name))) or "none"
