"""Settings of ZeRO-3 that save device memory and cost time, in a job whose GPUs have plenty of memory free.

Offloaded parameters, and settings that keep parameters from being gathered ahead or from staying gathered. The settings are
the engine's; the time is that of sampled stacks in DeepSpeed's functions for them, and no more than the GPU idles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.gpu_use import measure_free_bytes, measure_gpu_use
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.recording.events.event_files import select_events
from zerotop.recording.samples import Rows
from zerotop_probe.recording.event_values import SHARE
from zerotop_probe.recording.events import EngineFacts, SampledFrame, Stacks

_OFFLOAD = FindingKind(
    name="needless_savings",
    confidence=0.9,
    headline="Parameters on the {device} take {share:percent} of each iteration; {gpu_free_bytes:bytes} are free",
    details=(
        "In steps {step} to {last_step}, {seconds:seconds} of each {iteration_s:seconds} iteration go into DeepSpeed's"
        " copies of parameters to the {device}: offload_param.device is {setting}[ and pin_memory {pinned}]. Each rank's"
        " share of the parameters is {needed_bytes:bytes}, and {gpu_free_bytes:bytes} of its GPU were never used."
    ),
    advice="Keep the parameters on the GPU: take offload_param out of the DeepSpeed config.",
    fix='"offload_param": {"device": "none"}',
)
_GATHERS = FindingKind(
    name="needless_savings",
    confidence=0.8,
    headline="Gathering parameters takes {share:percent} of each iteration; {gpu_free_bytes:bytes} are free",
    details=(
        "In steps {step} to {last_step}, at least {seconds:seconds} of each {iteration_s:seconds} iteration go into"
        " gathering parameters. {keys}: {effects}. All gathered parameters together are {needed_bytes:bytes}, and"
        " {gpu_free_bytes:bytes} of each GPU were never used."
    ),
    advice="Leave these settings out of the DeepSpeed config, or set them to their defaults.",
    fix="{defaults}",
)
# What keeps parameters from being gathered ahead or from staying gathered: DeepSpeed's default, and what less of it means.
_DEFAULTS: Mapping[str, tuple[float, str, str]] = {
    "prefetch_bucket_size": (5e7, "5e7", "nothing is gathered ahead"),
    "param_persistence_threshold": (1e5, "1e5", "small parameters are gathered each time too"),
    "max_live_parameters": (1e9, "1e9", "few are kept at a time"),
    "max_reuse_distance": (1e9, "1e9", "all are released after use and gathered again in the backward"),
}
# A setting counts if it is this part of the default, or of what the model has.
_SMALL = 0.01
# Memory that is plenty: this many times what is needed.
_PLENTY = 3.0
# The steps after which samples are looked at, and the fewest samples of a phase.
_LOOKS, _FEWEST_SAMPLES = (20, 40, 80, 160), 10
# Less of an iteration is not worth a change.
_LEAST_SHARE = 0.1
_PHASES = ("forward", "backward", "step")


class _Saving(NamedTuple):
    """What an engine saves memory with."""

    kind: FindingKind
    needed_bytes: float  # on each GPU without it
    values: Mapping[str, Any]  # of the texts


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report for each attempt the first look that shows what the settings cost."""
    group, lead = window.subject, window.subject.lead
    if not lead.is_on_gpu or window.count_reports(_OFFLOAD):
        return
    for count in window.items([count for count in _LOOKS if len(lead.steps) >= count + SETTLED_STEPS]):
        saving = _find_saving(lead.engine)
        if saving is not None and (found := _build_finding(group, saving, lead.steps[SETTLED_STEPS:][:count])) is not None:
            yield found
            return


def _find_saving(engine: EngineFacts) -> _Saving | None:
    parameters, zero = engine.parameters, (engine.config or {}).get("zero_optimization")
    if engine.zero_stage != 3 or not isinstance(zero, Mapping) or not isinstance(parameters, int):
        return None
    all_bytes = float(parameters * (2 if engine.dtype in ("fp16", "bf16") else 4))
    if engine.offload_parameters in ("cpu", "nvme"):
        offload = zero.get("offload_param")
        pinned = offload.get("pin_memory") if isinstance(offload, Mapping) else None
        device = "CPU" if engine.offload_parameters == "cpu" else "NVMe"
        values = {"device": device, "setting": engine.offload_parameters, "pinned": "false" if pinned is False else None}
        return _Saving(_OFFLOAD, all_bytes / (engine.data_parallel or 1), values)
    small = [key for key, (default, *_) in _DEFAULTS.items() if _is_small(zero.get(key), min(default, parameters))]
    if not small:
        return None
    effects = "; ".join(_DEFAULTS[key][2] for key in small)
    keys = ", ".join(f"{key} = {zero[key]:,}" for key in small)
    defaults = ", ".join(f'"stage3_{key}": {_DEFAULTS[key][1]}' for key in small)
    return _Saving(_GATHERS, all_bytes, {"keys": keys, "effects": effects, "defaults": defaults})


def _is_small(value: object, usual: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value < _SMALL * usual


def _build_finding(group: Group, saving: _Saving, rows: Rows) -> Finding | None:
    begin_ns, known_ns = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    free = min((measure_free_bytes(one, known_ns) for one in group.processes), default=float("nan"))
    share = _measure_share(group.lead, rows, is_offload=saving.kind is _OFFLOAD)
    use = measure_gpu_use(group.lead, begin_ns, known_ns)
    share = min(share, 1 - use) if not np.isnan(use) else share
    if not free >= _PLENTY * saving.needed_bytes or share < _LEAST_SHARE:
        return None
    iteration_s = float(np.median(rows["iteration_s"]))
    evidence = {
        "share": share,
        "seconds": share * iteration_s,
        "iteration_s": iteration_s,
        "needed_bytes": saving.needed_bytes,
        "gpu_free_bytes": free,
    }
    return saving.kind.at_steps(group, rows, evidence, cost=share, last_step=int(rows["step"][-1]), **saving.values)


def _measure_share(lead: Process, rows: Rows, *, is_offload: bool) -> float:
    """Return the part of an iteration in which the samples of its phases are in DeepSpeed's functions for parameters."""
    begin_ns, known_ns = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    phased = lead.phased_steps_until(known_ns)
    phased = phased[phased["begin_unix_ns"] >= begin_ns]
    if not len(phased):
        return 0.0
    looks = [one for one in select_events(lead.events_of(Stacks), begin_ns, known_ns) if one.why == SHARE]
    seconds = 0.0
    for phase in _PHASES:
        stacks = [(look, stack) for look in looks if look.where == phase for stack in look.stacks]
        count = sum(stack.count or 0 for _, stack in stacks)
        if count >= _FEWEST_SAMPLES:
            inside = _is_offloading if is_offload else _is_gathering
            found = sum(stack.count or 0 for look, stack in stacks if any(inside(look.frames[at]) for at in stack.frames))
            seconds += found / count * float(np.median(phased[f"{phase}_s"]))
    return seconds / float(np.median(phased["iteration_s"]))


def _is_offloading(frame: SampledFrame) -> bool:
    return "swap_tensor/" in frame.file or frame.function.endswith("_reassign_or_swap_out_partitioned_parameters")


def _is_gathering(frame: SampledFrame) -> bool:
    return frame.file.endswith(("zero/partitioned_param_coordinator.py", "zero/partition_parameters.py"))
