"""The report of ``zerotop memory`` as aligned plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from zerotop.analysis.failures.oom_evidence import describe_batch
from zerotop.analysis.failures.out_of_memory import PostMortem
from zerotop.analysis.formatting import MIB, format_count, format_gib, format_ranks
from zerotop.analysis.memory.allocator_health import AllocatorHealth
from zerotop.analysis.memory.expected.zero_model import Difference
from zerotop.analysis.memory.host_ledger import LABELS, WORKERS, WORKERS_BASIS, HostLedger
from zerotop.analysis.memory.ledger_rows import OUTSIDE, UNEXPLAINED, GpuLedger
from zerotop.analysis.memory.memory_table import OUTDATED
from zerotop.analysis.memory.phase_peaks import BEFORE, RankPeaks
from zerotop.analysis.processes.phases import UNSEEN_NAME
from zerotop.analysis.reports.memory import MemoryReport
from zerotop.analysis.text_tables import align_columns

_UNKNOWN = "-"
# A figure in GiB below it is 0.000: of a host whose job keeps everything on the GPU, most rows.
_LEAST_BYTES = MIB // 2
# Whose figures a section has.
_NAMED = re.compile(r"GPU \d+ .* on \S+, (?:ranks? [\d, to and]*\d|no rank)|.*? of rank \d+( on \S+, process \d+)?")


def format_report(report: MemoryReport) -> list[str]:
    """Return the report, one line per element."""
    view = report.view
    sections = [_format_head(report)]
    if report.post_mortem is not None:
        sections.append(_format_failure(report.post_mortem))
    elif report.failure is not None:
        sections.append([report.failure.what, f"  {report.failure.why}", f"  {report.failure.advice}"])
    pairs = list(zip(view.gpus, report.gpu_differences, strict=True))
    used = [pair for pair in pairs if pair[0].ranks] or pairs  # of the job, where that is known
    sections += _fold_equal(_format_gpu(*pair) for pair in used)
    with_peak = {(one.ledger.host, one.ledger.index) for one in report.at_peak}  # also of ranks that have ended
    left_out = [gpu for gpu, _ in pairs if not gpu.ranks and (gpu.host, gpu.index) not in with_peak]
    if left_out and len(used) < len(pairs):
        named = ", ".join(f"{gpu.index} ({gpu.host})" for gpu in left_out)
        sections.append([f"No rank of the job uses GPU {named}."])
    if not view.gpus:
        sections.append(["No GPU recorded: host memory only."])
    sections += _fold_equal(_format_peaks(peaks, report) for peaks in report.peaks)
    sections += _fold_equal(_format_host(*pair) for pair in zip(view.hosts, report.host_differences, strict=True))
    sections += _fold_equal(_format_allocator(health) for health in report.allocators)
    sections += _fold_equal(_format_update(rank, times) for rank, times in report.updates.items())
    sections.append(_format_estimates(report))
    return [line for section in sections if section for line in ("", *section)][1:]


def _fold_equal(sections: Iterable[list[str]]) -> list[list[str]]:
    """Return the sections of ranks or GPUs, those with the same figures once, with the names of the others below."""
    folded: dict[tuple[str, ...], list[str]] = {}
    others: dict[tuple[str, ...], list[str]] = {}
    for section in filter(None, sections):
        named = _NAMED.match(section[0])
        figures = [section[0][named.end() :] if named else section[0], *section[1:]]
        key = tuple(" ".join(line.split()) for line in figures)
        if key in folded and named:
            others.setdefault(key, []).append(named[0])
        else:
            folded[key] = section
    for key, names in others.items():
        folded[key].append(f"  The same: {'; '.join(names)}.")
    return list(folded.values())


def _format_head(report: MemoryReport) -> list[str]:
    engines = f"; each rank has {report.engines} engines, this is one of them" if report.engines > 1 else ""
    return [
        f"{report.recording}, {report.view.moment_text}: {report.engine.describe_engine()}{engines}",
        *_format_notes(report.notices),
    ]


def _format_gpu(gpu: GpuLedger, differences: Sequence[Difference]) -> list[str]:
    by_key = {difference.key: difference for difference in differences}
    ranks = format_ranks(gpu.ranks) if gpu.ranks else "no rank"
    rows = [(f"GPU {gpu.index} {gpu.name} on {gpu.host}, {ranks}", "GiB", "expected", "difference", "source")]
    rows += [
        (f"  {row.describe()}", format_gib(row.bytes), *_format_difference(by_key.get(row.key)), row.basis)
        for row in gpu.rows
    ]
    rows.append(("  total", format_gib(gpu.total_bytes), "", "", ""))
    notes = [*(row.note for row in gpu.rows), *(difference.note for difference in differences), *gpu.notes]
    if gpu.sum_bytes(UNEXPLAINED) >= MIB and gpu.unexplained_largest:
        largest = ", ".join(f"{size:,}" for size in gpu.unexplained_largest[:5])
        notes.append(f"The largest unexplained blocks, in bytes: {largest}.")
    return [*align_columns(rows, "<>>><"), *_format_notes(notes)]


def _format_difference(difference: Difference | None) -> tuple[str, str]:
    if difference is None:
        return "", ""
    if difference.is_outdated and difference.expected_bytes is not None:
        return format_gib(difference.expected_bytes), OUTDATED
    if difference.expected_bytes is None or difference.difference_bytes is None:
        return _UNKNOWN, _UNKNOWN
    return format_gib(difference.expected_bytes), format_gib(difference.difference_bytes, sign=True)


def _format_peaks(peaks: RankPeaks, report: MemoryReport) -> list[str]:
    owner, rank = peaks.owning_peak, peaks.process.rank
    own = [gpu.allocated_bytes for gpu in report.view.gpus if gpu.ranks == (rank,) and gpu.host == peaks.process.host]
    # The last allocations of a step that fails are in no peak, only in the memory at its end.
    is_passed = any(size > owner.allocated_bytes for size in own)
    which = "" if not is_passed else ", of finished steps" if owner.has_ended else ", before the last allocations"
    whose = f"rank {rank}{which}"
    title = f"Peak of {whose}: {format_gib(owner.allocated_bytes)} GiB allocated, {owner.place_text}"
    if peaks.peak_before_entry is not None:
        title += f"; {format_gib(peaks.peak_before_entry.allocated_bytes)} {BEFORE}"
    rows = [("  peak per phase", "GiB", "step", "")]
    for peak in peaks.phases:
        step = peak.steps_text if peak.is_in_step else _UNKNOWN
        rows.append((f"  {peak.phase}", format_gib(peak.allocated_bytes), step, "" if peak.exact else "sampled"))
    lines = [title, *align_columns(rows, "<>><")]
    for at_peak in report.at_peak:
        if at_peak.rank == rank and at_peak.ledger.host == peaks.process.host and at_peak.peak.place == owner.place:
            held = [(f"  {row.describe()}", format_gib(row.bytes)) for row in at_peak.ledger.rows if row.bytes]
            sharing = at_peak.ledger.ranks
            whose = f", with {format_ranks(sharing)}" if len(sharing) > 1 else ""
            lines += align_columns([(f"  GPU memory at the peak{whose}", "GiB"), *held], "<>")
            lines += _format_notes([row.note for row in at_peak.ledger.rows if row.key == OUTSIDE])
    rule = report.rules.get(rank)
    if rule is not None and (measured := peaks.step_peak) is not None:
        lines.append(
            f"  Rule of thumb: parameters {format_gib(rule.parameters)} + optimizer {format_gib(rule.optimizer)}"
            f" + the larger of gradients {format_gib(rule.gradients)} + intermediates {format_gib(rule.intermediates)}"
            f" and activations {format_gib(rule.activations)}"
            f" = {format_gib(rule.peak_bytes)} GiB;"
            f" measured {format_gib(measured.allocated_bytes)} {measured.place_text}"
        )
    return lines


def _format_host(host: HostLedger, differences: Sequence[Difference]) -> list[str]:
    by_key = {difference.key: difference for difference in differences}
    title = f"Host memory of rank {host.rank} on {host.host}, process {host.pid}"
    rows = [(title, "GiB", "expected", "difference", "pinned", "bytes/parameter", "source")]
    for row in host.rows:
        if row.bytes < _LEAST_BYTES and not _expects_bytes(by_key.get(row.key)):
            continue
        per = f"{row.per_parameter:.2f}" if row.per_parameter else ""
        pinned = format_gib(row.pinned_bytes) if row.pinned_bytes else ""
        rows.append(
            (f"  {row.label}", format_gib(row.bytes), *_format_difference(by_key.get(row.key)), pinned, per, row.basis)
        )
    shared = format_gib(host.shared_bytes)
    rows.append(
        (
            "  resident",
            format_gib(host.resident_bytes),
            "",
            "",
            shared,
            "",
            "from the kernel; its shared memory counts as pinned",
        )
    )
    if host.worker_bytes is not None:
        rows.append((f"  {LABELS[WORKERS]}", format_gib(host.worker_bytes), "", "", "", "", WORKERS_BASIS))
    if host.swap_bytes:
        rows.append(("  swapped out", format_gib(host.swap_bytes), "", "", "", "", ""))
    notes = [*(difference.note for difference in differences), *host.notes]
    if host.pinned is not None and host.pinned.held_bytes >= _LEAST_BYTES:
        notes.append(host.pinned.describe(format_gib, "GiB"))
    return [*align_columns(rows, "<>>>>><"), *_format_notes(notes)]


def _expects_bytes(difference: Difference | None) -> bool:
    return difference is not None and (difference.expected_bytes or 0) >= _LEAST_BYTES


def _format_allocator(health: AllocatorHealth) -> list[str]:
    cost = f", {health.extra_s:.2f} s longer than other steps" if health.extra_s is not None else ""
    segments = f", {format_count(health.segments, 'segment')}" if health.segments is not None else ""
    counts = f"{format_count(health.retries, 'retry')}{cost}, {format_count(health.ooms, 'out-of-memory error')}{segments}"
    lines = [f"Allocator of rank {health.rank}: {counts}"]
    for flush in health.flushes[-5:]:
        phase = f", {flush.phase}" if flush.phase != UNSEEN_NAME else ""
        extra = f", {flush.extra_s:+.2f} s" if flush.extra_s is not None else ""
        freed = f"{format_gib(flush.freed_bytes)} GiB returned"
        lines.append(f"  step {flush.step}{phase}: {format_count(flush.retries, 'retry')}, {freed}{extra}")
    if health.at_peak is not None:
        peak = health.at_peak
        lines.append(
            f"  {peak.title}: {format_gib(peak.reserved_bytes)} GiB,"
            f" {format_gib(peak.unallocated_bytes)} of it not allocated ({peak.unallocated_share:.0%}),"
            f" {format_gib(peak.inactive_split_bytes)} in split blocks"
        )
    settings = health.settings
    lines.append(f"  {settings.variable}={settings.text}" if settings.variable else "  PyTorch's default configuration")
    lines += [] if settings.caching else ["  caching is off: PYTORCH_NO_CUDA_MEMORY_CACHING is set"]
    return [*lines, *_format_notes(settings.notes)]


def _format_update(rank: int, times: Mapping[str, float]) -> list[str]:
    """Return the time of each part of step(); nothing for a step without parts."""
    parts = [(name, seconds) for name, seconds in times.items() if name not in ("step_s", "gpu_idle_s")]
    if not parts:
        return []
    shares = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {seconds:.3f}" for name, seconds in parts)
    lines = [f"Inside step() of rank {rank}, median {times.get('step_s', 0.0):.3f} s: {shares} s"]
    if "gpu_idle_s" in times:
        lines.append(f"  the GPU is idle for at least {times['gpu_idle_s']:.3f} s of it")
    return lines


def _format_failure(failure: PostMortem) -> list[str]:
    rank = f"rank {failure.rank}" if failure.rank is not None else "unknown rank"
    gpu = f", GPU {failure.device}" if failure.device is not None else ""
    step = f", step {failure.step}" if failure.step is not None else ""
    step += f", micro-step {failure.micro_step}" if step and failure.micro_step is not None else ""
    phase = f", {failure.phase} in {failure.outer_phase}" if failure.phase != failure.outer_phase else f", {failure.phase}"
    outcome = {True: "; the job went on training", False: "; the job ended", None: ""}[failure.survived]
    lines = [f"Out of memory: {rank}{gpu}{step}{phase if failure.phase else ''}{outcome}"]
    if failure.rows is not None:
        lines.append(f"  last micro-batch: {describe_batch(failure.rows, failure.sequence)}")
    if failure.spans:
        spans = ", ".join(f"{s.phase}{' (failed)' if s.failed else ''} {s.seconds:.3f} s" for s in failure.spans[-6:])
        lines.append(f"  last phases: {spans}")
    if failure.kind in ("host", "killed") and failure.host_memory:
        used = ", ".join(format_gib(sample.used_bytes) for sample in failure.host_memory[-8:])
        lines.append(f"  host memory in the last seconds: {used} of {format_gib(failure.host_memory[-1].limit_bytes)} GiB")
    return [*lines, f"  {failure.cause}", f"  {failure.advice}", *([f"    {failure.fix}"] if failure.fix else [])]


def _format_estimates(report: MemoryReport) -> list[str]:
    view = report.view
    if view.setup is None or not view.estimates:
        return []
    rows = [("DeepSpeed's own estimates, without activations", "GiB per GPU", "GiB per node", "")]
    for estimate in view.estimates:
        label, this_job = f"  stage {estimate.stage}, {estimate.option_text}", estimate in view.own_estimates
        sizes = format_gib(estimate.gpu_bytes), format_gib(estimate.host_bytes)
        rows.append((label, *sizes, "this job" if this_job else ""))
    missing = ["Estimates for stage 3 need the largest layer's size, which was not recorded."]
    return [*align_columns(rows, "<>><"), *_format_notes(missing if view.setup.largest_layer is None else [])]


def _format_notes(notes: Iterable[str]) -> list[str]:
    return [f"  {note}" for note in dict.fromkeys(notes) if note]
