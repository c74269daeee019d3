"""Failures of jobs that a signal or an error of their own ended: the first rank, its phase, and its last output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerotop.analysis.engine import read_first_engine
from zerotop.analysis.failures.attempts import Attempt
from zerotop.analysis.failures.failure import ERROR, SIGNAL, ByteFigure, Failure, describe_place
from zerotop.analysis.failures.last_moments import (
    LastSpan,
    find_failed_spans,
    find_outermost,
    read_last_seconds,
    read_last_spans,
)
from zerotop.analysis.failures.rank_ends import RankEnd, find_last_exception, find_output_file, read_printed_ends
from zerotop.analysis.formatting import format_ranks
from zerotop.analysis.script_terms import read_terms
from zerotop.session.keys import RankProcess, identify_process
from zerotop.session.moments.at import At
from zerotop.session.moments.host_memory import HostMemory
from zerotop.session.moments.process_exits import ProcessExit, find_first_exit, find_signal_name
from zerotop_probe.recording.events import JobEnded
from zerotop_probe.recording.tables import FAILED

_TAIL = 256
_ADVICE = {
    "SIGKILL": (
        "Look for the sender of the signal in dmesg and the scheduler's log, or ask the node's other users. {saving_limits}"
        " how much is lost.",
        "{saving}",
    ),
    "SIGTERM": ("Usually a scheduler's time limit or a manual kill. {saving_limits} how much is lost.", "{saving}"),
    "SIGBUS": (
        "Usually /dev/shm is full: start the container with a larger --shm-size, or set {worker_count} to 0.",
        "--shm-size",
    ),
}
_DEFAULT_ADVICE = "Check its last output and dmesg. {saving_limits} how much is lost.", "{saving}"


# --- killed --------------------------------------------------------------------------------------------------------------


def build_signal_failure(at: At, process_exit: ProcessExit, end: RankEnd | None) -> Failure:
    """Return the failure of a job whose rank vanished, or whose command was ended by a signal.

    ``end``: how the first rank ended, if its launcher or a sampler saw it.
    """
    host, at_ns, rank, pid = process_exit[:4]
    alongside = end.alongside if end is not None else ()
    if end is not None:
        host, pid, rank = end.process
    spans: tuple[LastSpan, ...] = ()
    place = ""
    if rank is not None and pid is not None:
        spans, place = _read_last_place(at, RankProcess(host, pid, rank), at_ns)
    if any(_read_last_place(at, other, at_ns)[1] != place for other in alongside):
        place = ""
    name = _find_signal(process_exit, end)
    who = f"Rank {rank} (PID {pid})" if rank is not None else "The job"
    if end is not None and alongside:
        who = f"{end.who[0].upper()}{end.who[1:]}" if name else format_ranks(end.ranks).capitalize()
    what = f"was killed by {name}" if name else "died unexpectedly"
    if not name and read_printed_ends(at).stopped_ns is not None:
        what, name = "ended when a signal told its launcher to stop", "SIGTERM"
    advice, setting = _ADVICE.get(name or "", _DEFAULT_ADVICE)
    file = find_output_file(at, end.process) if end is not None and not alongside else None
    terms, memory = read_terms(read_first_engine(at)), read_last_seconds(at.at(at_ns), host)
    return Failure(
        kind=SIGNAL,
        unix_ns=at_ns,
        rank=rank if not alongside else None,
        what=f"{who} {what}{place}.",
        where=f"on {host}" if host else "",
        why=f"{end.order_sentence if end is not None else ''} {_describe_host_memory(memory)}".lstrip(),
        numbers=_build_host_figures(memory),
        advice=advice.format_map(terms) + (f" Its last output is in {file}." if file else ""),
        setting=setting.format_map(terms),
        spans=spans if not alongside else (),
        host_memory=memory,
        last_words="",
        final=process_exit.is_final,
        memory=None,
    )


def _find_signal(process_exit: ProcessExit, end: RankEnd | None) -> str | None:
    """Return the signal that ended the rank or the job. The launcher's message decides whether there was one."""
    if end is None or end.report is None:
        return process_exit.signal_name
    return end.signal_name or process_exit.signal or find_signal_name(end.report.exit_code)


