"""The line of the job's own model at which forward spends most of its time."""

from __future__ import annotations

from collections import Counter

from zerotop.analysis.code_line import MODULE_CALLER, CodeLine, OwnFrame, find_own
from zerotop.analysis.findings.support.lines.stack_lines import SHARE, UNSEEN, select_events_in
from zerotop.analysis.findings.support.rank_process import Process
from zerotop.recording.events.event_files import select_events
from zerotop_probe.recording.events import SampledStack, Stacks

# The samples of the line: their number, and their share of all those in forward.
_FEWEST_SAMPLES, _MOST_SHARE = 8, 0.75
_BACKWARD_FILES = ("torch/autograd/", "torch/_tensor.py")
_MODULES = "torch.nn.modules."


def find_forward_line(process: Process, known_ns: int) -> CodeLine | None:
    """Return that line, from samples of usual slowness; None if there is none, or if modules that it calls take the time."""
    own: Counter[OwnFrame] = Counter()
    lines: Counter[tuple[str, int]] = Counter()
    total = 0
    sampled = select_events(process.events_of(Stacks), 0, known_ns)
    for event in select_events_in(sampled, ("forward", UNSEEN), SHARE):
        for stack in event.stacks:
            depth = _find_outermost_module(event, stack)
            if depth is not None:
                total += stack.count or 0
                found = find_own(event.frames, stack)
                if found is not None and _is_within(found, stack, depth):
                    own[found] += stack.count or 0
                    lines[found.file, found.line] += stack.count or 0
    if not lines:
        return None
    line, count = lines.most_common(1)[0]
    if count < max(_FEWEST_SAMPLES, _MOST_SHARE * total):
        return None
    most = max((one for one in own if (one.file, one.line) == line), key=lambda one: own[one])
    return CodeLine(most.file, most.line, most.function, most.callees)


def _find_outermost_module(event: Stacks, stack: SampledStack) -> int | None:
    """Return at which depth a stack enters the model; None if it does not, or from backward, which may run forward again."""
    files = [event.frames[number].file if 0 <= number < len(event.frames) else "" for number in stack.frames]
    if any(file.startswith(_BACKWARD_FILES) for file in files):
        return None
    return max((depth for depth, file in enumerate(files) if file == MODULE_CALLER), default=None)


def _is_within(own: OwnFrame, stack: SampledStack, depth: int) -> bool:
    """Whether a module called the frame, which calls none itself."""
    beneath = len(own.callees) - bool(stack.call)
    return beneath < depth and not any(name.startswith(_MODULES) for name in own.callees)
