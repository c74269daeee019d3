"""DDP sends the buffers of a model from one rank to all others before each forward, and that takes long."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.lines.stack_lines import SHARE, UNSEEN, select_events_in
from zerotop_probe.recording.events import Stacks

_KIND = FindingKind(
    name="buffers_sent",
    confidence=0.85,
    headline="DDP sends the model's buffers before each forward: {share:percent} of the time",
    details=(
        "{inside:.0f} of {samples:.0f} samples of rank {rank} up to step {last_step} were taken there. It has the smallest"
        " share: other ranks may also wait there for a late one."
    ),
    advice=(
        "Tell DDP not to, if they never change, or if each rank may have its own, as of batch normalization. A constant"
        " table may also be a plain attribute of the model instead of a buffer."
    ),
    fix="broadcast_buffers=False",
)
# The fewest samples of whole iterations on each rank that show it, and the smallest share of them.
_FEWEST_SAMPLES, _LEAST_SHARE = 20, 0.1
# It is looked at again with so many times the samples.
_MORE_TIMES = 1.5
_FILE, _FUNCTION = "torch/nn/parallel/distributed.py", "_sync_buffers"


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report it once samples on all ranks show it, and again with more of them."""
    group = window.subject
    if len(group.processes) < 2 or group.engine.parallelism != "DDP":
        return
    each = {process: window.keep(_Counts, process) for process in group.processes}
    for process, counts in each.items():
        counts.add(select_events_in(window.items(process.events_of(Stacks), process), (UNSEEN,), SHARE))
    fewest = min(one.samples for one in each.values())
    if fewest < _FEWEST_SAMPLES or not window.has_grown(fewest, _FEWEST_SAMPLES, _MORE_TIMES - 1, "samples"):
        return
    least: Process = min(each, key=lambda process: each[process].share)
    found, known_ns = each[least], max(one.known_ns for one in each.values())
    rows = group.lead.steps_until(known_ns)
    if found.share >= _LEAST_SHARE and len(rows):
        evidence = {"share": found.share, "inside": float(found.inside), "samples": float(found.samples)}
        values = {"rank": least.rank, "last_step": int(rows["step"][-1])}
        yield _KIND.at_steps(group, rows, evidence, known_ns=known_ns, cost=found.share, **values)


class _Counts:
    """The samples of a rank in whole iterations, and those in which DDP sends buffers."""

    def __init__(self) -> None:
        self.samples = self.inside = self.known_ns = 0

    @property
    def share(self) -> float:
        return self.inside / max(1, self.samples)

    def add(self, sampled: list[Stacks]) -> None:
        """Count what these events show."""
        for event in sampled:
            self.known_ns = max(self.known_ns, event.unix_ns)
            functions = [(frame.file, frame.function.rpartition(".")[2]) for frame in event.frames]
            for stack in event.stacks:
                count = stack.count or 0 if stack.frames else 0  # one without frames shows nothing
                at = [functions[number] for number in stack.frames if 0 <= number < len(functions)]
                self.samples += count
                self.inside += count * ((_FILE, _FUNCTION) in at)