def _read_last_place(at: At, process: RankProcess, at_ns: int) -> tuple[tuple[LastSpan, ...], str]:
    """Return the last phases of a process, and a description of the phase in or after which it vanished."""
    spans = read_last_spans(at, process, at_ns)
    begins = at.at(at_ns).find_table("begins", process)
    begun = begins.until(at_ns) if begins is not None else None
    if begun is None or not len(begun):
        return spans, ""
    phase = find_outermost(at.at(at_ns), process)
    if phase:
        return spans, describe_place(phase, phase, int(begun[-1]["step"]))
    return spans, _describe_failed_place(spans)


def _describe_host_memory(memory: Sequence[HostMemory]) -> str:
    shares = [sample.used_bytes / sample.limit_bytes for sample in memory if sample.limit_bytes]
    if not shares:
        return "The node's memory was not sampled in its last seconds."
    return f"Host memory was fine: {max(shares) * 100:.0f} % in use in the last seconds."


def _build_host_figures(memory: Sequence[HostMemory]) -> tuple[ByteFigure, ...]:
    most = max(memory, key=lambda sample: sample.used_bytes, default=None)
    return (ByteFigure("host memory in use", most.used_bytes, most.limit_bytes),) if most is not None else ()


# --- failed by itself ----------------------------------------------------------------------------------------------------


def build_error_failure(at: At, process_exit: ProcessExit, end: RankEnd | None) -> Failure:
    """Return the failure of a job that ended by itself with an exit code other than 0.

    ``end``: how the first rank ended, as far as known.
    """
    first = end.process if end is not None else _find_first_failed(at)
    traceback = end.traceback if end is not None else find_last_exception(at)
    words = traceback.text if traceback is not None else ""
    place = f", at {traceback.place}" if traceback is not None and traceback.place else ""
    spans = read_last_spans(at, first, process_exit.unix_ns) if first is not None else ()
    ended = at.events_of(JobEnded)
    text = ended[-1].text or "" if ended else ""
    host = first.host if first is not None else process_exit.host
    file = find_output_file(at, first) if first is not None else None
    where = f", in {file}," if file else ""
    job = text.rstrip(".") or f"The job failed with exit code {process_exit.exit_code}"
    return Failure(
        kind=ERROR,
        unix_ns=process_exit.unix_ns,
        rank=first.rank if first is not None else None,
        what=f"{f'Rank {first.rank} failed' if first is not None else job}{_describe_failed_place(spans)}.",
        where=f"on {host}" if host else "",
        why=f"{words.rstrip('.')}{place}." if words else "Its output names no exception.",
        numbers=(),
        advice=f"Its output{where} has the traceback." if words else f"Its last output{where} may say why.",
        setting="",
        spans=spans,
        host_memory=(),
        last_words=words,
        final=True,
        memory=None,
    )


def build_attempt_failure(at: At, attempt: Attempt) -> Failure:
    """Return the failure of a job whose last attempt ended before it trained."""
    process_exit = find_first_exit(at) or ProcessExit("", attempt.known_ns)
    process_exit = process_exit._replace(unix_ns=attempt.known_ns)
    failure = build_error_failure(at, process_exit, attempt.end)
    rank = attempt.end.process.rank if attempt.end is not None else attempt.processes[0].rank
    what = f"Rank {rank} failed in attempt {attempt.number} before its first step."
    return replace(failure, what=what, why=failure.why if failure.last_words else f"It ended with {attempt.cause}.")


def _find_first_failed(at: At) -> RankProcess | None:
    """Return the rank whose last phase was the first to end by an exception."""
    failures: list[tuple[int, RankProcess]] = []
    for source in at.sources["spans"]:
        tail = source.until(at.cursor_ns)[-_TAIL:]
        failed = tail[tail["flags"] & FAILED != 0]
        if len(failed) and failed["end_ns"][-1] == tail["end_ns"].max():
            failures.append((int(failed["end_ns"][-1]) + source.offset_ns, identify_process(source)))
    return min(failures)[1] if failures else None


def _describe_failed_place(spans: Sequence[LastSpan]) -> str:
    """Return in words the phase that an exception left, or the last one before."""
    if (failed := find_failed_spans(spans)) is not None:
        inner, outer = failed
        return describe_place(inner.phase, outer.phase, inner.step)
    last = next((span for span in reversed(spans) if not span.depth), None)
    return f" after{describe_place(last.phase, last.phase, last.step).removeprefix(' in')}" if last is not None else ""
