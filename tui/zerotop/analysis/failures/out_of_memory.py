"""The post-mortem of a job that ran out of memory, on a GPU or on the host.

There are three sources: the rank, which records the allocator's figures before the exception leaves PyTorch; the job's
output, with messages of PyTorch, NCCL, cuBLAS or the launcher; and the sampler, which records signals, the kernel's count of
kills and the last seconds of host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.code_line import read_line
from zerotop.analysis.failures import last_moments
from zerotop.analysis.failures.evaluation_memory import EvaluationGrowth, measure_growth
from zerotop.analysis.failures.oom_evidence import GraphEvidence, LeakEvidence, MemoryFigures, OomCase
from zerotop.analysis.failures.oom_log_parser import CUDA, HOST, KILLED, ErrorText, parse_output
from zerotop.analysis.failures.oom_reasons import choose_verdict
from zerotop.analysis.formatting import Text
from zerotop.analysis.memory import leak_holders
from zerotop.analysis.memory.allocator_settings import read_settings
from zerotop.analysis.memory.block_lines import Look, read_last_look
from zerotop.analysis.memory.gpu_holders import find_holders
from zerotop.analysis.memory.gpu_ledger import read_ledger
from zerotop.analysis.memory.host_ledger import PINNED_SPARE, read_host_ledgers
from zerotop.analysis.memory.kept_memory import find_leak
from zerotop.analysis.memory.ledger_rows import OTHERS
from zerotop.analysis.memory.tensor_inventory import CATEGORIES, read_inventory
from zerotop.analysis.steps.training_changes import choose_changes, describe_changes, list_changes
from zerotop.recording.keys import GpuKey, RankProcess, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import locate_allocators
from zerotop.recording.moments.host_memory import HostMemory
from zerotop.recording.moments.process_exits import ProcessExit, count_oom_kills, find_first_exit, read_exits
from zerotop.recording.moments.rank_records import add_library
from zerotop.recording.output.tail import read_output_tail
from zerotop.recording.samples import read_column
from zerotop_probe.recording import events
from zerotop_probe.recording.event_values import CREEP, EVALUATION

# How much of the output's end to read: enough for the tracebacks of many ranks.
_OUTPUT_BYTES = 1 << 18
# A change of the training in this time before a failure is worth a sentence.
_JUST_BEFORE_NS = 10_000_000_000
# Share of the memory at a failure from which on the peak of an evaluation is like it.
_RESEMBLING_SHARE = 0.6
_TEXT_SIZES = ("requested_bytes", "free_bytes", "allocated_bytes", "reserved_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PostMortem(MemoryFigures):
    """One failure for lack of memory. Bytes; None where no source says it."""

    source: str  # "rank", "output" or "sampler"
    unix_ns: int | None
    rank: int | None
    host: str
    device: int | None  # NVML's index where that is known, else the process's own ordinal
    survived: bool | None  # whether the rank trained on; None while that is not known
    failures: int  # how often ranks have run out of GPU memory so far
    phase: str  # the innermost, "" between phases
    step: int | None
    micro_step: int | None
    spans: tuple[last_moments.LastSpan, ...]  # the last, oldest first
    host_memory: tuple[HostMemory, ...]  # the last seconds before, oldest first
    oom_kills: int  # processes that the kernel killed for memory
    exit_code: int | None
    text: str  # the error as printed; "" where the output has none
    cause: str  # one sentence or two that follow from the figures
    advice: str  # one sentence
    setting: str  # exact name of the setting that the advice changes
    fix: str  # what to copy into the script, its configuration or a shell; empty if that is not known
    confidence: float  # 0 to 1: how sure the cause is; the figures are measured

    @property
    def is_on_host(self) -> bool:
        """Whether it was memory of the host that lacked."""
        return self.kind in (HOST, KILLED)


def find_post_mortem(at: At) -> PostMortem | None:
    """Return the failure that ended the job, else the last one up to the cursor; None if there is none."""
    errors = at.events_of(events.OutOfMemory)
    job_exit = find_first_exit(at)
    if job_exit is not None and not job_exit.is_final:
        job_exit = None
    if job_exit is not None and job_exit.oom_kills:
        return explain_kill(at, job_exit, len(errors))
    text = parse_output(read_output_tail(at, _OUTPUT_BYTES).decode("utf-8", "replace"))
    if errors:
        return _explain_recorded(at, errors, text, job_exit)
    if text is not None and text.kind != KILLED:
        return _explain_output(at, text, job_exit)
    if job_exit is None or (text is None and job_exit.signal_name != "SIGKILL"):
        return None
    was_short = last_moments.is_memory_short(last_moments.read_last_seconds(at.at(job_exit.unix_ns), job_exit.host))
    counted = at.records("hosts", job_exit.host).read_window(job_exit.unix_ns - 1, at.cursor_ns)
    is_sent = len(counted) > 0 and count_oom_kills(at, job_exit.host) == 0  # by another process
    return explain_kill(at, job_exit) if was_short and not is_sent else None


# --- the sources ---------------------------------------------------------------------------------------------------------


def _explain_recorded(
    at: At, errors: Sequence[events.OutOfMemory], text: ErrorText | None, job_exit: ProcessExit | None
) -> PostMortem:
    """Explain an error from the rank's own record: the one that it did not survive, else the last one."""
    fates = [(error, _has_survived(at, error)) for error in errors]
    error, survived = next((fate for fate in fates if fate[1] is False), fates[-1])
    own_text = text if text is not None and text.kind == CUDA and survived is not True else None
    return _explain_error(at, error, own_text, job_exit, survived=survived, failures=len(errors))


