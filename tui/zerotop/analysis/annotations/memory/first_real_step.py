"""The first step in which the optimizer really updates: its state appears, on the GPU or on the host.

Read from the inventories of tensors that the probe makes around the first update, and the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerotop.analysis.annotations.support.annotation import Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.fp16_warmup import (
    count_sharers,
    count_skipped_first,
    estimate_state_bytes,
    find_inventory,
    read_state_bytes,
)
from zerotop.analysis.formatting import format_bytes, format_count, format_seconds


@dataclass
class _State:
    """Whether it was told of an attempt."""

    is_reported: bool = False


def detect(facts: Evidence) -> Iterator[Annotation]:
    """At most one finding for each attempt of the job."""
    for group in facts.groups:
        steps, skipped = group.lead.steps, count_skipped_first(group.lead)
        if group.get_state(_State).is_reported or skipped >= len(steps) or int(steps["step"][0]) != 0:
            continue
        found = _build_finding(group, skipped)
        if found is not None:
            group.get_state(_State).is_reported = True
            yield found


def _build_finding(group: Group, skipped: int) -> Annotation | None:
    lead = group.lead
    first = lead.steps[skipped]
    begin_ns, known_ns = int(first["begin_unix_ns"]), int(first["end_unix_ns"])
    told = find_inventory(lead, "after_update")
    # The inventory is made at the end of the step, by the thread that trains.
    state = read_state_bytes(told)
    if told is None or not state or not begin_ns <= told.unix_ns <= known_ns + 10**9:
        return None
    known_ns = max(known_ns, told.unix_ns)
    parameters = lead.engine.get("trainable_parameters")
    evidence = {f"optimizer_state_{where}_bytes": float(count) for where, count in state.items()}
    evidence |= {"skipped_before": float(skipped), "step_s": float(first["step_s"])}
    expected = estimate_state_bytes(lead.engine)
    if expected:
        evidence["expected_bytes"] = float(expected)
    if isinstance(parameters, int) and parameters > 0:
        evidence["bytes_per_parameter"] = sum(state.values()) / parameters * count_sharers(lead.engine)
    before, after = lead.allocator.read_last(begin_ns), lead.allocator.read_window(begin_ns, known_ns)
    if before is not None and len(after):
        evidence["allocated_growth_bytes"] = float(after.rows["allocated_bytes"][-1] - before["allocated_bytes"])
    hosted = _measure_host_growth(group, begin_ns, known_ns)
    if hosted is not None:
        evidence["host_growth_bytes"] = hosted
    return Annotation(
        name="first_real_step",
        begin_ns=begin_ns,
        end_ns=int(first["end_unix_ns"]),
        known_ns=known_ns,
        step=int(first["step"]),
        ranks=group.ranks_at(known_ns),
        severity=Severity.INFO,
        confidence=0.99,
        sentence=_describe_finding(evidence, int(first["step"])),
        advice=_choose_advice(lead.engine),
        evidence=evidence,
    )


def _measure_host_growth(group: Group, begin_ns: int, end_ns: int) -> float | None:
    """How much the lead's resident memory grew in the step; None where it was not sampled."""
    samples = group.lead.host_samples
    before, after = samples.read_last(begin_ns), samples.read_window(begin_ns, end_ns)
    if before is None or not len(after):
        return None
    return float(int(after.rows["rss_bytes"].max()) - int(before["rss_bytes"]))


def _describe_finding(evidence: dict[str, float], step: int) -> str:
    after = f", after {format_count(int(evidence['skipped_before']), 'skipped step')}," if evidence["skipped_before"] else ""
    text = f"Step {step}{after} was the first in which the optimizer updated: its state appeared, "
    places = [
        f"{format_bytes(evidence[name])} {where} of each rank"
        for name, where in (
            ("optimizer_state_device_bytes", "on the GPU"),
            ("optimizer_state_host_bytes", "in the host memory"),
        )
        if name in evidence
    ]
    text += " and ".join(places)
    if "bytes_per_parameter" in evidence:
        text += f" ({evidence['bytes_per_parameter']:.1f} bytes for each parameter that it keeps"
        text += f", {format_bytes(evidence['expected_bytes'])} expected)" if "expected_bytes" in evidence else ")"
    return f"{text}, and step() took {format_seconds(evidence['step_s'])}."


def _choose_advice(engine: dict[str, Any]) -> str:
    if engine.get("offload_optimizer") in ("cpu", "nvme"):
        return (
            "It stays for good, so judge whether host memory is enough only after this step; where it is not,"
            ' "zero_optimization.offload_optimizer.device": "nvme" keeps it on disk.'
        )
    if not engine.get("zero_stage"):
        return 'It stays for good: "zero_optimization.stage": 1 divides it by the number of ranks.'
    if not str(engine.get("device") or "").startswith("cuda"):
        return "It stays for good, so judge whether memory is enough only after this step; stages 1 to 3 divide it alike."
    return (
        "It stays for good, so judge whether a batch fits only after this step;"
        ' "zero_optimization.offload_optimizer.device": "cpu" moves it from the GPU to host memory.'
    )
