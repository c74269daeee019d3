"""Why memory could not be allocated, from the figures of one failure, and the setting that would help."""

from __future__ import annotations

from typing import NamedTuple

from zerotop.analysis.failures.evaluation_memory import LARGER_RATIO
from zerotop.analysis.failures.oom_advice import advise_on_gpu, advise_on_host
from zerotop.analysis.failures.oom_evidence import NOTABLE_SHARE, OomCase, describe_batch, put_size
from zerotop.analysis.failures.oom_log_parser import CUBLAS, CUDA, HOST, KILLED, NCCL
from zerotop.analysis.formatting import Text, format_count
from zerotop.analysis.memory.allocator_settings import choose_variable
from zerotop.analysis.script_terms import read_terms
from zerotop.recording.moments.rank_records import TRAINER

# The part of the memory in use that must have leaked, and that with a micro-batch larger than those before.
_NOTABLY_LEAKED, _MOSTLY_LEAKED = 0.1, 0.5
# Unallocated memory is worth a clause from this size on.
_NOTABLE_BYTES = 1 << 27
# Sizes of vocabularies, in words; those of layers are mostly smaller.
_VOCABULARIES = range(30_000, 300_000)
# Texts of a job may contain braces and brackets, which a template would read.
_NO_TEMPLATE = str.maketrans("{}[]", "()()")
_EMPTY_CACHE = "torch.cuda.empty_cache()"


class OomVerdict(NamedTuple):
    """A sentence or two of cause, one of advice, the setting that the advice names, and what to copy."""

    cause: str
    advice: str
    setting: str
    fix: str
    confidence: float = 0.8  # 0 to 1: how sure the cause is


def choose_verdict(case: OomCase) -> OomVerdict:
    """Return the cause and the advice; they can be rendered in other units."""
    verdict = _judge_case(case)
    return verdict._replace(cause=Text(f"{verdict.cause}{_describe_difference(case)}"), advice=Text(verdict.advice))


def _judge_case(case: OomCase) -> OomVerdict:
    if case.kind in (HOST, KILLED):
        return _judge_host(case)
    if case.kind != CUDA:
        return _check_leak(case) or _judge_outside_pytorch(case)
    for rule in _RULES:
        verdict = rule(case)
        if verdict is not None:
            return verdict
    cause = f"{_describe_request(case)}{_describe_available(case)}.{_describe_per_token(case)}"
    return OomVerdict(cause, *advise_on_gpu(case), confidence=0.7)


def _check_leak(case: OomCase) -> OomVerdict | None:
    """Blame a leak if the request would have fitted without it."""
    leak, missing = case.leak, (case.requested_bytes or 0) - (case.free_bytes or 0)
    used = case.allocated_bytes or case.limit_bytes or case.total_bytes or 0
    is_larger = (case.batch_ratio or 0) > LARGER_RATIO
    if leak is None or leak.bytes < max(missing, (_MOSTLY_LEAKED if is_larger else _NOTABLY_LEAKED) * used):
        return None
    request = f"{_describe_request(case)}{_describe_available(case)}." if case.kind == CUDA else _describe_outside(case)
    steps = f"between steps {leak.since_step} and {leak.until_step}"
    cause = f"{request} Memory after a step grew by {put_size(leak.bytes)} {steps}.{leak.holder}"
    return OomVerdict(cause, leak.advice.text, leak.setting, leak.advice.fix, 0.95 if leak.setting else 0.9)


def _check_growth(case: OomCase) -> OomVerdict | None:
    """Blame an evaluation that needed more than those before, if the request would have fitted without the difference."""
    growth = case.growth
    if growth is None or growth.held_bytes - growth.before_bytes < (case.requested_bytes or 0):
        return None
    batch = describe_batch(growth.batch.get("rows"), growth.batch.get("sequence"))
    same = f", with micro-batches of the same size, {batch}" if batch else ""
    before = f"{'those' if growth.evaluations > 1 else 'the one'} before {put_size(growth.before_bytes)}"
    cause = f"This evaluation held {put_size(growth.held_bytes)}, {before}{same}."
    if growth.is_by_forward:
        left = f"{put_size(growth.forward_bytes or 0)}, before {put_size(growth.before_forward_bytes or 0)}"
        cause += f" Each of its {format_count(growth.forwards, 'forward')} left {left}."
    elif growth.before_forwards and growth.forwards > LARGER_RATIO * growth.before_forwards:
        cause += f" It had run {format_count(growth.forwards, 'forward')}, before at most {growth.before_forwards}."
    cause += _describe_graphs(case)
    limited = (
        f" of the {put_size(case.limit_bytes)} that the process may use" if case.is_limited and case.limit_bytes else ""
    )
    held = f" {_describe_request(case)}; {put_size(case.allocated_bytes or 0)}{limited} were allocated."
    return OomVerdict(cause + held, *_advise_on_evaluation(case), 0.95 if case.graphs else 0.9)