def _has_survived(at: At, error: events.OutOfMemory) -> bool | None:
    """Return whether the rank that recorded an error trained on; None while that is not known."""
    if last_moments.has_worked_after(at, RankProcess(*error.process_key, error.writer.rank), error.unix_ns):
        return True
    exits = read_exits(at)
    return None if exits.find_exit_after(error.writer.host, error.writer.pid, error.unix_ns) is None else False


def explain_at_error(at: At, error: events.OutOfMemory) -> PostMortem:
    """Return the post-mortem as known at or soon after the time when a rank recorded an ``out_of_memory`` event."""
    return _explain_error(at, error, None, None, survived=None, failures=1)


def _explain_error(
    at: At,
    error: events.OutOfMemory,
    text: ErrorText | None,
    job_exit: ProcessExit | None,
    *,
    survived: bool | None,
    failures: int,
) -> PostMortem:
    process = RankProcess(*error.process_key, error.writer.rank)
    facts: events.OutOfMemoryFacts = error
    phase = error.phase or ""
    outer_phase = last_moments.find_outermost(at.at(error.unix_ns), process) or phase
    spans = last_moments.read_last_spans(at, process, error.unix_ns)
    # In a counted step the batch is unknown, or that of a variable, of which the script may have cut a token.
    batch = last_moments.find_failed_batch(at, process, error.unix_ns)
    if not batch and outer_phase == "eval":
        batch = last_moments.find_evaluated_batch(at, process, error.unix_ns)
    if not batch and error.rows is not None and error.micro_step is None:
        batch = last_moments.find_cut_batch(at.at(error.unix_ns), process, error)
    if batch:
        facts = events.OutOfMemoryFacts({**error.facts, **batch})
    if (
        not phase
        and (failed := last_moments.find_failed_spans([span for span in spans if span.begin_ns >= error.unix_ns]))
        is not None
    ):
        phase, outer_phase = failed[0].phase, failed[1].phase  # in a counted step
    scene = last_moments.FailureScene(process, error.unix_ns, phase, outer_phase, facts, spans)
    found = _Found(at.at(scene.at_ns), "rank", CUDA, scene, facts, text, job_exit)
    return _build_post_mortem(found, survived=survived, failures=failures)


def _explain_output(at: At, text: ErrorText, job_exit: ProcessExit | None) -> PostMortem:
    """The output alone: the rank recorded nothing, or the memory was not for PyTorch's allocator."""
    scene = last_moments.find_last_scene(at, text.rank, text.device)
    facts = {name: getattr(text, name) for name in _TEXT_SIZES}
    facts["limit_bytes"] = text.allowed_bytes or text.total_bytes
    survived = False if job_exit is not None else None
    return _build_post_mortem(
        _Found(at.at(scene.at_ns), "output", text.kind, scene, events.OutOfMemoryFacts(facts), text, job_exit),
        survived=survived,
    )


def explain_kill(at: At, job_exit: ProcessExit, failures: int = 0) -> PostMortem:
    """Explain the end of a rank that was killed for lack of host memory, from what its sampler has seen."""
    scene = last_moments.find_last_scene(at, job_exit.rank, None)._replace(at_ns=job_exit.unix_ns)
    memory = last_moments.read_last_seconds(at.at(job_exit.unix_ns), job_exit.host)
    most = max(memory, key=lambda sample: sample.used_bytes, default=None)
    found = _Found(at.at(scene.at_ns), "sampler", KILLED, scene, events.OutOfMemoryFacts({}), None, job_exit, most)
    return _build_post_mortem(found, survived=False, failures=failures)


