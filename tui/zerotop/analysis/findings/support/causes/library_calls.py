"""The library call in which a rank stood during a pause, where no line of the job's own takes the time."""

from __future__ import annotations

from collections import Counter

from zerotop.analysis.code_line import find_own
from zerotop.analysis.findings.support.causes.step_change import Advice
from zerotop.analysis.findings.support.rank_process import Process
from zerotop.analysis.formatting import Text
from zerotop.analysis.steps.training_changes import describe_changes
from zerotop.recording.events.event_files import select_events
from zerotop_probe.recording.event_values import SLOW
from zerotop_probe.recording.events import Stacks, TorchFlags

# Samples outside backward, of which only its beginning is seen, and the share of them in one call.
_FEWEST, _SHARE = 10, 0.8
_BACKWARD = "run_backward"
_CONVOLUTIONS = ("torch.nn.functional.conv", "torch.conv")
_CONVOLUTION: Advice = (
    "Keep the sizes of batches the same, pad them to a few, or let cuDNN choose without trying:",
    "torch.backends.cudnn.benchmark = False",
)
_SWITCH = "cudnn.benchmark"
_NO_ADVICE: Advice = ("", "")


def find_library_call(process: Process, begin_ns: int, end_ns: int, known_ns: int) -> tuple[Text, Advice] | None:
    """Return the call in which most samples of a pause were taken, as a clause, and advice; None if none has most."""
    offset_ns, counts = process.source.offset_ns, Counter[str]()
    for event in select_events(process.events_of(Stacks), begin_ns, known_ns):
        if event.why == SLOW and event.begin_ns + offset_ns < end_ns:
            for stack in event.stacks:
                own = find_own(event.frames, stack)
                if own is not None and own.callees and own.callees[-1] != _BACKWARD:
                    counts[own.callees[-1]] += stack.count or 0
    (name, count), *_ = counts.most_common(1) or [("", 0)]
    if count < max(_FEWEST, _SHARE * counts.total()):
        return None
    flags = [flag.cudnn_benchmark for flag in process.events_of(TorchFlags) if flag.unix_ns <= known_ns]
    switched = [one for one in process.find_changes(0, end_ns, known_ns) if one.name == _SWITCH]
    is_off = False in flags and not switched
    is_convolution = process.is_on_gpu and name.startswith(_CONVOLUTIONS) and not is_off
    text = "its forward was in {name}"
    if is_convolution:
        began = [one for one in switched if one.after == "True" and one.end_ns >= begin_ns]
        values = {"name": name, "change": describe_changes(began) or None}
        text += ", which takes long where cuDNN tries its algorithms for a new size[; since then {change}]"
        return Text(text, values), _CONVOLUTION
    return Text(text, {"name": name}), _NO_ADVICE
