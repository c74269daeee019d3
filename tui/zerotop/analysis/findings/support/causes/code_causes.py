"""Code that runs since a change in place of other code, from samples of stacks before and since.

A function that ran code of torch.compile, and runs PyTorch's modules one by one since.

A line that runs a model in place of another line of the same function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from zerotop.analysis.code_line import CodeLine
from zerotop.analysis.findings.support.causes.step_change import Cause, StepChange
from zerotop.analysis.findings.support.evidence import Process
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
# The last events with samples that are read on each side: a change is judged again and again while it lasts.
_MOST_EVENTS = 24
# Samples of a line before, and of the one in its place since, and their share of those of their function that run modules.
_FEWEST_OF_LINE, _LINE_SHARE = 8, 0.8
# The share of all samples since that are of the new line: it takes so much of the time.
_TIME_SHARE = 0.5
# Samples of a new line that runs a model, and how many there would have been before if it had run then: e**-4 is 2 %.
_FEWEST_OF_NEW, _EXPECTED_BEFORE = 3, 4.0
# By how many standard deviations the share of a line must have risen: of so many lines none does by chance.
_DEVIATIONS = 3.0
_REPLACED_ADVICE = "See what {location} does in place of line {old:.0f}: it runs in each iteration, and takes longer."
_ADVICE = (
    "Call the compiled function or model again at {location}; if it is called, it may have been compiled too often:"
    " TORCH_LOGS=recompiles makes it print why."
)

_Function = tuple[str, str]
"""File and name."""
_Line = tuple[str, str, int]
"""File, function and number."""


def check_code(change: StepChange) -> Cause | None:
    """Return the cause that other code runs since a slowdown; None before enough samples show that."""
    before, since = _select_samples(change, change.process)
    if change.added_s <= 0 or not before or not since:
        return None
    return _find_uncompiled(before, since) or _find_replaced(before, since)


def _select_samples(change: StepChange, process: Process) -> tuple[Sequence[Stacks], Sequence[Stacks]]:
    """Return the last events with samples of a rank before a change, and since then."""
    offset_ns = process.source.offset_ns
    changed_ns, latest_ns = int(change.after["begin_unix_ns"][0]) - offset_ns, change.latest_ns
    known = [one for one in process.events_of(Stacks) if one.why != SILENT and one.unix_ns <= latest_ns]
    before = [one for one in known if one.end_ns <= changed_ns][-_MOST_EVENTS:]
    since = [one for one in known if one.begin_ns >= changed_ns][-_MOST_EVENTS:]
    return before, since


def find_new_forward(change: StepChange, process: Process) -> CodeLine | None:
    """Return the own line that runs a model more often since a change, as its share of the samples shows, or only since."""
    before, since = _select_samples(change, process)
    old, new = _count_callers(before), _count_callers(since)
    line, count = next(((line, count) for line, count in new.most_common() if line not in old), (None, 0))
    if line is None or count < _FEWEST_OF_NEW or old.total() * count < _EXPECTED_BEFORE * new.total():
        line = _find_risen(old, new)
    if line is None:
        return None
    file, function, number = line
    return CodeLine(file, number, function, ())


def _find_risen(old: Counter[_Line], new: Counter[_Line]) -> _Line | None:
    """Return the line whose share of the samples has risen most, by more than chance; None without one."""
    totals = old.total(), new.total()
    if min(totals) < _FEWEST_OF_LINE:
        return None
    line = max(new, key=lambda one: new[one] / totals[1] - old[one] / totals[0])
    share = (old[line] + new[line]) / sum(totals)
    deviation = (share * (1 - share) * sum(1 / total for total in totals)) ** 0.5
    return line if new[line] / totals[1] - old[line] / totals[0] > _DEVIATIONS * deviation else None


def _count_callers(sampled: Iterable[Stacks]) -> Counter[_Line]:
    """Return how often each own line, with its file and function, was sampled as the innermost that runs modules."""
    counts = Counter[_Line]()
    for frames, count in _list_stacks(sampled):
        inner = max((depth for depth, one in enumerate(frames) if one.file == _MODULE), default=len(frames))
        for one in [one for one in frames[inner:] if one.own][:1]:
            counts[one.file, one.function, one.line] += count
    return counts


def _find_uncompiled(before: Sequence[Stacks], since: Sequence[Stacks]) -> Cause | None:
    compiled, lines = Counter[_Function](), dict[_Function, int]()
    for function, line, count in _list_compiled(before):
        compiled[function] += count
        lines[function] = line
    if not compiled:
        return None
    eager_before = _count_eager(before)
    still, eager = {function for function, _, _ in _list_compiled(since)}, _count_eager(since)
    for function, count in compiled.most_common():
        is_compiled = count >= max(_FEWEST_BEFORE, eager_before[function])
        if is_compiled and function not in still and eager[function] >= _FEWEST_SINCE:
            location = f"{function[0]}:{lines[function]}"
            text = "{location} ran code of torch.compile in {compiled:.0f} samples before, and runs modules one by one since"
            values = {"location": location, "compiled": count}
            return Cause(Text(text, values), Text(_ADVICE, values), location, _CONFIDENCE, is_code=True)
    return None


def _find_replaced(before: Sequence[Stacks], since: Sequence[Stacks]) -> Cause | None:
    old, new = _count_lines(before), _count_lines(since)
    total = sum(count for _, count in _list_stacks(since))
    for function in [one for one in new if one in old]:
        (old_line, old_count), (new_line, new_count) = old[function].most_common(1)[0], new[function].most_common(1)[0]
        enough = [
            count >= max(_FEWEST_OF_LINE, _LINE_SHARE * lines.total())
            for count, lines in ((old_count, old[function]), (new_count, new[function]))
        ]
        is_replaced = new_line not in old[function] and old_line not in new[function]
        if is_replaced and all(enough) and new_count >= _TIME_SHARE * total:
            location = f"{function[0]}:{new_line}"
            values = {"location": location, "old": old_line}
            text = Text("{location} began to run in place of line {old:.0f}", values)
            return Cause(text, Text(_REPLACED_ADVICE, values), location, _CONFIDENCE, is_code=True)
    return None


def _count_lines(sampled: Iterable[Stacks]) -> dict[_Function, Counter[int]]:
    """Return how often each line of each own function was sampled while it ran modules."""
    counts: dict[_Function, Counter[int]] = {}
    for frames, count in _list_stacks(sampled):
        inner = max((depth for depth, one in enumerate(frames) if one.file == _MODULE), default=len(frames))
        for one in frames[inner:]:
            if one.own:
                counts.setdefault((one.file, one.function), Counter())[one.line] += count
    return counts


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
