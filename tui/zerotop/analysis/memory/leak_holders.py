"""The variable that keeps leaked device memory, and the advice that lets the memory go."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from zerotop.analysis.formatting import format_bytes, pluralize
from zerotop.analysis.memory.tensor_inventory import HeldTensors, read_held
from zerotop_probe.recording.events import Tensors

FIND_HOLDER = "Find what keeps tensors from step to step: smaller batches would only fail later."
"""The advice after an out-of-memory error where the variable is unknown."""

# The part of the leaked memory that a variable must hold, in this many tensors.
_HELD_SHARE, _LEAST_HELD = 0.5, 3
_WIDE = 1024  # elements of a last dimension that is hardly a part of another one: a vocabulary, or a model's width


class LeakAdvice(NamedTuple):
    """Advice about a variable: a sentence or two, and what to copy into the script; "" if that is not known."""

    text: str
    fix: str


def choose_holder(
    event: Tensors, leaked_bytes: int, before: Tensors | None = None, unleaked: Tensors | None = None
) -> HeldTensors | None:
    """Return the variable that holds most of the bytes that had leaked when tensors were counted; None if none does.

    One to which a line of the job adds comes first. ``before``: an earlier count, since which it must have grown.
    ``unleaked``: a count from before the leak; what a variable had then is not leaked.
    """
    earlier, had = _read_by_name(before), _read_by_name(unleaked)
    added = (event.allocated_bytes or 0) - (before.allocated_bytes or 0) if before is not None else 0
    several = [
        one
        for one in read_held(event)
        if (
            one.count >= _LEAST_HELD
            and one.may_grow
            and _has_grown(one, earlier.get(one.text))
            and _has_grown(one, had.get(one.text))
        )
        or _is_larger(one, earlier.get(one.text), added)
    ]
    large = [one for one in several if one.bytes - _get_bytes(had.get(one.text)) >= _HELD_SHARE * leaked_bytes]
    if large:
        return max(large, key=lambda one: (bool(one.line), one.bytes))
    # What a graph keeps is not counted to its end: a variable with graphs is meant if it is the only one.
    with_graphs = [one for one in several if one.keeps_graph]
    return with_graphs[0] if len(with_graphs) == 1 else None


def _read_by_name(event: Tensors | None) -> dict[str, HeldTensors]:
    return {one.text: one for one in read_held(event)} if event is not None else {}


def _get_bytes(holder: HeldTensors | None) -> int:
    return holder.bytes if holder is not None else 0


def _has_grown(holder: HeldTensors, earlier: HeldTensors | None) -> bool:
    return earlier is None or holder.count > earlier.count or holder.bytes > earlier.bytes


def _is_larger(holder: HeldTensors, earlier: HeldTensors | None, added_bytes: int) -> bool:
    """Whether most of the bytes that were added since an earlier count are in a tensor that is made anew, ever larger."""
    return earlier is not None and holder.bytes - earlier.bytes >= _HELD_SHARE * added_bytes > 0


def describe_holder(holder: HeldTensors) -> str:
    """Return sentences about the tensors in a variable when they were counted, and the line that adds to it."""
    text = f"{holder.text[:1].upper()}{holder.text[1:]}"
    counted = f" in step {holder.step}" if holder.step is not None else ""
    graph = ", with the graphs that computed them" if holder.keeps_graph else ""
    kept = f"{holder.count:,} {pluralize(holder.count, 'tensor')}" if holder.count > 1 else format_bytes(holder.bytes)
    sentences = f"{text} kept {kept}{counted}{graph}{f'; {holder.line} adds to it' if holder.line else ''}."
    if not holder.view_of:
        return sentences
    view = f"A view of {_format_shape(holder.shape)}" if prod(holder.shape) > 1 else "A view of one element"
    return f"{sentences} {view} keeps a block {_describe_block(holder)}."


def _describe_block(holder: HeldTensors) -> str:
    """Return the shape of a view's block where one index of a dimension was taken, as of the logits' last position.

    Strides show such a dimension, or the first part of a longer one: of that only the size of the block is known.
    """
    is_index = holder.view_of[:-2] + holder.view_of[-1:] == holder.shape and holder.shape[-1] >= _WIDE
    if is_index:
        return f"of {_format_shape(holder.view_of)}"
    return f"{prod(holder.view_of) / max(1, prod(holder.shape)):,.0f} times as large"


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


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
    if holder.count == 1:
        return LeakAdvice(f"Limit the size of {name}: it becomes ever larger.", "")
    return LeakAdvice(f"Keep numbers, or copies on the host, in {name}; or clear it.", fix)
