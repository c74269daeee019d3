"""The optimizer is made anew in each step, as to change its learning rate: it never has the state of earlier steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerotop.analysis.code_line import CodeLine
from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.causes.training_causes import OPTIMIZER_REMADE, REMADE
from zerotop.analysis.steps.training_changes import TrainingChange, list_changes
from zerotop_probe.recording.events import EngineOptimizer, TrainingChanged

_KIND = FindingKind(
    name=OPTIMIZER_REMADE,
    confidence=0.95,
    headline="The optimizer is made anew in each step[ {since}][: {place}]",
    details=(
        "Each of {looks:,.0f} looks up to step {last_step} found a new one, made in the step just after the look before."
        "[ {line} makes it.] Unless it loads the state of the one before, {lost}."
    ),
    advice=(
        "Make it once, before the loop. To change the learning rate, set that of its groups or use a scheduler; to train"
        " further parameters, use add_param_group()."
    ),
    fix="torch.optim.lr_scheduler.LambdaLR(optimizer, factor)",
)
_MOMENTS = "its moments and its count of steps begin at 0 in each step: each update is a first one"
_STATE = "its state, such as momentum, begins at 0 in each step"
# Looks in a row that find a new one, each made within the step after the look before. It is told again with twice as many.
_LEAST_LOOKS = 5


@dataclass
class _Chain:
    """Looks in a row that found a new optimizer."""

    first: TrainingChange | None = None
    line: CodeLine | None = None
    looked_step: int = -1
    looks: int = 0

    def add(self, group: Group, event: TrainingChanged) -> bool:
        """Add a look at which something had changed. Returns whether the chain is to be told, or told again."""
        made = next((one for one in list_changes([event], group.lead.source.offset_ns) if one.name in REMADE), None)
        begin_ns = event.begin_ns + group.lead.source.offset_ns
        if made is None or made.begin_ns != made.end_ns:
            self.first, self.looks = None, 0
            return False
        is_at_once = group.lead.step_at(begin_ns) == group.lead.step_at(made.begin_ns)
        if self.first is None or event.last_step != self.looked_step or not is_at_once:
            self.first, self.looks = made, 0
        self.looked_step, self.line, self.looks = event.step, made.line, self.looks + 1
        return self.looks >= _LEAST_LOOKS and self.looks % (1 << (self.looks // _LEAST_LOOKS).bit_length() - 1) == 0


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report it once it is sure that it is made in each step, if it is of a class that keeps a state."""
    group = window.subject
    chain = window.keep(_Chain)
    for event in window.items(group.lead.events_of(TrainingChanged)):
        optimizers = group.engine.optimizers or ()
        # If there are several, those of an inner loop may be made anew on purpose.
        if chain.add(group, event) and len(optimizers) == 1 and _keeps_state(optimizers[0]):
            yield _build(group, chain, event, optimizers[0].class_ or "")


def _keeps_state(optimizer: EngineOptimizer) -> bool:
    return optimizer.class_ != "SGD" or bool((optimizer.settings or {}).get("momentum"))


def _build(group: Group, chain: _Chain, event: TrainingChanged, name: str) -> Finding:
    first, line = chain.first, chain.line
    begin_ns = first.begin_ns if first is not None else event.unix_ns
    step = group.lead.step_at(begin_ns)
    values: dict[str, Any] = {"place": line.place if line is not None else None, "last_step": event.step}
    values |= {"line": line.text if line is not None else None}
    values["lost"] = _MOMENTS if "adam" in name.lower() else _STATE
    values["since"] = f"since step {step}" if step is not None and step > 1 else None
    return _KIND.at(group, begin_ns, event.unix_ns, {"looks": chain.looks}, **values)