def _describe_graphs(case: OomCase) -> str:
    if case.graphs is None:
        return ""
    line = case.graphs.line.translate(_NO_TEMPLATE)
    first = f", the first at {line}" if line else ""
    return f" {format_count(case.graphs.forwards, 'forward')} of it had gradients enabled{first}."


def _advise_on_evaluation(case: OomCase) -> tuple[str, str, str]:
    """Return advice, setting and fix for an evaluation that kept more than others."""
    no_grad, fix = "torch.no_grad()", "with torch.no_grad():"
    if case.graphs is not None:
        return f"Run its forwards under {no_grad}: they then keep no graph.", no_grad, fix
    terms, growth = read_terms(case.engine), case.growth
    if growth is not None and growth.is_by_forward and case.engine.library != TRAINER:
        return f"Keep less of each forward: run them under {no_grad}, and move outputs to the host at once.", no_grad, fix
    return terms["eval_tensors"], terms["eval_tensors_fix"].partition("=")[0].strip(), terms["eval_tensors_fix"]


# --- PyTorch's allocator -------------------------------------------------------------------------------------------------


def _check_fraction(case: OomCase) -> OomVerdict | None:
    if not case.is_limited or case.limit_bytes is None or case.total_bytes is None or case.requested_bytes is None:
        return None
    if case.free_bytes is not None and case.requested_bytes > case.free_bytes + case.releasable_bytes:
        return None
    setting = "torch.cuda.set_per_process_memory_fraction"
    may_use = f"the process may use only {put_size(case.limit_bytes)} of its {put_size(case.total_bytes)}"
    cause = f"{_describe_request(case)}, which the device has, but {may_use}."
    return OomVerdict(cause, f"Raise or remove {setting}.", setting, f"{setting}(1.0)")


def _check_fragments(case: OomCase) -> OomVerdict | None:
    requested, unallocated, free = case.requested_bytes, case.unallocated_bytes, case.free_bytes or 0
    largest = case.largest_free_block_bytes
    if requested is None or unallocated is None or requested <= free:
        return None
    if unallocated >= requested and largest is not None and largest < requested:
        reason = f"PyTorch reserves {put_size(unallocated)} that are unused, but in blocks of at most {put_size(largest)}"
    elif requested <= free + unallocated and requested > free + case.releasable_bytes:
        reason = f"neither {put_size(free)} free on the device nor {put_size(unallocated)} in PyTorch's cache suffice alone"
    else:
        return None
    cause = f"{_describe_request(case)}: {reason}."
    if case.settings is not None and case.settings.has_expandable_segments:
        advice = "Expandable segments are on already: call torch.cuda.empty_cache() before batches of another size."
        return OomVerdict(cause, advice, _EMPTY_CACHE, _EMPTY_CACHE)
    setting = f"{choose_variable(case.torch)}=expandable_segments:True"
    return OomVerdict(cause, f"Start the job with {setting}.", setting, f"export {setting}", 0.9)


def _check_others(case: OomCase) -> OomVerdict | None:
    if not case.others_bytes or case.requested_bytes is None or case.free_bytes is None:
        return None
    if case.others_bytes < NOTABLE_SHARE * (case.total_bytes or case.limit_bytes or 0):
        return None
    if case.requested_bytes > case.free_bytes + case.releasable_bytes + case.others_bytes:
        return None
    free, others = put_size(case.free_bytes), put_size(case.others_bytes)
    return OomVerdict(
        f"{_describe_request(case)}; {free} were free, and other processes hold {others} of the device.",
        "End them, or choose another device with CUDA_VISIBLE_DEVICES or --include.",
        "CUDA_VISIBLE_DEVICES",
        "nvidia-smi",
    )


