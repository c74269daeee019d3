"""The variable that keeps leaked device memory, and the advice that lets the memory go."""

from __future__ import annotations

from typing import NamedTuple

from zerotop.analysis.memory.tensor_inventory import HeldTensors, read_held
from zerotop_probe.recording.events import Tensors

KEEP_NUMBERS = "Keep numbers instead of tensors where losses or outputs are collected: loss.item() in place of loss."
"""The advice where the variable is unknown."""

# The part of the leaked memory that a variable must hold, in this many tensors.
_HELD_SHARE, _LEAST_HELD = 0.5, 3


class LeakAdvice(NamedTuple):
    """Advice about a variable: a sentence or two, and what to copy into the script; "" if that is not known."""

    text: str
    fix: str


def choose_holder(event: Tensors, leaked_bytes: int) -> HeldTensors | None:
    """Return the variable that holds most of the bytes that had leaked when tensors were counted; None if none does."""
    several = [one for one in read_held(event) if one.count >= _LEAST_HELD]
    holder = max(several, key=lambda one: one.bytes, default=None)
    if holder is not None and holder.bytes >= _HELD_SHARE * leaked_bytes:
        return holder
    # What a graph keeps is not counted to its end: a variable with graphs is meant if it is the only one.
    with_graphs = [one for one in several if one.keeps_graph]
    return with_graphs[0] if len(with_graphs) == 1 else None


def describe_holder(holder: HeldTensors) -> str:
    """Return sentences about the tensors in a variable when they were counted, and the line that adds to it."""
    text = f"{holder.text[:1].upper()}{holder.text[1:]}"
    counted = f" in step {holder.step}" if holder.step is not None else ""
    graph = ", with the graphs that computed them" if holder.keeps_graph else ""
    sentences = (
        f"{text} kept {holder.count:,} tensors{counted}{graph}{f'; {holder.line} adds to it' if holder.line else ''}."
    )
    if not holder.view_of:
        return sentences
    view, block = (" x ".join(f"{size:,}" for size in sizes) for sizes in (holder.shape, holder.view_of))
    elements = " elements" if len(holder.view_of) == 1 else ""
    return f"{sentences} A view of {view} keeps a block of {block}{elements}."


def advise_on_line(place: str) -> LeakAdvice:
    """Return the advice about the line that allocates what leaks, where the variable is unknown."""
    return LeakAdvice(
        f"Keep numbers, or copies on the host, instead of what {place} allocates; del what is no longer needed.", ""
    )


def advise_on_holder(holder: HeldTensors) -> LeakAdvice:
    """Return the advice about the variable that keeps leaked memory."""
    name = holder.name
    # An attribute is named by its class: what the script calls the object is unknown.
    variable = name if name.isidentifier() else f"self.{name.rpartition('.')[2]}"
    is_list = " list " in f" {holder.text.partition(name)[0]} " and not holder.text.startswith("a ")
    fix = f"{variable}.clear()" if is_list else ""
    if holder.view_of:
        copying = ".detach().clone()" if holder.keeps_graph else ".clone()"
        return LeakAdvice(
            f"Add a copy of the view to {name}: {copying} lets the block go. Or clear {name} now and then.", fix
        )
    if holder.keeps_graph:
        return LeakAdvice(
            f"Keep numbers in {name}: .item(), or .detach() where tensors are needed, lets the graphs go.", fix
        )
    return LeakAdvice(f"Keep numbers, or copies on the host, in {name}; or clear it.", fix)
