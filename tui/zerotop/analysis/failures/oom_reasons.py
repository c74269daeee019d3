"""Why memory could not be had, as it follows from the numbers, and which setting would help."""

from __future__ import annotations

from typing import NamedTuple

from zerotop.analysis.failures.oom_advice import less_on_the_gpu, less_on_the_host
from zerotop.analysis.failures.oom_evidence import MUCH, Case, size, words_of
from zerotop.analysis.failures.oom_log_parser import CUBLAS, CUDA, HOST, KILLED, NCCL
from zerotop.analysis.memory.allocator_settings import variable

# A micro-batch is larger than those before from this ratio on.
_LARGER = 1.05


class Verdict(NamedTuple):
    """One sentence of cause, one of advice, and the setting that it names."""

    cause: str
    advice: str
    setting: str
    confidence: float = 0.8  # 0 to 1: how sure the cause is


def verdict(case: Case) -> Verdict:
    """The cause and the advice."""
    if case.kind in (HOST, KILLED):
        return _host(case)
    if case.kind != CUDA:
        return _outside_pytorch(case)
    for rule in (_fraction, _fragments, _others, _evaluation, _larger):
        found = rule(case)
        if found is not None:
            return found
    return _too_much(case)


# --- PyTorch's allocator -------------------------------------------------------------------------------------------------


def _fraction(case: Case) -> Verdict | None:
    if case.limit is None or case.total is None or case.requested is None or case.limit > case.total * (1 - MUCH):
        return None
    if case.free is not None and case.requested > case.free + case.can_be_given_back:
        return None
    return Verdict(
        f"{_asked(case)}, which the device has, but the process may use only {size(case.limit)} of its {size(case.total)}.",
        "Raise or leave out torch.cuda.set_per_process_memory_fraction.",
        "torch.cuda.set_per_process_memory_fraction",
    )


def _fragments(case: Case) -> Verdict | None:
    unallocated, free = case.unallocated, case.free or 0
    if case.requested is None or unallocated is None or case.requested <= free:
        return None
    if unallocated >= case.requested and case.largest_block is not None and case.largest_block < case.requested:
        why = f"{size(unallocated)} that PyTorch holds are unused, but in pieces of at most {size(case.largest_block)}"
    elif case.requested <= free + unallocated and case.requested > free + case.can_be_given_back:
        why = f"{size(free)} free on the device and {size(unallocated)} unused in PyTorch's hands would do only together"
    else:
        return None
    return _about_fragments(case, f"{_asked(case)}: {why}.")


def _about_fragments(case: Case, cause: str) -> Verdict:
    if case.settings is not None and case.settings.expandable_segments:
        advice = "Expandable segments are on already: call torch.cuda.empty_cache() before batches of another size."
        return Verdict(cause, advice, "torch.cuda.empty_cache()")
    name = variable(case.torch)
    return Verdict(cause, f"Start the job with {name}=expandable_segments:True.", f"{name}=expandable_segments:True", 0.9)


def _others(case: Case) -> Verdict | None:
    if not case.others or case.requested is None or case.free is None:
        return None
    if case.others < MUCH * (case.total or case.limit or 0):
        return None
    if case.requested > case.free + case.can_be_given_back + case.others:
        return None
    return Verdict(
        f"{_asked(case)}, {size(case.free)} were free: other processes hold {size(case.others)} of the device.",
        "End them, or give the job another device with CUDA_VISIBLE_DEVICES or --include.",
        "CUDA_VISIBLE_DEVICES",
    )


def _evaluation(case: Case) -> Verdict | None:
    if case.phase != "eval":
        return None
    name = "per_device_eval_batch_size"
    shape, ratio = case.shape, case.ratio
    with_it = f" with a micro-batch of {shape}" if shape else ""
    if ratio is None or ratio <= _LARGER:
        cause = f"{_asked(case)}{with_it}{_there_was(case)}.{_per_token(case)}"
        rows = f", now {case.rows}" if case.rows else ""
        return Verdict(cause, f"Lower Trainer's {name}{rows}, or set eval_accumulation_steps to 1.", name)
    cause = f"{_asked(case)}{with_it}, {ratio:.1f} times training's {words_of(case.largest)}{_there_was(case)}."
    to = f" to {case.largest['rows']}, as in training" if case.largest.get("rows") else ""
    return Verdict(f"{cause}{_per_token(case)}", f"Lower Trainer's {name}{to}.", name, 0.95)


