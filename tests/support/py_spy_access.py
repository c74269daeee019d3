"""A check of whether py-spy can be used here."""

from __future__ import annotations

import subprocess
import sys

from zerotop_probe.outside.sampling.stuck import py_spy


def can_read_others() -> bool:
    """Return whether py-spy may read processes that it has not started."""
    program = py_spy.find_program()
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        stacks = py_spy.dump_stacks(program, child.pid) if program is not None else None
        child.kill()
    return stacks is not None
