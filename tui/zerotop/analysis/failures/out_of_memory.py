"""The post-mortem of a job that ran out of memory, on a GPU or on the host.

Three witnesses: the rank, which records the allocator's last words before the exception leaves PyTorch; the job's output,
which has what PyTorch, NCCL, cuBLAS or the launcher printed; and the sampler, which saw signals, the kernel's count of kills
and the last seconds of host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerotop.analysis.failures.last_spans import LastSpan, find_largest_batch, find_outermost, read_last_spans
from zerotop.analysis.failures.oom_context import FailureScene, find_last_scene, has_survived
from zerotop.analysis.failures.oom_evidence import OomCase
from zerotop.analysis.failures.oom_kills import JobDeath, find_death, read_last_seconds
from zerotop.analysis.failures.oom_log_parser import CUDA, HOST, KILLED, ErrorText, parse_output
from zerotop.analysis.failures.oom_reasons import choose_verdict
from zerotop.analysis.keys import GpuKey
from zerotop.analysis.memory.allocator_settings import parse_settings
from zerotop.analysis.memory.gpu_ledger import find_holders, read_gpu_by_allocator, read_ledgers
from zerotop.analysis.memory.host_ledger import PINNED_SPARE, read_host_ledgers
from zerotop.analysis.memory.ledger_rows import OTHERS
from zerotop.analysis.memory.tensor_inventory import CATEGORIES, read_inventory
from zerotop.analysis.processes.alive_ranks import RankProcess, identify_process, read_events
from zerotop.analysis.processes.host_memory import HostMemory
from zerotop.session.reader import Event, Session
from zerotop_probe.recording.events import OUT_OF_MEMORY

# What of the job's output is read: the tracebacks of many ranks.
_OUTPUT_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class PostMortem:
    """One failure for want of memory. Bytes; None where nobody said."""

    kind: str  # "cuda", "cuda_driver", "nccl", "cublas", "host", "killed": see oom_text
    witness: str  # "rank", "output" or "sampler"
    unix_ns: int | None
    rank: int | None
    host: str
    device: int | None  # NVML's index where that is known, else the process's own ordinal
    survived: bool | None  # whether the rank trained on; None while that is not known
    failures: int  # how often ranks have run out of GPU memory so far
    requested_bytes: int | None
    limit_bytes: int | None  # what the process may use of the device, or of host memory
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    inactive_split_bytes: int | None
    largest_free_block_bytes: int | None
    others_bytes: int | None  # of the device, by other processes
    phase: str  # the innermost, "" between phases
    outer_phase: str  # the outermost: a forward may be an evaluation's
    step: int | None
    micro_step: int | None
    rows: int | None  # of the last micro-batch
    sequence: int | None
    tokens: int | None
    spans: tuple[LastSpan, ...]  # the last, oldest first
    host_memory: tuple[HostMemory, ...]  # the last seconds before, oldest first
    oom_kills: int  # processes that the kernel killed for memory
    signal: str | None  # that ended the job's command
    exit_code: int | None
    text: str  # the error as printed; "" where the output has none
    cause: str  # one sentence or two that follow from the numbers
    advice: str  # one sentence
    setting: str  # what the advice is to change, by its exact name
    confidence: float  # 0 to 1: how sure the cause is; what was measured is not in doubt


def find_post_mortem(session: Session, cursor_ns: int) -> PostMortem | None:
    """The failure that matters at the cursor: what ended the job if something did, else the last one. None without any."""
    events = [e for e in session.events if e.name == OUT_OF_MEMORY and e.unix_ns <= cursor_ns]
    end = find_death(session, cursor_ns)
    if end is not None and end.kills:
        return _explain_kill(session, cursor_ns, end, len(events))
    text = parse_output(session.read_output_tail(cursor_ns, _OUTPUT_BYTES).decode("utf-8", "replace"))
    if events:
        return _explain_recorded(session, cursor_ns, events, text, end)
    if text is not None and text.kind != KILLED:
        return _explain_output(session, cursor_ns, text, end)
    if end is not None and end.memory_was_short and (text is not None or end.was_killed):
        return _explain_kill(session, cursor_ns, end, 0)
    return None


# --- the witnesses -------------------------------------------------------------------------------------------------------


def _explain_recorded(
    session: Session, cursor_ns: int, events: Sequence[Event], text: ErrorText | None, end: JobDeath | None
) -> PostMortem:
    """The rank's own record: of the failure that nobody survived if there is one, else of the last."""
    told = [(event, has_survived(session, event, cursor_ns)) for event in events]
    event, survived = next(((one, lived) for one, lived in told if lived is False), told[-1])
    said = text if text is not None and text.kind == CUDA and survived is not True else None
    return _explain_event(session, event, cursor_ns, said, end, survived=survived, failures=len(events))