def _larger(case: Case) -> Verdict | None:
    ratio = case.ratio
    if ratio is None or ratio <= _LARGER or case.phase not in ("forward", "backward"):
        return None
    cause = f"{_asked(case)} with a micro-batch of {case.shape}, {ratio:.1f} times the largest before{_there_was(case)}."
    return Verdict(
        f"{cause}{_per_token(case)}",
        "Cut sequences to a fixed length in the tokenizer (truncation=True, max_length=...).",
        "max_length",
        0.9,
    )


def _too_much(case: Case) -> Verdict:
    return Verdict(f"{_asked(case)}{_there_was(case)}.{_per_token(case)}", *less_on_the_gpu(case), confidence=0.7)


def _asked(case: Case) -> str:
    where = f"In {_phase(case.phase)} " if case.phase else ""
    wanted = size(case.requested) if case.requested is not None else "memory"
    return f"{where}{wanted} {'were' if case.requested is not None else 'was'} asked for"


def _phase(phase: str) -> str:
    words = {"init": "making the engine", "step": "the update", "eval": "evaluation", "other": "no phase of training"}
    return words.get(phase, f"the {phase.replace('_', ' ')}")


def _there_was(case: Case) -> str:
    parts = []
    if case.free is not None:
        parts.append(f"{size(case.free)} of {size(case.limit)} were free" if case.limit else f"{size(case.free)} were free")
    if case.allocated is not None:
        parts.append(f"{size(case.allocated)} allocated")
    if case.unallocated and case.unallocated >= 1 << 27:
        in_pieces = f" in pieces of at most {size(case.largest_block)}" if case.largest_block else ""
        parts.append(f"{size(case.unallocated)} reserved but unused{in_pieces}")
    return f"; {', '.join(parts)}" if parts else ""


def _per_token(case: Case) -> str:
    """A request that divides into the micro-batch's tokens grows with it."""
    if not case.requested or not case.tokens or case.requested % case.tokens or case.requested // case.tokens < 64:
        return ""
    each = case.requested // case.tokens
    return f" That is {each:,} bytes for each of the {case.tokens:,} tokens of the micro-batch."


# --- the device, beside PyTorch ------------------------------------------------------------------------------------------

_WHO = {NCCL: "NCCL", CUBLAS: "cuBLAS or cuDNN"}


def _outside_pytorch(case: Case) -> Verdict:
    who = _WHO.get(case.kind, "The driver, asked by something beside PyTorch's allocator,")
    wanted = size(case.requested) if case.requested else "its memory"
    free = f"; {size(case.free)} of the device were free" if case.free is not None else ""
    held = f"; PyTorch held {size(case.reserved)}" if case.reserved else ""
    cause = f"{who} could not get {wanted}, which it takes from the device beside PyTorch{free}{held}."
    unused = case.unallocated or 0
    if unused > (1 << 29) and unused >= (case.requested or 0):
        advice = f"PyTorch holds {size(unused)} that it does not use: give it back with torch.cuda.empty_cache()."
        return Verdict(cause, advice, "torch.cuda.empty_cache()")
    return Verdict(cause, *less_on_the_gpu(case))


# --- host memory ---------------------------------------------------------------------------------------------------------


def _host(case: Case) -> Verdict:
    used = f"{size(case.host_used)} of {size(case.limit)} were in use" if case.host_used and case.limit else ""
    if case.kind == KILLED:
        what = f"The kernel killed {case.killed} process{'es' if case.killed > 1 else ''} for lack of host memory"
        cause = f"{what if case.killed else 'A rank was killed by SIGKILL, as the kernel does for lack of host memory'}"
        cause += f": {used} just before." if used else "."
    else:
        wanted = size(case.requested) if case.requested else "memory"
        cause = f"{wanted} of host memory could not be had" + (f": {used}." if used else ".")
    return Verdict(cause, *less_on_the_host(case))
