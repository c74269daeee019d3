"""Run by a launcher: a script several times, each time in a process of its own that starts with its modules imported.

Importing DeepSpeed takes most of the time of a rank that trains for a few steps. Arguments: the runs as JSON, each with its
arguments, its variables of the environment, and the file for its output; the modules, and the script.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from typing import Any


def run_in_child(run: dict[str, Any], script: str) -> None:
    """Run the script as a rank that was started for it alone."""
    output = os.open(run["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(run["variables"])
    sys.argv = [script, *run["arguments"]]
    runpy.run_path(script, run_name="__main__")


def main() -> int:
    runs, modules, script = sys.argv[1:]
    sys.path[0] = os.path.dirname(script)
    for module in modules.split(","):
        importlib.import_module(module)
    gc.freeze()  # each of them would go through all of these objects at its end
    for run in json.loads(runs):
        child = os.fork()
        if not child:
            try:
                run_in_child(run, script)
            except Exception:
                traceback.print_exc()
                return 1
            return 0
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            return abs(code)  # the other ranks may wait for it
    return 0


if __name__ == "__main__":
    sys.exit(main())
