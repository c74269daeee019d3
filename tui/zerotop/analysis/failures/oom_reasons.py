"""Why memory could not be had, as it follows from the numbers, and which setting would help."""

from __future__ import annotations

from typing import NamedTuple

from zerotop.analysis.failures.oom_advice import advise_on_gpu, advise_on_host
from zerotop.analysis.failures.oom_evidence import NOTABLE_SHARE, OomCase, describe_batch, format_size
from zerotop.analysis.failures.oom_log_parser import CUBLAS, CUDA, HOST, KILLED, NCCL
from zerotop.analysis.formatting import Text
from zerotop.analysis.memory.allocator_settings import choose_variable

# A micro-batch is larger than those before from this ratio on.
_LARGER_RATIO = 1.05


class Verdict(NamedTuple):
    """One sentence of cause, one of advice, and the setting that it names."""

    cause: str
    advice: str
    setting: str
    confidence: float = 0.8  # 0 to 1: how sure the cause is


def choose_verdict(case: OomCase) -> Verdict:
    """The cause and the advice; both can be rendered in other units."""
    verdict = _judge(case)
    return verdict._replace(cause=Text(verdict.cause), advice=Text(verdict.advice))


def _judge(case: OomCase) -> Verdict:
    if case.kind in (HOST, KILLED):
        return _judge_host(case)
    if case.kind != CUDA:
        return _judge_outside_pytorch(case)
    for rule in (_check_fraction, _check_fragments, _check_others, _check_evaluation, _check_larger_batch):
        found = rule(case)
        if found is not None:
            return found
    return _judge_too_much(case)


# --- PyTorch's allocator -------------------------------------------------------------------------------------------------


def _check_fraction(case: OomCase) -> Verdict | None:
    if case.limit is None or case.total is None or case.requested is None or case.limit > case.total * (1 - NOTABLE_SHARE):
        return None
    if case.free is not None and case.requested > case.free + case.releasable_bytes:
        return None
    return Verdict(
        f"{_describe_request(case)}, which the device has, but the process may use only {format_size(case.limit)} of its {format_size(case.total)}.",
        "Raise or leave out torch.cuda.set_per_process_memory_fraction.",
        "torch.cuda.set_per_process_memory_fraction",
    )


def _check_fragments(case: OomCase) -> Verdict | None:
    unallocated, free = case.unallocated_bytes, case.free or 0
    if case.requested is None or unallocated is None or case.requested <= free:
        return None
    if unallocated >= case.requested and case.largest_block is not None and case.largest_block < case.requested:
        why = f"{format_size(unallocated)} that PyTorch holds are unused, but in pieces of at most {format_size(case.largest_block)}"
    elif case.requested <= free + unallocated and case.requested > free + case.releasable_bytes:
        why = f"{format_size(free)} free on the device and {format_size(unallocated)} unused in PyTorch's hands would do only together"
    else:
        return None
    return _advise_on_fragments(case, f"{_describe_request(case)}: {why}.")


def _advise_on_fragments(case: OomCase, cause: str) -> Verdict:
    if case.settings is not None and case.settings.has_expandable_segments:
        advice = "Expandable segments are on already: call torch.cuda.empty_cache() before batches of another size."
        return Verdict(cause, advice, "torch.cuda.empty_cache()")
    name = choose_variable(case.torch)
    return Verdict(cause, f"Start the job with {name}=expandable_segments:True.", f"{name}=expandable_segments:True", 0.9)


def _check_others(case: OomCase) -> Verdict | None:
    if not case.others or case.requested is None or case.free is None:
        return None
    if case.others < NOTABLE_SHARE * (case.total or case.limit or 0):
        return None
    if case.requested > case.free + case.releasable_bytes + case.others:
        return None
    return Verdict(
        f"{_describe_request(case)}, {format_size(case.free)} were free: other processes hold {format_size(case.others)} of the device.",
        "End them, or give the job another device with CUDA_VISIBLE_DEVICES or --include.",
        "CUDA_VISIBLE_DEVICES",
    )


def _check_evaluation(case: OomCase) -> Verdict | None:
    if case.phase != "eval":
        return None
    name = "per_device_eval_batch_size"
    shape, ratio = case.batch_text, case.batch_ratio
    with_it = f" with a micro-batch of {shape}" if shape else ""
    if ratio is None or ratio <= _LARGER_RATIO:
        cause = f"{_describe_request(case)}{with_it}{_describe_available(case)}.{_describe_per_token(case)}"
        rows = f", now {case.rows}" if case.rows else ""
        return Verdict(cause, f"Lower Trainer's {name}{rows}, or set eval_accumulation_steps to 1.", name)
    cause = f"{_describe_request(case)}{with_it}, {ratio:.1f} times training's {describe_batch(case.largest)}{_describe_available(case)}."
    to = f" to {case.largest['rows']}, as in training" if case.largest.get("rows") else ""
    return Verdict(f"{cause}{_describe_per_token(case)}", f"Lower Trainer's {name}{to}.", name, 0.95)