def explain_at_error(session: Session, event: Event) -> PostMortem:
    """What a rank's record of an error said when it was made: nothing is known yet of what came of it."""
    return _explain_event(session, event, event.unix_ns, None, None, survived=None, failures=1)


def _explain_event(
    session: Session,
    event: Event,
    cursor_ns: int,
    text: ErrorText | None,
    end: JobDeath | None,
    *,
    survived: bool | None,
    failures: int,
) -> PostMortem:
    process = RankProcess(event.host, event.pid, event.rank)
    facts = {name: value for name, value in event.facts.items() if isinstance(value, int)}
    phase = str(event.facts.get("phase") or "")
    outer = find_outermost(session, process, event.unix_ns, cursor_ns) or phase
    scene = FailureScene(
        process, event.unix_ns, phase, outer, facts, read_last_spans(session, process, event.unix_ns, cursor_ns)
    )
    case = _build_case(session, scene, CUDA, facts, text)
    return _build_post_mortem(session, "rank", scene, case, text, end, survived=survived, failures=failures)


def _explain_output(session: Session, cursor_ns: int, text: ErrorText, end: JobDeath | None) -> PostMortem:
    """The output alone: nobody in the rank was asked, or somebody beside PyTorch's allocator failed."""
    scene = find_last_scene(session, cursor_ns, text.rank, text.device)
    sizes = ("requested_bytes", "free_bytes", "allocated_bytes", "reserved_bytes")
    facts = {name: size for name in sizes if (size := getattr(text, name)) is not None}
    limit = text.allowed_bytes or text.total_bytes
    case = _build_case(session, scene, text.kind, facts | ({"limit_bytes": limit} if limit else {}), text)
    return _build_post_mortem(session, "output", scene, case, text, end, survived=False if end is not None else None)


def _explain_kill(session: Session, cursor_ns: int, end: JobDeath, failures: int) -> PostMortem:
    """The sampler: a rank was killed from outside."""
    scene = find_last_scene(session, cursor_ns, end.rank, None)._replace(at_ns=end.unix_ns)
    last = max(end.memory, key=lambda sample: sample.used_bytes, default=None)
    facts = {"limit_bytes": last.limit_bytes, "host_used": last.used_bytes} if last is not None else {}
    case = _build_case(session, scene, KILLED, {**facts, "killed": end.kills}, None)
    return _build_post_mortem(session, "sampler", scene, case, None, end, survived=False, failures=failures)


# --- what they know ------------------------------------------------------------------------------------------------------


def _build_case(
    session: Session, scene: FailureScene, kind: str, facts: Mapping[str, int], text: ErrorText | None
) -> OomCase:
    process = scene.process
    engines = read_events(session, "engine", process, scene.at_ns) if process is not None else []
    hello = read_events(session, "hello", process, scene.at_ns) if process is not None else []
    said: Mapping[str, Any] = hello[-1].facts if hello else {}
    torch = str(said.get("torch") or "")
    memory = read_last_seconds(session, process.host, scene.at_ns) if process is not None and kind == HOST else ()
    total = _find_total_bytes(engines[-1].facts) if engines else None
    return OomCase(
        kind=kind,
        requested=facts.get("requested_bytes"),
        limit=memory[-1].limit_bytes if memory else facts.get("limit_bytes"),
        total=total or (text.total_bytes if text is not None else None),
        free=facts.get("free_bytes"),
        allocated=facts.get("allocated_bytes"),
        reserved=facts.get("reserved_bytes"),
        largest_block=facts.get("largest_free_block_bytes"),
        inactive_split=facts.get("inactive_split_bytes"),
        others=_sum_others(session, scene, text) if kind not in (HOST, KILLED) else None,
        model_states=_sum_model_states(session, scene),
        phase=scene.outer_phase,
        rows=scene.facts.get("rows"),
        sequence=scene.facts.get("sequence"),
        tokens=scene.facts.get("tokens"),
        largest=find_largest_batch(session, process, scene.at_ns) if process is not None else {},
        host_used=memory[-1].used_bytes if memory else facts.get("host_used"),
        pinned_spare=sum(held.sum_bytes(PINNED_SPARE) for held in read_host_ledgers(session, scene.at_ns)),
        kill_count=facts.get("killed", 0),
        torch=torch,
        settings=parse_settings(said.get("environment") or {}, torch) if hello else None,
        engine=engines[-1].facts if engines else {},
    )


