"""The first step in which the optimizer really updates: its state appears, on the GPU or on the host.

Read from the inventories of tensors that the probe takes around the first update, and the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.fp16_warmup import (
    count_sharers,
    count_skipped_first,
    estimate_state_bytes,
    find_inventory,
    read_state_bytes,
)
from zerotop.analysis.engine import LOOP
from zerotop.analysis.formatting import Text

_KIND = FindingKind(
    name="first_real_step",
    severity=Severity.INFO,
    confidence=0.99,
    sentence=(
        "The first update allocated optimizer state in step {step}[, after {skipped:count skipped step}]: {places} of each"
        " rank[ ({bytes_per_parameter:.1f} bytes per parameter it keeps[, {expected_bytes:bytes} expected])]."
        " step() took {step_s:seconds}."
    ),
    advice=(
        "The state stays: judge whether a batch fits only after this step."
        ' "zero_optimization.offload_optimizer.device": "cpu" moves it from the GPU to host memory.'
    ),
)
_OFFLOAD_ADVICE = (
    "The state stays: judge whether host memory is enough only after this step. If it is not,"
    ' "zero_optimization.offload_optimizer.device": "nvme" keeps it on disk.'
)
_STAGE_0_ADVICE = 'The state stays: "zero_optimization.stage": 1 divides it by the number of ranks.'
_CPU_ADVICE = "The state stays: judge whether memory is enough only after this step. Stages 1 to 3 divide it alike."
_LOOP_ADVICE = "The state stays: judge whether a batch fits only after this step."
_SHARING_ADVICE = _LOOP_ADVICE + " Every rank holds all of it; FSDP divides it by the number of ranks."
_PLACES = {
    "device": "{optimizer_state_device_bytes:bytes} on the GPU",
    "host": "{optimizer_state_host_bytes:bytes} in the host memory",
}


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report at most once for each attempt of the job."""
    for group in recording.groups:
        steps, skipped = group.lead.steps, count_skipped_first(group.lead)
        if _KIND.name not in group.reported and skipped < len(steps) and int(steps["step"][0]) == 0:
            yield _build_finding(group, skipped)


def _build_finding(group: Group, skipped: int) -> Annotation | None:
    lead = group.lead
    first = lead.steps[skipped]
    begin_ns, end_ns = int(first["begin_unix_ns"]), int(first["end_unix_ns"])
    inventory = find_inventory(lead, "after_update")
    # The training thread takes the inventory at the end of the step.
    state = read_state_bytes(inventory)
    if inventory is None or not state or not begin_ns <= inventory.unix_ns <= end_ns + 10**9:
        return None
    group.reported.add(_KIND.name)
    known_ns = max(end_ns, inventory.unix_ns)
    parameters = lead.engine.get("trainable_parameters")
    before, after = lead.allocator.read_last(begin_ns), lead.allocator.read_window(begin_ns, known_ns)
    is_sampled = before is not None and len(after) > 0
    evidence = {
        **{f"optimizer_state_{place}_bytes": float(size) for place, size in state.items()},
        "skipped_before": float(skipped),
        "step_s": float(first["step_s"]),
        "expected_bytes": estimate_state_bytes(lead.engine) or None,
        "bytes_per_parameter": None,
        "allocated_growth_bytes": after.rows["allocated_bytes"][-1] - before["allocated_bytes"] if is_sampled else None,
        "host_growth_bytes": _measure_host_growth(group, begin_ns, known_ns),
    }
    if isinstance(parameters, int) and parameters > 0:
        evidence["bytes_per_parameter"] = sum(state.values()) / parameters * count_sharers(lead.engine)
    return _KIND.with_changes(advice=_choose_advice(lead.engine)).at(
        group,
        begin_ns,
        end_ns,
        evidence,
        known_ns=known_ns,
        step=int(first["step"]),
        skipped=skipped or None,
        places=Text(" and ".join(text for place, text in _PLACES.items() if place in state), evidence),
    )


def _measure_host_growth(group: Group, begin_ns: int, end_ns: int) -> float | None:
    """By how much the lead's resident memory grew in the step; None if it was not sampled."""
    samples = group.lead.host_samples
    before, after = samples.read_last(begin_ns), samples.read_window(begin_ns, end_ns)
    if before is None or not len(after):
        return None
    return float(int(after.rows["rss_bytes"].max()) - int(before["rss_bytes"]))


def _choose_advice(engine: dict[str, Any]) -> str:
    if engine.get("kind") == LOOP:
        return _SHARING_ADVICE if engine.get("parallelism") == "DDP" else _LOOP_ADVICE
    if engine.get("offload_optimizer") in ("cpu", "nvme"):
        return _OFFLOAD_ADVICE
    if not engine.get("zero_stage"):
        return _STAGE_0_ADVICE
    return _KIND.advice if str(engine.get("device") or "").startswith("cuda") else _CPU_ADVICE