def _check_larger_batch(case: OomCase) -> Verdict | None:
    ratio = case.batch_ratio
    if ratio is None or ratio <= _LARGER_RATIO or case.phase not in ("forward", "backward"):
        return None
    cause = f"{_describe_request(case)} with a micro-batch of {case.batch_text}, {ratio:.1f} times the largest before{_describe_available(case)}."
    return Verdict(
        f"{cause}{_describe_per_token(case)}",
        "Cut sequences to a fixed length in the tokenizer (truncation=True, max_length=...).",
        "max_length",
        0.9,
    )


def _judge_too_much(case: OomCase) -> Verdict:
    return Verdict(
        f"{_describe_request(case)}{_describe_available(case)}.{_describe_per_token(case)}",
        *advise_on_gpu(case),
        confidence=0.7,
    )


def _describe_request(case: OomCase) -> str:
    where = f"In {_describe_phase(case.phase)} " if case.phase else ""
    wanted = format_size(case.requested) if case.requested is not None else "memory"
    return f"{where}{wanted} {'were' if case.requested is not None else 'was'} asked for"


def _describe_phase(phase: str) -> str:
    words = {"init": "making the engine", "step": "the update", "eval": "evaluation", "other": "no phase of training"}
    return words.get(phase, f"the {phase.replace('_', ' ')}")


def _describe_available(case: OomCase) -> str:
    parts = []
    if case.free is not None:
        parts.append(
            f"{format_size(case.free)} of {format_size(case.limit)} were free"
            if case.limit
            else f"{format_size(case.free)} were free"
        )
    if case.allocated is not None:
        parts.append(f"{format_size(case.allocated)} allocated")
    if case.unallocated_bytes and case.unallocated_bytes >= 1 << 27:
        in_pieces = f" in pieces of at most {format_size(case.largest_block)}" if case.largest_block else ""
        parts.append(f"{format_size(case.unallocated_bytes)} reserved but unused{in_pieces}")
    return f"; {', '.join(parts)}" if parts else ""


def _describe_per_token(case: OomCase) -> str:
    """A request that divides into the micro-batch's tokens grows with it."""
    if not case.requested or not case.tokens or case.requested % case.tokens or case.requested // case.tokens < 64:
        return ""
    each = case.requested // case.tokens
    return f" That is {each:,} bytes for each of the {case.tokens:,} tokens of the micro-batch."


# --- the device, beside PyTorch ------------------------------------------------------------------------------------------

_LIBRARIES = {NCCL: "NCCL", CUBLAS: "cuBLAS or cuDNN"}


def _judge_outside_pytorch(case: OomCase) -> Verdict:
    who = _LIBRARIES.get(case.kind, "The driver, asked by something beside PyTorch's allocator,")
    wanted = format_size(case.requested) if case.requested else "its memory"
    free = f"; {format_size(case.free)} of the device were free" if case.free is not None else ""
    held = f"; PyTorch held {format_size(case.reserved)}" if case.reserved else ""
    cause = f"{who} could not get {wanted}, which it takes from the device beside PyTorch{free}{held}."
    unused = case.unallocated_bytes or 0
    if unused > (1 << 29) and unused >= (case.requested or 0):
        advice = f"PyTorch holds {format_size(unused)} that it does not use: give it back with torch.cuda.empty_cache()."
        return Verdict(cause, advice, "torch.cuda.empty_cache()")
    return Verdict(cause, *advise_on_gpu(case))


# --- host memory ---------------------------------------------------------------------------------------------------------


def _judge_host(case: OomCase) -> Verdict:
    used = f"{format_size(case.host_used)} of {format_size(case.limit)} were in use" if case.host_used and case.limit else ""
    if case.kind == KILLED:
        what = f"The kernel killed {case.kill_count} process{'es' if case.kill_count > 1 else ''} for lack of host memory"
        cause = f"{what if case.kill_count else 'A rank was killed by SIGKILL, as the kernel does for lack of host memory'}"
        cause += f": {used} just before." if used else "."
    else:
        wanted = format_size(case.requested) if case.requested else "memory"
        cause = f"{wanted} of host memory could not be had" + (f": {used}." if used else ".")
    return Verdict(cause, *advise_on_host(case))