def _find_total_bytes(engine: Mapping[str, Any]) -> int | None:
    sizes = [device.get("total_bytes") for device in engine.get("devices") or []]
    return next((size for size in sizes if isinstance(size, int)), None)


def _sum_model_states(session: Session, scene: FailureScene) -> int | None:
    told = read_inventory(session, scene.process, scene.at_ns) if scene.process is not None else None
    return sum(told.device.get(name, 0) for name in CATEGORIES) if told is not None else None


def _sum_others(session: Session, scene: FailureScene, text: ErrorText | None) -> int | None:
    """What processes that are not this one hold of its device, other ranks among them."""
    if text is not None and text.process_bytes is not None:
        return sum(size for _, size in text.others)
    key = _find_gpu_key(session, scene)
    for found in read_ledgers(session, scene.at_ns):
        if (found.host, found.index) == key and found.job_bytes is not None:
            beside = (
                h.reserved_bytes for h in find_holders(session, scene.at_ns).get(key, ()) if h.process != scene.process
            )
            return found.sum_bytes(OTHERS) + sum(beside)
    return None


def _find_gpu_key(session: Session, scene: FailureScene) -> GpuKey | None:
    for place, key in read_gpu_by_allocator(session, scene.at_ns).items():
        if identify_process(session.sources["allocator"][place]) == scene.process:
            return key
    return None


def _build_post_mortem(
    session: Session,
    witness: str,
    scene: FailureScene,
    case: OomCase,
    text: ErrorText | None,
    end: JobDeath | None,
    *,
    survived: bool | None,
    failures: int = 0,
) -> PostMortem:
    key, host = _find_gpu_key(session, scene), scene.process.host if scene.process is not None else ""
    rank = scene.process.rank if scene.process is not None else text.rank if text is not None else None
    why = choose_verdict(case)
    return PostMortem(
        kind=case.kind,
        witness=witness,
        unix_ns=scene.at_ns if scene.process is not None or end is not None else None,
        rank=rank if rank is not None or end is None else end.rank,
        host=host or (end.host if end is not None else ""),
        device=key[1] if key is not None else scene.facts.get("device"),
        survived=survived,
        failures=failures,
        requested_bytes=case.requested,
        limit_bytes=case.limit,
        free_bytes=case.free,
        allocated_bytes=case.allocated,
        reserved_bytes=case.reserved,
        inactive_split_bytes=case.inactive_split,
        largest_free_block_bytes=case.largest_block,
        others_bytes=case.others,
        phase=scene.phase,
        outer_phase=scene.outer_phase,
        step=scene.facts.get("step"),
        micro_step=scene.facts.get("micro_step"),
        rows=case.rows,
        sequence=scene.facts.get("sequence"),
        tokens=case.tokens,
        spans=scene.spans,
        host_memory=read_last_seconds(session, host or (end.host if end is not None else ""), scene.at_ns),
        oom_kills=end.kills if end is not None else 0,
        signal=end.signal if end is not None else None,
        exit_code=end.exit_code if end is not None else None,
        text=text.text if text is not None else "",
        cause=why.cause,
        advice=why.advice,
        setting=why.setting,
        confidence=why.confidence,
    )