def _check_evaluation(case: OomCase) -> OomVerdict | None:
    if case.outer_phase != "eval":
        return None
    terms, ratio, before = read_terms(case.engine), case.batch_ratio, case.largest_batch
    setting = terms["eval_batch_fix"]
    if ratio is None or ratio <= LARGER_RATIO:
        rows = f", now {case.rows}" if case.rows else ""
        advice = f"Lower {terms['eval_batch_size']}{rows}{terms['or_accumulate_outputs']}."
        fix = f"{setting}={case.rows // 2}" if case.rows and case.rows > 1 else terms["eval_tensors_fix"]
        return OomVerdict(_describe_batch_request(case), advice, setting, fix)
    cause = _describe_batch_request(case, f"{ratio:.1f} times training's {_describe_largest(case)}")
    as_before = before.get("rows")
    to = f" to {as_before}, as in training" if as_before else ""
    fix = f"{setting}={as_before}" if as_before else terms["eval_tensors_fix"]
    return OomVerdict(cause, f"Lower {terms['eval_batch_size']}{to}.", setting, fix, 0.95)


def _check_larger_batch(case: OomCase) -> OomVerdict | None:
    ratio, before = case.batch_ratio, case.largest_batch
    if ratio is None or ratio <= LARGER_RATIO or case.outer_phase not in ("forward", "backward", ""):
        return None
    cause = f"{_describe_batch_request(case, f'{ratio:.1f} times the largest before, {_describe_largest(case)}')}"
    if case.is_limited:
        cause += (
            f" The process may use only {put_size(case.limit_bytes or 0)} of the device's {put_size(case.total_bytes or 0)}."
        )
    longest, rows = before.get("sequence"), before.get("rows")
    if rows and case.rows and case.rows > rows and (case.sequence or 0) <= (longest or 0):
        terms = read_terms(case.engine)
        setting = terms["batch_size"]
        advice = f"Limit batches to {format_count(rows, 'row')}, as before: lower {setting}."
        return OomVerdict(cause, advice, setting, terms["batch_size_fix"] or f"{setting.rpartition(' ')[2]}={rows}", 0.9)
    if not longest:
        return OomVerdict(cause, *advise_on_gpu(case), confidence=0.9)
    if case.engine.library == TRAINER:
        advice = "Truncate sequences to a fixed length in the tokenizer (truncation=True, max_length=...)."
        return OomVerdict(cause, advice, "max_length", f"truncation=True, max_length={longest}", 0.9)
    if rows and case.rows and case.rows > rows:
        advice = f"Limit batches to {format_count(rows, 'row')} of at most {longest} tokens, as in the steps before."
        return OomVerdict(cause, advice, "max_length", f"input_ids = input_ids[:{rows}, :{longest}]", 0.9)
    # Whether a loop written by hand has a tokenizer is unknown.
    advice = f"Cut sequences to at most {longest} tokens, as in the steps before."
    return OomVerdict(cause, advice, "max_length", f"input_ids = input_ids[:, :{longest}]", 0.9)


def _describe_difference(case: OomCase) -> str:
    """Return a sentence about what was changed in the training shortly before; "" without a change."""
    if not case.changes:
        return ""
    return f" Shortly before, {case.changes.translate(_NO_TEMPLATE)}."


def _describe_batch_request(case: OomCase, comparison: str = "") -> str:
    batch = describe_batch(case.rows, case.sequence)
    with_batch = f" with a micro-batch of {batch}" if batch or comparison else ""
    compared = f", {comparison}" if comparison else ""
    return f"{_describe_request(case)}{with_batch}{compared}{_describe_available(case)}.{_describe_per_token(case)}"


def _describe_largest(case: OomCase) -> str:
    return describe_batch(case.largest_batch.get("rows"), case.largest_batch.get("sequence"))


_RULES = (
    _check_leak,
    _check_growth,
    _check_larger_batch,
    _check_fraction,
    _check_fragments,
    _check_others,
    _check_evaluation,
)
_REQUESTERS = {
    "": "PyTorch",
    "init": "Engine initialization",
    "step": "The update",
    "eval": "Evaluation",
    "other": "Code outside the training phases",
}


