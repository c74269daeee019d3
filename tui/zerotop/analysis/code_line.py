"""A line of the job's own code, and the names of the functions beneath it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import ClassVar, NamedTuple

from zerotop_probe.recording.events import CodePlace, SampledFrame, SampledStack

# A comprehension, a generator expression or a lambda at the end of a function's name.
_EXPRESSION = re.compile(r"(\.<locals>)?\.<\w+>$")
# Of a longer path a headline has only the end.
_LONGEST_PLACE = 20
# Folders of libraries that train, which may lie beside a job's code.
_LIBRARY_FOLDERS = ("torch/", "deepspeed/", "accelerate/", "transformers/", "trl/", "peft/", "lightning/")
# PyTorch's functions around those that are called: what a script calls with each.
_WRAPPERS = {
    "torch.optim.Optimizer.profile_hook_step.<locals>.wrapper": "torch.optim.Optimizer.step",
    "torch.optim.LRScheduler.__init__.<locals>.patch_track_step_called.<locals>.wrap_step.<locals>.wrapper": (
        "torch.optim.Optimizer.step"
    ),
}
# Modules of torch that its users name.
_NAMED_MODULES = ("functional",)


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of the job's own code, and the functions beneath it."""

    file: str
    line: int
    function: str
    callees: tuple[str, ...]  # the function that the line calls, the one that this calls, and so on; empty for none

    _VERB: ClassVar[str] = "calls "

    @property
    def location(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    @property
    def place(self) -> str:
        """File and line, short enough for a headline."""
        whole = self.location
        if len(whole) > _LONGEST_PLACE:
            whole = f"{PurePosixPath(self.file).name}:{self.line}"
        return whole if len(whole) <= _LONGEST_PLACE else f"...{whole[3 - _LONGEST_PLACE :]}"

    @property
    def text(self) -> str:
        """The line in a sentence: ``train.py:88 in build_batch (calls time.sleep)``."""
        name = _EXPRESSION.sub("", self.function).rpartition("<locals>.")[2]
        function = "" if name == "<module>" else f" in {name}"
        return f"{self.location}{function}{f' ({self._VERB}{self.called})' if self.called else ''}"

    @property
    def called(self) -> str:
        """The called function that a sentence names, as scripts write it; empty if there is none."""
        names = (_WRAPPERS.get(name, name) for name in self.callees)
        return next((name for name in names if "<locals>" not in name), "")


class OwnFrame(NamedTuple):
    """The innermost frame of the job's own code, and the functions beneath it, outermost first."""

    file: str
    line: int
    function: str
    callees: tuple[str, ...]
    is_hook: bool = False  # whether PyTorch called it beside what the model, loss and optimizer compute


def read_line(place: CodePlace) -> CodeLine | None:
    """Return the line that an event names; None if it is unknown or no text to show."""
    file, line, function = place.file, place.line, place.function or "<module>"
    if not file or not line or not (file.isprintable() and function.isprintable()):
        return None
    return CodeLine(file, line, function, ())


# Files of PyTorch that call hooks, and the functions of own classes that they call for the computing itself.
MODULE_CALLER = "torch/nn/modules/module.py"
_HOOK_CALLERS = (MODULE_CALLER, "torch/autograd/graph.py", "torch/utils/hooks.py", "torch/optim/optimizer.py")
_COMPUTING = ("forward", "backward", "step")


def find_own(frames: Sequence[SampledFrame], stack: SampledStack, *, outside_model: bool = False) -> OwnFrame | None:
    """Return the innermost own frame of a stack of an event; None without one.

    ``outside_model``: the frame that calls the model, where a stack goes through one.
    """
    callees = [stack.call] if stack.call else []
    numbers = stack.frames
    if outside_model:
        calls = [depth for depth, number in enumerate(numbers) if 0 <= number < len(frames) and _calls_model(frames[number])]
        numbers, callees = (numbers[calls[-1] + 1 :], []) if calls else (numbers, callees)
    known = [frames[number] for number in numbers if 0 <= number < len(frames)]
    # A library that the job imports from a folder of its own counts only where none of the job's own lines called it.
    skipped = _LIBRARY_FOLDERS if any(one.own and not one.file.startswith(_LIBRARY_FOLDERS) for one in known) else ()
    for depth, number in enumerate(numbers):
        if not 0 <= number < len(frames):
            return None
        frame = frames[number]
        if frame.own and not frame.file.startswith(skipped):
            is_hook = _is_hook([frames[one] for one in numbers[depth:] if 0 <= one < len(frames)])
            own = OwnFrame(frame.file, frame.line, frame.function, tuple(callees), is_hook)
            is_clean = all(name.isprintable() for name in (own.file, own.function, *callees))
            return own if is_clean else None
        callees.insert(0, name_function(frame.file, frame.function))
    return None


def runs_model(frames: Sequence[SampledFrame], stack: SampledStack) -> bool:
    """Return whether a stack of an event runs modules within a module: a model, unlike a loss."""
    known = [_calls_model(frames[number]) for number in stack.frames if 0 <= number < len(frames)]
    return [is_call for is_call, _ in groupby(known)].count(True) > 1


def list_own(frames: Sequence[SampledFrame], stack: SampledStack) -> list[tuple[str, int, str]]:
    """Return the own lines of a stack of an event, outermost first: file, number and function."""
    known = (frames[number] for number in reversed(stack.frames) if 0 <= number < len(frames))
    return [(frame.file, frame.line, frame.function) for frame in known if frame.own]


def _calls_model(frame: SampledFrame) -> bool:
    return frame.file == MODULE_CALLER and not frame.own


def _is_hook(frames: Sequence[SampledFrame]) -> bool:
    """Whether PyTorch called the outermost of the own frames that these begin with as a hook."""
    for inner, outer in pairwise(frames):
        if not outer.own:
            is_computing = inner.function.rpartition(".")[2] in _COMPUTING
            return outer.file in _HOOK_CALLERS and not is_computing
    return False


def name_function(file: str, function: str) -> str:
    """Return the full name of a library's function; for torch without the module, as users write it."""
    path = PurePosixPath(file)
    parts = [*path.parent.parts, path.stem]
    is_short = len(parts) > 1 and (parts[0] == "torch" or parts[-1] == "__init__") and parts[-1] not in _NAMED_MODULES
    return ".".join([*parts[: -1 if is_short else None], function])