# --- figures -------------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What the source of a failure says about it."""

    at: At  # the moment of ``scene``
    source: str  # rank, output or sampler
    kind: str
    scene: last_moments.FailureScene
    facts: events.OutOfMemoryFacts
    text: ErrorText | None
    job_exit: ProcessExit | None
    fullest: HostMemory | None = None  # the last second in which the host held most, if the kernel killed a process


def _build_post_mortem(found: _Found, *, survived: bool | None, failures: int = 0) -> PostMortem:
    at, source, kind, scene, _, text, job_exit, _ = found
    process, gpu_key = scene.process, _find_gpu_key(at, scene.process)
    host = process.host if process is not None else job_exit.host if job_exit is not None else ""
    rank = process.rank if process is not None else text.rank if text is not None else None
    case = _build_case(found)
    figures: dict[str, Any] = {field.name: getattr(case, field.name) for field in fields(MemoryFigures)}
    verdict = choose_verdict(case)
    look = read_last_look(at, process) if process is not None and kind == CUDA else None
    tells = look is not None and (case.leak is None or look.why == CREEP) and _resembles(look, case)
    if look is not None and tells and (lines := look.describe_lines()) is not None:
        verdict = verdict._replace(cause=Text("{cause} {lines}", {"cause": verdict.cause, "lines": lines}))
    return PostMortem(
        **figures,
        **verdict._asdict(),
        source=source,
        unix_ns=scene.at_ns if process is not None or job_exit is not None else None,
        rank=rank if rank is not None or job_exit is None else job_exit.rank,
        host=host,
        device=gpu_key[1] if gpu_key is not None else scene.facts.device,
        survived=survived,
        failures=failures,
        phase=scene.phase,
        step=scene.facts.step,
        micro_step=scene.facts.micro_step,
        spans=scene.spans,
        host_memory=last_moments.read_last_seconds(at, host),
        oom_kills=job_exit.oom_kills if job_exit is not None else 0,
        exit_code=job_exit.exit_code if job_exit is not None else None,
        text=text.text if text is not None else "",
    )


def _resembles(look: Look, case: OomCase) -> bool:
    """Whether the lines of a look may be those of the failure: not of an evaluation that held much less."""
    held = case.allocated_bytes or 0
    return case.growth is None and (look.why != EVALUATION or look.whole_bytes >= _RESEMBLING_SHARE * held)


def _build_case(found: _Found) -> OomCase:
    at, _, kind, scene, facts, text, job_exit, host = found
    process = scene.process
    engines = at.process_events(events.Engine, process) if process is not None else []
    planned = at.process_events(events.TotalSteps, process) if process is not None else []
    engine = add_library(engines[-1] if engines else None, planned)
    hello = at.process_events(events.Hello, process) if process is not None else []
    if process is not None and kind == HOST:
        host = next(reversed(last_moments.read_last_seconds(at, process.host)), None)
    return OomCase(
        kind=kind,
        requested_bytes=facts.requested_bytes,
        limit_bytes=host.limit_bytes if host is not None else facts.limit_bytes,
        free_bytes=facts.free_bytes,
        allocated_bytes=facts.allocated_bytes,
        reserved_bytes=facts.reserved_bytes,
        inactive_split_bytes=facts.inactive_split_bytes,
        largest_free_block_bytes=facts.largest_free_block_bytes,
        others_bytes=_sum_others(at, process, text) if kind not in (HOST, KILLED) else None,
        outer_phase=scene.outer_phase,
        rows=scene.facts.rows,
        sequence=scene.facts.sequence,
        tokens=scene.facts.tokens,
        total_bytes=_find_total_bytes(engine) or (text.total_bytes if text is not None else None),
        model_states_bytes=_sum_model_states(at, process),
        largest_batch=last_moments.find_largest_batch(at, process) if process is not None else {},
        host_used_bytes=host.used_bytes if host is not None else None,
        pinned_spare_bytes=sum(ledger.sum_bytes(PINNED_SPARE) for ledger in read_host_ledgers(at)),
        kill_count=job_exit.oom_kills if job_exit is not None and kind == KILLED else 0,
        has_workers=process is None or _has_workers(at, process),
        has_begun=any(span.phase != "init" for span in scene.spans),
        torch=hello[-1].torch or "" if hello else "",
        settings=read_settings(hello[-1]) if hello else None,
        engine=engine,
        leak=_find_leak(at, process) if process is not None and kind not in (HOST, KILLED) else None,
        growth=_measure_growth(at, scene, facts) if kind == CUDA else None,
        graphs=_find_graphs(scene),
        changes=_describe_changes(at, process) if process is not None else "",
    )


