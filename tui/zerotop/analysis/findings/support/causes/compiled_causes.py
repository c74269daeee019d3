"""A function that ran code of torch.compile before a change, and PyTorch's modules one by one since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from zerotop.analysis.findings.support.causes.step_change import Cause, StepChange
from zerotop.analysis.formatting import Text
from zerotop_probe.recording.event_values import SILENT
from zerotop_probe.recording.events import SampledFrame, Stacks

# Files whose functions run what torch.compile has compiled, those through which a script calls it, and that of modules.
_COMPILED = ("torch/_inductor/output_code.py", "torch/_functorch/_aot_autograd/runtime_wrappers.py")
_CALLED_BY = "torch/_dynamo/eval_frame.py"
_MODULE = "torch/nn/modules/module.py"
# Samples of compiled code in a function before, and of modules since. If half of the time were compiled code, so many
# samples would miss it once in 250 times.
_FEWEST_BEFORE, _FEWEST_SINCE = 5, 8
_CONFIDENCE = 0.9
_ADVICE = (
    "Call the compiled function or model again at {location}; if it is called, it may have been compiled too often:"
    " TORCH_LOGS=recompiles makes it print why."
)

_Function = tuple[str, str]
"""File and name."""


def check_compiled(change: StepChange) -> Cause | None:
    """Return the cause that a function no longer runs compiled code; None before enough samples show that."""
    process, offset_ns = change.process, change.process.source.offset_ns
    changed_ns = int(change.after["begin_unix_ns"][0]) - offset_ns
    known = [one for one in process.events_of(Stacks) if one.why != SILENT and one.unix_ns <= change.latest_ns]
    before = [one for one in known if one.end_ns <= changed_ns]
    compiled, lines = Counter[_Function](), dict[_Function, int]()
    for function, line, count in _list_compiled(before):
        compiled[function] += count
        lines[function] = line
    if change.added_s <= 0 or not compiled:
        return None
    eager_before = _count_eager(before)
    since = [one for one in known if one.begin_ns >= changed_ns]
    still, eager = {function for function, _, _ in _list_compiled(since)}, _count_eager(since)
    for function, count in compiled.most_common():
        is_compiled = count >= max(_FEWEST_BEFORE, eager_before[function])
        if is_compiled and function not in still and eager[function] >= _FEWEST_SINCE:
            location = f"{function[0]}:{lines[function]}"
            text = "{location} ran code of torch.compile in {compiled:.0f} samples before, and runs modules one by one since"
            values = {"location": location, "compiled": count}
            return Cause(Text(text, values), Text(_ADVICE, values), location, _CONFIDENCE)
    return None


def _list_compiled(sampled: Iterable[Stacks]) -> Iterator[tuple[_Function, int, int]]:
    """Yield the function and line from which compiled code was called, and how often it was sampled there."""
    for frames, count in _list_stacks(sampled):
        if _runs(frames, _COMPILED):
            entry = max((depth for depth, one in enumerate(frames) if one.file == _CALLED_BY), default=len(frames))
            for caller in [one for one in frames[entry:] if one.own][:1]:
                yield (caller.file, caller.function), caller.line, count


def _count_eager(sampled: Iterable[Stacks]) -> Counter[_Function]:
    """Return how often each own function was sampled while it ran modules that are not compiled."""
    counts = Counter[_Function]()
    for frames, count in _list_stacks(sampled):
        if _runs(frames, (_MODULE,)) and not _runs(frames, _COMPILED):
            for function in {(one.file, one.function) for one in frames if one.own}:
                counts[function] += count
    return counts


def _list_stacks(sampled: Iterable[Stacks]) -> Iterator[tuple[Sequence[SampledFrame], int]]:
    for event in sampled:
        for stack in event.stacks:
            yield [event.frames[one] for one in stack.frames if 0 <= one < len(event.frames)], stack.count or 0


def _runs(frames: Sequence[SampledFrame], files: tuple[str, ...]) -> bool:
    return any(one.file in files for one in frames)