def _describe_request(case: OomCase) -> str:
    who = _REQUESTERS.get(case.outer_phase, f"The {case.outer_phase.replace('_', ' ')}")
    return f"{who} requested {put_size(case.requested_bytes) if case.requested_bytes is not None else 'memory'}"


def _describe_available(case: OomCase) -> str:
    parts = []
    if case.is_limited and case.allocated_bytes is not None:
        # Free memory of the device is of no use then.
        return f"; {put_size(case.allocated_bytes)} of the {put_size(case.limit_bytes or 0)} that it may use were allocated"
    if case.free_bytes is not None:
        limit = f" of {put_size(case.limit_bytes)}" if case.limit_bytes else ""
        parts.append(f"{put_size(case.free_bytes)}{limit} were free")
    if case.allocated_bytes is not None:
        parts.append(f"{put_size(case.allocated_bytes)} allocated")
    if case.unallocated_bytes and case.unallocated_bytes >= _NOTABLE_BYTES:
        largest = case.largest_free_block_bytes
        in_blocks = f" in blocks of at most {put_size(largest)}" if largest else ""
        parts.append(f"{put_size(case.unallocated_bytes)} reserved but unused{in_blocks}")
    return f"; {', '.join(parts)}" if parts else ""


def _describe_per_token(case: OomCase) -> str:
    """Return a sentence where the request is a multiple of the micro-batch's tokens: it grows with them."""
    if not case.requested_bytes or not case.tokens:
        return ""
    size, rest = divmod(case.requested_bytes, case.tokens)
    if rest or size < 64:
        return ""
    words, rest = divmod(size, 4)
    # Widths of layers are multiples of 1024, sizes of vocabularies mostly are not.
    is_vocabulary = not rest and words in _VOCABULARIES and words % 1024
    logits = f", as float32 logits over a vocabulary of {words:,} take" if is_vocabulary else ""
    return f" That is {size:,} bytes for each of the {case.tokens:,} tokens of the micro-batch{logits}."


# --- the device outside PyTorch's allocator ------------------------------------------------------------------------------

_LIBRARIES = {NCCL: "NCCL", CUBLAS: "cuBLAS or cuDNN"}


def _describe_outside(case: OomCase) -> str:
    who = _LIBRARIES.get(case.kind, "A CUDA call")
    wanted = put_size(case.requested_bytes) if case.requested_bytes else "memory"
    free = f"; {put_size(case.free_bytes)} of the device were free" if case.free_bytes is not None else ""
    held = f"; PyTorch reserved {put_size(case.reserved_bytes)}" if case.reserved_bytes else ""
    return f"{who} could not allocate {wanted} on the device outside PyTorch's allocator{free}{held}."


def _judge_outside_pytorch(case: OomCase) -> OomVerdict:
    cause = _describe_outside(case)
    unused = case.unallocated_bytes or 0
    if unused > (1 << 29) and unused >= (case.requested_bytes or 0):
        advice = f"PyTorch reserves {put_size(unused)} that it does not use: release it with torch.cuda.empty_cache()."
        return OomVerdict(cause, advice, _EMPTY_CACHE, _EMPTY_CACHE)
    return OomVerdict(cause, *advise_on_gpu(case))


# --- host memory ---------------------------------------------------------------------------------------------------------


def _judge_host(case: OomCase) -> OomVerdict:
    in_use = ""
    if case.host_used_bytes and case.limit_bytes:
        in_use = f": {put_size(case.host_used_bytes)} of {put_size(case.limit_bytes)} were in use"
    if case.kind != KILLED:
        wanted = put_size(case.requested_bytes) if case.requested_bytes else "Memory"
        return OomVerdict(f"{wanted} could not be allocated on the host{in_use}.", *advise_on_host(case))
    just_before = f"{in_use} just before" if in_use else ""
    who = "A rank was killed by SIGKILL, probably by the kernel"
    if case.kill_count:
        who = f"The kernel killed {format_count(case.kill_count, 'process')}"
    return OomVerdict(f"{who} for lack of host memory{just_before}.", *advise_on_host(case))
