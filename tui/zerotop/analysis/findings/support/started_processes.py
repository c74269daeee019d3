"""The line at which a rank started processes in mid-run: the cores that these use are taken by the job itself."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.analysis.findings.support.evidence import Process
from zerotop.analysis.hangs.stacks import StackFrame, list_stacks
from zerotop_probe.recording.events import Stacks

# Functions that start a process which goes on, by their file.
_STARTS = {"multiprocessing/process.py": ("BaseProcess.start", "start"), "subprocess.py": ("Popen.__init__",)}
# They wait until the program has ended.
_WAITS = "subprocess.py", ("run", "call", "check_call", "check_output")
# DataLoader workers are no processes of the script.
_LIBRARIES = "torch/"
STARTED = "Start fewer processes there, or run them with os.nice(19) so that the ranks get their cores first."
"""The advice where these take the ranks' cores."""
# Steps around a change in which the processes were started.
_NEAR_STEPS = 3


def find_start_of_processes(process: Process, step: int, known_ns: int) -> StackFrame | None:
    """Return the line of the job's own code that first started processes near a step; None if no stack shows one."""
    for event in process.events_of(Stacks):
        lines = [_find_line(stack.frames) for stack in list_stacks(event) if not stack.thread]
        found = next((line for line in lines if line is not None), None)
        if found is not None and event.step is not None and event.unix_ns <= known_ns:
            is_near = event.step - _NEAR_STEPS <= step <= (event.last_step or event.step) + _NEAR_STEPS
            return found if is_near else None
    return None


def _find_line(frames: Sequence[StackFrame]) -> StackFrame | None:
    start = next((at for at, one in enumerate(frames) if not one.own and one.function in _STARTS.get(one.file, ())), None)
    own = next((at for at, one in enumerate(frames) if one.own and start is not None and at > start), None)
    between = frames[start:own]
    if own is None or any(one.file.startswith(_LIBRARIES) for one in between):
        return None
    return None if any(one.file == _WAITS[0] and one.function in _WAITS[1] for one in between) else frames[own]
