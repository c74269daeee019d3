"""The report of ``zerotop memory`` as aligned plain text: GiB (1024^3), bytes only where they are few."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from zerotop.analysis.failures.out_of_memory import PostMortem
from zerotop.analysis.memory.allocator_health import AllocatorHealth
from zerotop.analysis.memory.host_ledger import HostLedger
from zerotop.analysis.memory.ledger_rows import UNEXPLAINED, GpuLedger
from zerotop.analysis.memory.phase_peaks import BEFORE, RankPeaks
from zerotop.analysis.memory.zero_model import Difference, EngineSetup, is_for_setup

if TYPE_CHECKING:
    from zerotop.commands.memory import MemoryReport

_GIB = 1 << 30
_UNKNOWN = "-"
_MIN_BYTES = 1 << 20


def format_report(report: MemoryReport) -> list[str]:
    """The whole report, one line an element."""
    parts = [_format_head(report)]
    if report.post_mortem is not None:
        parts.append(_format_failure(report.post_mortem))
    elif report.failure is not None:
        parts.append([report.failure.what, f"  {report.failure.why}", f"  {report.failure.advice}"])
    for gpu, differences in zip(report.gpus, report.gpu_differences, strict=True):
        parts.append(_format_gpu(gpu, differences))
    if not report.gpus:
        parts.append(["No GPU was seen: host memory is all there is to show."])
    parts += [_format_peaks(peaks, report) for peaks in report.peaks]
    parts += [_format_host(*pair) for pair in zip(report.hosts, report.host_differences, strict=True)]
    parts += [_format_allocator(health) for health in report.allocators]
    parts += [_format_update(rank, times) for rank, times in report.updates.items()]
    parts.append(_format_estimates(report))
    return [line for part in parts if part for line in ("", *part)][1:]


def _format_head(report: MemoryReport) -> list[str]:
    when = f"at the end of step {report.step}" if report.step is not None else "at the failure"
    if report.step is None and report.post_mortem is None:
        when = "at its end"
    beside = f"; {report.engines} engines in each rank, this is one of them" if report.engines > 1 else ""
    return [f"{report.session}, {when}: {_describe_setup(report.setup)}{beside}", *_format_notes(report.notices)]


def _describe_setup(setup: EngineSetup | None) -> str:
    if setup is None:
        return "no rank has made a DeepSpeed engine"
    places = (("optimizer", setup.offload_optimizer), ("parameters", setup.offload_parameters))
    offload = "".join(f", {what} on {where}" for what, where in places if where != "none")
    ranks = f"{setup.ranks} rank{'s' if setup.ranks > 1 else ''}"
    return f"ZeRO-{setup.stage}{offload}, {setup.parameters / 1e6:,.1f} M parameters of {setup.bytes_each} bytes, {ranks}"


def _format_gpu(gpu: GpuLedger, differences: Sequence[Difference]) -> list[str]:
    of = {each.key: each for each in differences}
    title = f"GPU {gpu.index} {gpu.name} on {gpu.host}, {_format_ranks(gpu.ranks)}"
    rows = [(title, "GiB", "expected", "difference", "rests on")]
    for row in gpu.rows:
        each = of.get(row.key)
        rows.append((f"  {row.label}", format_gib(row.bytes), *_format_difference(each), row.basis))
    rows.append(("  the device", format_gib(gpu.total_bytes), "", "", ""))
    notes = [row.note for row in gpu.rows if row.note] + [each.note for each in differences if each.note] + list(gpu.notes)
    if gpu.sum_bytes(UNEXPLAINED) >= _MIN_BYTES:
        largest = ", ".join(f"{size:,}" for size in gpu.unexplained_largest[:5])
        notes.append(f"The largest unexplained blocks, in bytes: {largest}.")
    return [*align_table(rows), *_format_notes(notes)]


def _format_difference(each: Difference | None) -> tuple[str, str]:
    if each is None or each.expected_bytes is None or each.difference_bytes is None:
        return ("", "") if each is None else (_UNKNOWN, _UNKNOWN)
    return format_gib(each.expected_bytes), format_gib(each.difference_bytes, sign=True)


def _format_ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _format_peaks(peaks: RankPeaks, report: MemoryReport) -> list[str]:
    owner, rank = peaks.owning_peak, peaks.process.rank
    title = f"Peak of rank {rank}: {format_gib(owner.allocated_bytes)} GiB allocated, {owner.place_text}"
    if peaks.peak_before_entry is not None:
        title += f"; {format_gib(peaks.peak_before_entry.allocated_bytes)} {BEFORE}"
    rows = [("  highest in each phase", "GiB", "step", "")]
    for p in peaks.phases:
        step = str(p.step) if p.is_in_step else _UNKNOWN
        rows.append((f"  {p.phase}", format_gib(p.allocated_bytes), step, "" if p.exact else "sampled"))
    found = [title, *align_table(rows)]
    for at_peak in report.at_peak:
        if at_peak.rank == rank and at_peak.ledger.host == peaks.process.host and at_peak.peak.place == owner.place:
            held = [(f"  {row.label}", format_gib(row.bytes)) for row in at_peak.ledger.rows if row.bytes]
            found += align_table([("  the device then", "GiB"), *held])
    rule = report.rules.get(rank)
    if rule is not None:
        found.append(
            f"  Rule of thumb: parameters {format_gib(rule.parameters)} + optimizer {format_gib(rule.optimizer)} + the larger of gradients"
            f" {format_gib(rule.gradients)} + intermediates {format_gib(rule.intermediates)} and activations {format_gib(rule.activations)}"
            f" = {format_gib(rule.peak_bytes)} GiB; measured {format_gib(owner.allocated_bytes)}"
        )
    return found


def _format_host(host: HostLedger, differences: Sequence[Difference]) -> list[str]:
    of = {each.key: each for each in differences}
    title = f"Host memory of rank {host.rank} on {host.host}, process {host.pid}"
    rows = [(title, "GiB", "expected", "difference", "pinned", "bytes/parameter", "rests on")]
    for row in host.rows:
        per = f"{row.per_parameter:.2f}" if row.per_parameter else ""
        pinned = format_gib(row.pinned_bytes) if row.pinned_bytes else ""
        rows.append((f"  {row.label}", format_gib(row.bytes), *_format_difference(of.get(row.key)), pinned, per, row.basis))
    rows.append(
        ("  resident", format_gib(host.resident_bytes), "", "", format_gib(host.shared_bytes), "", "shared memory as pinned")
    )
    if host.swap_bytes:
        rows.append(("  swapped out", format_gib(host.swap_bytes), "", "", "", "", ""))
    notes = [each.note for each in differences if each.note] + list(host.notes)
    if host.pinned is not None and host.pinned.held_bytes:
        told = (host.pinned.held_bytes, host.pinned.active_bytes, host.pinned.tensors_bytes)
        notes.append("PyTorch's pinned allocator holds {} GiB, {} in use, for tensors of {}.".format(*map(format_gib, told)))
    return [*align_table(rows), *_format_notes(notes)]


def _format_allocator(health: AllocatorHealth) -> list[str]:
    cost = f", {health.extra_s:.2f} s longer than other steps" if health.extra_s is not None else ""
    segments = f", {health.segments} segments" if health.segments is not None else ""
    counts = f"{health.retries} retries{cost}, {health.ooms} out-of-memory errors{segments}"
    found = [f"Allocator of rank {health.rank}: {counts}"]
    found += [
        f"  step {flush.step}, {flush.phase}: {flush.retries} with {format_gib(flush.freed_bytes)} GiB given back"
        + (f", {flush.extra_s:+.2f} s" if flush.extra_s is not None else "")
        for flush in health.flushes[-5:]
    ]
    if health.at_peak is not None:
        peak = health.at_peak
        found.append(
            f"  held the most {peak.where}: {format_gib(peak.reserved_bytes)} GiB reserved,"
            f" {format_gib(peak.unallocated_bytes)} of it not allocated ({peak.unallocated_share:.0%}), {format_gib(peak.inactive_split_bytes)} in split blocks"
        )
    settings = health.settings
    found.append(f"  {settings.variable}={settings.text}" if settings.variable else "  PyTorch's default configuration")
    found += [] if settings.caching else ["  caching is off: PYTORCH_NO_CUDA_MEMORY_CACHING is set"]
    return [*found, *_format_notes(settings.notes)]


def _format_update(rank: int, times: Mapping[str, float]) -> list[str]:
    """What the parts of step() take; nothing where it has none."""
    parts = [(name, seconds) for name, seconds in times.items() if name not in ("step_s", "gpu_idle_s")]
    if not parts:
        return []
    told = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {seconds:.3f}" for name, seconds in parts)
    found = [f"Inside step() of rank {rank}, the median of {times.get('step_s', 0.0):.3f} s: {told} s"]
    if "gpu_idle_s" in times:
        found.append(f"  the GPU is idle for at least {times['gpu_idle_s']:.3f} s of it")
    return found


def _format_failure(failure: PostMortem) -> list[str]:
    who = f"rank {failure.rank}" if failure.rank is not None else "a rank"
    where = f", GPU {failure.device}" if failure.device is not None else ""
    step = f", step {failure.step}, micro-step {failure.micro_step}" if failure.step is not None else ""
    phase = f", {failure.phase} in {failure.outer_phase}" if failure.phase != failure.outer_phase else f", {failure.phase}"
    lived = {True: "; the job trained on", False: "; the job did not survive it", None: ""}[failure.survived]
    found = [f"Out of memory: {who}{where}{step}{phase if failure.phase else ''}{lived}"]
    if failure.rows is not None:
        shape = f"{failure.rows} rows" + (f" x {failure.sequence} tokens" if failure.sequence else "")
        found.append(f"  last micro-batch: {shape}")
    if failure.spans:
        last = ", ".join(f"{s.phase}{' (failed)' if s.failed else ''} {s.seconds:.3f} s" for s in failure.spans[-6:])
        found.append(f"  last phases: {last}")
    if failure.kind in ("host", "killed") and failure.host_memory:
        used = ", ".join(format_gib(sample.used_bytes) for sample in failure.host_memory[-8:])
        found.append(f"  host memory in the last seconds: {used} of {format_gib(failure.host_memory[-1].limit_bytes)} GiB")
    found += [f"  {failure.cause}", f"  {failure.advice}"]
    return found


def _format_estimates(report: MemoryReport) -> list[str]:
    if report.setup is None or not report.estimates:
        return []
    rows = [("DeepSpeed's own estimates, without activations", "GiB each GPU", "GiB each node", "")]
    for estimate in report.estimates:
        mine = "this job" if is_for_setup(estimate, report.setup) else ""
        rows.append(
            (
                f"  stage {estimate.stage}, {estimate.option_text}",
                format_gib(estimate.gpu_bytes),
                format_gib(estimate.host_bytes),
                mine,
            )
        )
    missing = ["Those for stage 3 need the largest layer's size, which was not recorded."]
    return [*align_table(rows), *_format_notes(missing if report.setup.largest_layer is None else [])]


def format_gib(size: int, *, sign: bool = False) -> str:
    """Bytes as GiB with three decimals."""
    return f"{size / _GIB:{'+' if sign else ''}.3f}"


def align_table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows with their columns aligned: the first and a last one of words to the left, figures to the right."""
    found = [tuple(row) for row in rows]
    widths = [max(len(row[place]) for row in found) for place in range(len(found[0]))]
    last = len(widths) - 1
    words = last > 1
    return [
        "  ".join(
            cell.ljust(width) if place == 0 or (place == last and words) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in found
    ]


def _format_notes(notes: Iterable[str]) -> list[str]:
    return [f"  {note}" for note in dict.fromkeys(notes)]
