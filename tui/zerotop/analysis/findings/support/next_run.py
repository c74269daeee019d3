"""Advice of a finding once its job has ended: what to do in the next run, if the fix needs a live process."""

from __future__ import annotations

from typing import NamedTuple


class _Advice(NamedTuple):
    """Advice for the next run. ``advice`` is None if that of the finding still applies."""

    advice: str | None
    fix: str


_RECORD_STACKS = _Advice(None, "py-spy record --subprocesses -o stacks.svg -- {command}")
_SEE_STACKS = _Advice(
    "Record the next run, too: if it hangs, the Ranks screen shows the line of each rank.",
    "zerotop run -- {command}",
)
_CHOOSE_GPU = _Advice(
    "Before the next run, see who uses the GPUs, and choose free ones with CUDA_VISIBLE_DEVICES.", "nvidia-smi"
)
# By the name of the finding ("" for any) and how its fix begins. The first one counts.
_BY_FIX = (
    ("hung_ranks", "py-spy dump", _SEE_STACKS),
    ("", "py-spy dump", _RECORD_STACKS),
    ("", "py-spy record --pid", _RECORD_STACKS),
    ("", "ps -o", _CHOOSE_GPU),
    ("others_on_gpu", "nvidia-smi", _CHOOSE_GPU),
    ("", "kill -CONT", _Advice("Find out what sent SIGSTOP: a scheduler that suspends jobs, or Ctrl-Z in a terminal.", "")),
    (
        "",
        "taskset",
        _Advice("Give each rank cores of its own in the next run, and keep other processes off them.", "{own_cores_fix}"),
    ),
)


def advise_next_run(name: str, advice: str, fix: str) -> tuple[str, str]:
    """Return advice and fix (templates) for the next run; unchanged if they need no live process."""
    for finding, begin, later in _BY_FIX:
        if finding in ("", name) and fix.startswith(begin):
            return advice if later.advice is None else later.advice, later.fix
    return advice, fix
