"""The library call in which a rank stood during a pause, where no line of the job's own takes the time."""

from __future__ import annotations

from collections import Counter

from zerotop.analysis.code_line import find_own
from zerotop.analysis.findings.support.causes.step_change import Advice
from zerotop.analysis.findings.support.rank_process import Process
from zerotop.analysis.formatting import Text
from zerotop.recording.events.event_files import select_events
from zerotop_probe.recording.event_values import SLOW
from zerotop_probe.recording.events import Stacks

# Samples outside backward, of which only its beginning is seen, and the share of them in one call.
_FEWEST, _SHARE = 10, 0.8
_BACKWARD = "run_backward"
_CONVOLUTIONS = ("torch.nn.functional.conv", "torch.conv")
_CONVOLUTION: Advice = (
    "Keep the sizes of batches the same, pad them to a few, or let cuDNN choose without trying:",
    "torch.backends.cudnn.benchmark = False",
)
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
    is_convolution = process.is_on_gpu and name.startswith(_CONVOLUTIONS)
    text = "its forward was in {name}"
    if is_convolution:
        return Text(
            f"{text}, which takes long where cuDNN tries its algorithms for a new size", {"name": name}
        ), _CONVOLUTION
    return Text(text, {"name": name}), _NO_ADVICE