def _has_workers(at: At, process: RankProcess) -> bool:
    samples = at.records("processes", process.host, "pid", process.pid).read_window(0, at.cursor_ns)
    counts = read_column(samples.rows, "loader_workers") if len(samples) else np.empty(0)
    return bool(counts.max(initial=0) > 0 or counts.max(initial=-1) < 0)


def _find_leak(at: At, process: RankProcess) -> LeakEvidence | None:
    """Return the memory that a rank's steps have left behind, its holder or the line that allocated it, and what helps."""
    source = at.find_table("allocator", process)
    leak = find_leak(source, at.cursor_ns) if source is not None else None
    if leak is None:
        return None
    searched = next((event for event in reversed(at.process_events(events.Tensors, process)) if event.held), None)
    if searched is not None and searched.allocated_bytes is not None:
        leaked = min(leak.bytes, searched.allocated_bytes - leak.base_bytes)
        if (holder := leak_holders.choose_holder(searched, leaked)) is not None:
            return LeakEvidence(
                *leak[:3], f" {leak_holders.describe_holder(holder)}", holder.name, leak_holders.advise_on_holder(holder)
            )
    if last_moments.have_batches_grown(at, process, leak.since_step):
        return None  # outputs that the script still holds grow with them
    look = read_last_look(at, process)
    blocks = look.blocks[0] if look is not None and look.why == CREEP and look.blocks else None
    if look is not None and blocks is not None and blocks.line is not None and 2 * blocks.total_bytes >= look.whole_bytes:
        return LeakEvidence(*leak[:3], "", blocks.line.place, leak_holders.advise_on_line(blocks.line.place))
    return LeakEvidence(*leak[:3], "", "", leak_holders.LeakAdvice(leak_holders.FIND_HOLDER, ""))


def _measure_growth(at: At, scene: last_moments.FailureScene, facts: events.OutOfMemoryFacts) -> EvaluationGrowth | None:
    if scene.outer_phase != "eval" or scene.process is None or not facts.allocated_bytes:
        return None
    return measure_growth(at, scene.process, scene.at_ns, facts.allocated_bytes)


def _find_graphs(scene: last_moments.FailureScene) -> GraphEvidence | None:
    """Return what is recorded of the evaluation's forwards that had gradients enabled."""
    graphs = scene.facts.evaluation_graphs
    if scene.outer_phase != "eval" or graphs is None or not graphs.forwards:
        return None
    line = read_line(graphs)
    return GraphEvidence(graphs.forwards, line.text if line is not None else "")


def _describe_changes(at: At, process: RankProcess) -> str:
    """Return what changed in the training in the last seconds before a failure; "" without a change."""
    spans = at.find_table("spans", process)
    found = list_changes(at.process_events(events.TrainingChanged, process), spans.offset_ns if spans is not None else 0)
    return describe_changes(choose_changes(found, at.cursor_ns - _JUST_BEFORE_NS, at.cursor_ns, at.cursor_ns))


def _find_total_bytes(engine: events.EngineFacts) -> int | None:
    sizes = [device.total_bytes for device in engine.devices or []]
    return next((size for size in sizes if isinstance(size, int)), None)


def _sum_model_states(at: At, process: RankProcess | None) -> int | None:
    inventory = read_inventory(at, process, at_failure=True) if process is not None else None
    return sum(inventory.device.get(name, 0) for name in CATEGORIES) if inventory is not None else None


def _sum_others(at: At, process: RankProcess | None, text: ErrorText | None) -> int | None:
    """Return the bytes of the device that other processes hold, other ranks among them."""
    if text is not None and text.process_bytes is not None:
        return sum(size for _, size in text.others)
    key = _find_gpu_key(at, process)
    if key is None:
        return None
    holders = find_holders(at, [key]).get(key, [])
    ledger = read_ledger(at, key, holders)
    if ledger is None or ledger.job_bytes is None:
        return None
    return ledger.sum_bytes(OTHERS) + sum(h.reserved_bytes for h in holders if h.process != process)


def _find_gpu_key(at: At, process: RankProcess | None) -> GpuKey | None:
    return next((key for source, key in locate_allocators(at).items() if identify_process(source) == process), None)
