"""PyTorch's flags that are off their defaults from the start: fused attention switched off, deterministic algorithms.

How fast the job would be otherwise is not known. Attention without a fused kernel keeps the scores of all pairs of tokens:
looks at memory show them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from zerotop.analysis.code_line import find_own
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.memory.looks import read_looks
from zerotop.analysis.memory.block_lines import Look
from zerotop_probe.recording.event_values import PEAK
from zerotop_probe.recording.events import Stacks, TorchFlags

_ATTENTION = FindingKind(
    name="fused_attention_off",
    confidence=0.9,
    headline="Fused attention is off: {line_bytes:bytes} of a {peak:bytes} peak are at {place}",
    details=(
        "PyTorch's fused attention kernels are switched off in this process, so scaled_dot_product_attention at"
        " {location} uses the one that writes the score of each pair of tokens to memory, and keeps it for the backward."
        " The largest blocks there are {count:count block} of {block:bytes}."
    ),
    advice="Switch them on again: take out the calls that disable them.",
    fix="torch.backends.cuda.enable_flash_sdp(True); torch.backends.cuda.enable_mem_efficient_sdp(True)",
    gpu_bytes="block_bytes",
)
_DETERMINISTIC = FindingKind(
    name="deterministic_algorithms",
    severity=Severity.INFO,
    confidence=0.9,
    headline="Deterministic algorithms are on from the start",
    details=(
        "{switches} on: PyTorch then uses kernels that give the same results in each run,"
        " some of which are slower. How much that costs this job is not known: compare a short run without."
    ),
)
# The least of the peak, and bytes, that a line of attention holds to be told.
_LEAST_SHARE, _LEAST_BYTES = 0.2, 256 << 20
_FUSED = ("flash_attention", "efficient_attention", "cudnn_attention")
_CALL = "scaled_dot_product_attention"


@in_each_attempt(kinds=2)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report each once for each attempt."""
    group, lead = window.subject, window.subject.lead
    for flags in lead.events_of(TorchFlags)[:1]:
        yield window.find_once(partial(_find_deterministic, group, flags), _DETERMINISTIC)
        if lead.is_on_gpu and _is_unfused(flags):
            yield window.find_once(partial(_find_attention, group, lead, flags), _ATTENTION)


def _is_unfused(flags: TorchFlags) -> bool:
    """Whether no fused kernel may be used. PyTorch before 2.5 has none of cuDNN's."""
    values = [getattr(flags, name) for name in _FUSED]
    return False in values and not any(values)


def _find_deterministic(group: Group, flags: TorchFlags) -> Finding | None:
    switches = [
        name
        for name, value in (
            ("torch.use_deterministic_algorithms", flags.deterministic_algorithms),
            ("torch.backends.cudnn.deterministic", flags.cudnn_deterministic),
        )
        if value
    ]
    if not flags.deterministic_algorithms:  # cuDNN alone has fast kernels of the kind
        return None
    verb = "is" if len(switches) == 1 else "are"
    return _DETERMINISTIC.at(
        group, flags.unix_ns, flags.unix_ns, {"deterministic_algorithms": 1.0}, switches=f"{' and '.join(switches)} {verb}"
    )


def _find_attention(group: Group, lead: Process, flags: TorchFlags) -> Finding | None:
    called = _list_calls(lead)
    for look in read_looks(lead, PEAK):
        for location, sampled_ns in called.items():
            sizes = _list_sizes(look, location)
            total = sum(size * count for size, count in sizes)
            if total >= max(_LEAST_BYTES, _LEAST_SHARE * look.whole_bytes):
                block, count = max(sizes, key=lambda one: one[0] * one[1])
                place = next(one.place for one in look.blocks if one.line is not None and one.line.location == location)
                return _ATTENTION.at(
                    group,
                    look.begin_ns,
                    max(look.known_ns, sampled_ns, flags.unix_ns),
                    {"line_bytes": total, "peak_bytes": look.whole_bytes, "block_bytes": block * count},
                    peak=look.whole_bytes,
                    place=place,
                    location=location,
                    block=block,
                    count=count,
                )
    return None


def _list_calls(lead: Process) -> dict[str, int]:
    """Return the lines at which samples have seen a call of the function, each with when that was first known."""
    called: dict[str, int] = {}
    for event in lead.events_of(Stacks):
        for stack in event.stacks:
            own = find_own(event.frames, stack)
            if own is not None and any(name.endswith(_CALL) for name in own.callees):
                called.setdefault(f"{own.file}:{own.line}", event.unix_ns)
    return called


def _list_sizes(look: Look, location: str) -> list[tuple[int, int]]:
    return [
        one for blocks in look.blocks if blocks.line is not None and blocks.line.location == location for one in blocks.sizes
    ]
