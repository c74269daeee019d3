"""The first step that updates parameters: the optimizer's state appears, on the GPU or on the host.

Read from the steps, and from the inventories of tensors that the probe takes around the first update.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.engine import LOOP
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.host_load import is_host_short, read_memory
from zerotop.analysis.findings.support.steps import fp16_warmup
from zerotop.analysis.formatting import GIB
from zerotop.recording.steps.step_memory import measure_held_bytes
from zerotop_probe.recording.events import EngineFacts, Entered

_KIND = FindingKind(
    name="first_real_step",
    severity=Severity.INFO,
    confidence=0.99,
    gpu_bytes="optimizer_state_device_bytes",
    host_bytes="optimizer_state_host_bytes",
    headline="The first update allocated {state_bytes:bytes} of optimizer state {place}",
    details=(
        "Each rank holds that much from step {step} on[: {bytes_per_parameter:.1f} bytes for each parameter that it keeps"
        "[, {expected_bytes:bytes} expected]].[ step() took {step_s:seconds}.]"
    ),
    advice="Judge whether a batch fits only after this step.",
)
# Advice and fix, by the setup.
_ON_HOST = (
    "Judge whether host memory is enough only after this step.",
    '"offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}',
)
_STAGE_0 = "Each rank holds a full copy: ZeRO stage 1 divides it among the ranks.", '"zero_optimization": {"stage": 1}'
_ON_GPU = "Judge whether a batch fits only after this step.", '"offload_optimizer": {"device": "cpu"}'
_REPLICATED = "Judge whether a batch fits only after this step. Each rank holds a full copy: FSDP divides it among them."
_PLACES = {"device": "on each rank's GPU", "host": "in host memory"}
# Bytes of state that are worth a finding even if they are a smaller share of the GPU or host.
STATE_BYTES = 1 * GIB
STATE_SHARE = 0.05


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report at most once for each attempt. If fp16 skipped the first steps, ``skipped_steps`` reports their end instead."""
    lead = window.subject.lead
    steps, skipped = lead.steps, fp16_warmup.count_skipped_first(lead)
    if lead.events_of(Entered):
        return  # there were updates before the recording
    if skipped < min(len(steps), fp16_warmup.SKIPPED_STEPS) and int(steps["step"][0]) == 0:
        yield _build_finding(window, skipped)


def _build_finding(window: SearchWindow[Group], skipped: int) -> Finding | None:
    group, lead = window.subject, window.subject.lead
    first = lead.steps[skipped]
    begin_ns, end_ns = int(first["begin_unix_ns"]), int(first["end_unix_ns"])
    inventory = fp16_warmup.find_inventory(lead, "after_update")
    # The training thread takes the inventory at the end of the step.
    state = fp16_warmup.read_state_bytes(inventory)
    if inventory is None or not state or not begin_ns <= inventory.unix_ns <= end_ns + 10**9:
        return None
    window.is_closed = True
    known_ns = max(end_ns, inventory.unix_ns)
    if not _is_notable(lead, state, known_ns):
        return None
    parameters = lead.engine.trainable_parameters
    before, after = lead.records("allocator").read_last(begin_ns), lead.records("allocator").read_window(begin_ns, known_ns)
    is_sampled = before is not None and len(after) > 0
    evidence = {
        **{f"optimizer_state_{place}_bytes": float(size) for place, size in state.items()},
        "skipped_before": float(skipped),
        "step_s": None if first["counted"] else float(first["step_s"]),
        "expected_bytes": fp16_warmup.estimate_state_bytes(lead.engine) or None,
        "bytes_per_parameter": None,
        "allocated_growth_bytes": after.rows["allocated_bytes"][-1] - before["allocated_bytes"] if is_sampled else None,
        "host_growth_bytes": _measure_host_growth(group, begin_ns, known_ns),
    }
    if parameters:
        evidence["bytes_per_parameter"] = sum(state.values()) / parameters * fp16_warmup.count_sharers(lead.engine)
    is_short = is_host_short(lead, known_ns) if "host" in state else group.is_memory_short(known_ns)
    advice, fix = _choose_advice(lead.engine) if is_short else ("", "")
    return _KIND.with_changes(advice=advice, fix=fix).at(
        group,
        begin_ns,
        end_ns,
        evidence,
        known_ns=known_ns,
        step=int(first["step"]),
        state_bytes=sum(state.values()),
        place=" and ".join(text for place, text in _PLACES.items() if place in state),
    )


def _is_notable(process: Process, state: dict[str, int], time_ns: int) -> bool:
    memory = read_memory(process.recording, process.host, time_ns)
    sizes = {"device": process.device_bytes, "host": memory.limit_bytes if memory is not None else None}
    least = {place: STATE_SHARE * total if total else STATE_BYTES for place, total in sizes.items()}
    return any(size >= min(STATE_BYTES, least[place]) for place, size in state.items())


def _measure_host_growth(group: Group, begin_ns: int, end_ns: int) -> float | None:
    """Return the growth of the lead's host memory in the step; None if it was not sampled."""
    samples = group.lead.host_samples
    before, after = samples.read_last(begin_ns), samples.read_window(begin_ns, end_ns)
    if before is None or not len(after):
        return None
    return float(measure_held_bytes(after.rows).max() - measure_held_bytes(before))


def _choose_advice(engine: EngineFacts) -> tuple[str, str]:
    if engine.kind == LOOP:
        return (_REPLICATED if engine.parallelism == "DDP" else _KIND.advice), ""
    if engine.offload_optimizer in ("cpu", "nvme"):
        return _ON_HOST
    if not engine.zero_stage:
        return _STAGE_0
    return _ON_GPU if (engine.device or "").startswith("cuda") else (_KIND.advice, "")
