"""Why memory could not be had, as it follows from the numbers, and which setting would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zerotop.analysis.allocator_settings import Settings, variable
from zerotop.analysis.oom_text import CUBLAS, CUDA, HOST, KILLED, NCCL

# Other processes, or pinned memory's rounding, are worth a sentence from this share of the whole on.
_MUCH = 0.05
_UPDATE = ("step", "optimizer", "cpu_optimizer", "grads_to_cpu", "params_to_gpu", "allgather")


class Verdict(NamedTuple):
    """One sentence of cause, one of advice, and the setting that it names."""

    cause: str
    advice: str
    setting: str


@dataclass(frozen=True, slots=True)
class Case:
    """What is known of one failure. Bytes; None is not known."""

    kind: str  # as in oom_text
    requested: int | None = None
    limit: int | None = None  # what the process may use of the device, or of host memory
    total: int | None = None  # the device's
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    largest_block: int | None = None
    inactive_split: int | None = None
    others: int | None = None  # the device's memory held by processes that are not this one
    kept: int | None = None  # parameters, gradients, master weights and state on the device
    phase: str = ""  # the outermost
    rows: int | None = None
    tokens: int | None = None  # of the last micro-batch
    host_used: int | None = None
    pinned_spare: int = 0  # of host memory, by the rounding of pinned requests
    killed: int = 0  # processes, by the kernel
    torch: str = ""
    settings: Settings | None = None  # of PyTorch's allocator
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unallocated(self) -> int | None:
        """What PyTorch holds and nobody uses."""
        return None if self.reserved is None or self.allocated is None else max(0, self.reserved - self.allocated)

    @property
    def can_be_given_back(self) -> int:
        """What of that lies in segments that are wholly free."""
        return max(0, (self.unallocated or 0) - (self.inactive_split or 0))


def size(count: int) -> str:
    """Bytes in a sentence."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 27 else f"{count / (1 << 20):.1f} MiB"


def verdict(case: Case) -> Verdict:
    """The cause and the advice."""
    if case.kind in (HOST, KILLED):
        return _host(case)
    if case.kind != CUDA:
        return _outside_pytorch(case)
    for rule in (_fraction, _fragments, _others):
        found = rule(case)
        if found is not None:
            return found
    return _too_much(case)


# --- PyTorch's allocator -------------------------------------------------------------------------------------------------


def _fraction(case: Case) -> Verdict | None:
    if case.limit is None or case.total is None or case.requested is None or case.limit > case.total * (1 - _MUCH):
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
    return Verdict(cause, f"Start the job with {name}=expandable_segments:True.", f"{name}=expandable_segments:True")


def _others(case: Case) -> Verdict | None:
    if not case.others or case.requested is None or case.free is None:
        return None
    if case.others < _MUCH * (case.total or case.limit or 0):
        return None
    if case.requested > case.free + case.can_be_given_back + case.others:
        return None
    return Verdict(
        f"{_asked(case)}, {size(case.free)} were free: other processes hold {size(case.others)} of the device.",
        "End them, or give the job another device with CUDA_VISIBLE_DEVICES or --include.",
        "CUDA_VISIBLE_DEVICES",
    )


def _too_much(case: Case) -> Verdict:
    return Verdict(f"{_asked(case)}{_there_was(case)}.{_per_token(case)}", *_less(case))


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


def _less(case: Case) -> tuple[str, str]:
    """What to make smaller: advice, setting."""
    engine = case.engine
    if case.phase == "eval":
        rows = f" than {case.rows} rows" if case.rows else ""
        return f"Evaluate with batches of fewer{rows or ' rows'}.", "per_device_eval_batch_size"
    if case.phase == "init":
        return _less_at_the_start(engine)
    if case.phase == "checkpoint_save":
        name = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        return f"Save without gathering the weights on the GPU: {name} false.", name
    kept_most = case.kept is not None and case.limit is not None and case.kept > case.limit // 2
    if case.phase in _UPDATE or kept_most:
        smaller = _less_kept(engine)
        if smaller is not None:
            return smaller
    if isinstance(engine.get("micro_batch"), int) and engine["micro_batch"] > 1:
        name = "train_micro_batch_size_per_gpu"
        return f"Halve {name}, now {engine['micro_batch']}, and double gradient_accumulation_steps.", name
    if engine.get("activation_checkpointing") is False:
        return "Recompute activations: gradient_checkpointing in the Trainer's arguments.", "gradient_checkpointing"
    return _less_kept(engine) or ("Train with shorter sequences, or on more GPUs.", "max_seq_length")


def _less_at_the_start(engine: Mapping[str, Any]) -> tuple[str, str]:
    if (engine.get("zero_stage") or 0) < 3:
        return "Partition the parameters: zero_optimization.stage 3.", "zero_optimization.stage"
    if engine.get("offload_parameters") in (None, "none"):
        name = "zero_optimization.offload_param.device"
        return f"Keep the parameters in host memory: {name} cpu.", name
    return "Make the model under deepspeed.zero.Init, so that no rank holds all of it.", "deepspeed.zero.Init"


def _less_kept(engine: Mapping[str, Any]) -> tuple[str, str] | None:
    """What makes parameters, gradients and state smaller on the GPU; None where all of it has been done, or nobody knows."""
    stage = engine.get("zero_stage")
    if not isinstance(stage, int):
        return None
    if engine.get("offload_optimizer") in (None, "none"):
        name = "zero_optimization.offload_optimizer.device"
        beside = "" if stage else " with zero_optimization.stage 2"
        return f"Keep the optimizer in host memory: {name} cpu{beside}.", name
    if stage < 3:
        return "Partition the parameters too: zero_optimization.stage 3.", "zero_optimization.stage"
    if engine.get("offload_parameters") in (None, "none"):
        name = "zero_optimization.offload_param.device"
        return f"Keep the parameters in host memory: {name} cpu.", name
    return None


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
    return Verdict(cause, *_less(case))


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
    return Verdict(cause, *_less_on_the_host(case))


def _less_on_the_host(case: Case) -> tuple[str, str]:
    engine = case.engine
    offloads = engine.get("offload_optimizer"), engine.get("offload_parameters")
    if "cpu" in offloads and case.pinned_spare > _MUCH * (case.limit or case.host_used or 1):
        name = "zero_optimization.offload_optimizer.pin_memory"
        advice = f"{size(case.pinned_spare)} are lost to pinned memory's rounding up to powers of two: {name} false."
        return advice, name
    if offloads[0] == "cpu":
        name = "zero_optimization.offload_optimizer.device"
        return f"Move the optimizer's state to NVMe ({name} nvme), or run fewer ranks on a node.", name
    if offloads[1] == "cpu":
        name = "zero_optimization.offload_param.device"
        return f"Move the parameters to NVMe ({name} nvme), or run fewer ranks on a node.", name
    if case.phase in ("init", ""):
        return "Make the model under deepspeed.zero.Init, so that no rank holds all of it.", "deepspeed.zero.Init"
    return "Give the job more host memory, or load data with a smaller dataloader_num_workers.", "dataloader_num_workers"
