"""Jobs that died of a signal or of an error of their own: which rank was the first, where it was, and what it said."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from zerotop.analysis.failures.failure import ERROR, SIGNAL, ByteFigure, Failure, describe_place
from zerotop.analysis.failures.last_spans import LastSpan, find_outermost, read_last_spans
from zerotop.analysis.failures.oom_kills import JobDeath, read_last_seconds
from zerotop.analysis.processes.alive_ranks import RankProcess, find_table, identify_process
from zerotop.analysis.processes.host_memory import HostMemory
from zerotop.session.reader import Event, Session
from zerotop_probe.recording.tables import FAILED

_OUTPUT_BYTES = 1 << 18
_TAIL = 256
# A line that names an exception, as Python prints it, with what launchers and ranks put before it.
_EXCEPTION_LINE = re.compile(
    r"^(?:\[rank(\d+)\]:\s*)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?::\s*(.+))?)\s*$"
)
_ADVICE = {
    "SIGKILL": (
        "Nobody says who sent it: dmesg, the scheduler's log and other users of the node may. Trainer's save_steps bounds"
        " what such an end loses.",
        "save_steps",
    ),
    "SIGTERM": (
        "Mostly a scheduler's time limit or somebody's kill. Trainer's save_steps bounds what such an end loses.",
        "save_steps",
    ),
    "SIGBUS": (
        "Mostly /dev/shm is full: start the container with a larger --shm-size, or load data with dataloader_num_workers 0.",
        "--shm-size",
    ),
}
_DEFAULT_ADVICE = "Its last output and dmesg may say why; Trainer's save_steps bounds what such an end loses.", "save_steps"


# --- killed --------------------------------------------------------------------------------------------------------------


def find_signal(end: JobDeath) -> str | None:
    """The signal that ended the job, or a rank of it: DeepSpeed's launcher ends with a rank's code, which is below zero."""
    if end.signal:
        return end.signal
    code = end.exit_code
    if code is None:
        return None
    # Many programs end with -1, of which 255 is left: that is no signal.
    number = code - 128 if 128 < code <= 128 + 64 else 256 - code if 256 - 64 <= code < 255 else 0
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def build_signal_failure(session: Session, cursor_ns: int, gone_event: Event, end: JobDeath | None) -> Failure:
    rank, pid = (end.rank if end is not None else gone_event.facts.get("rank")), gone_event.facts.get("pid")
    name = find_signal(end) if end is not None else None
    spans = _read_rank_spans(session, gone_event.host, rank, pid, gone_event.unix_ns, cursor_ns)
    who = f"Rank {rank}'s process {pid}" if rank is not None else "The job"
    what = f"was ended by {name}" if name else "was gone without having ended in good order"
    where = (
        _describe_last_place(session, RankProcess(gone_event.host, pid, rank), gone_event.unix_ns, cursor_ns)
        if rank is not None and pid
        else ""
    )
    advice, setting = _ADVICE.get(name or "", _DEFAULT_ADVICE)
    memory = end.memory if end is not None else read_last_seconds(session, gone_event.host, gone_event.unix_ns)
    return Failure(
        kind=SIGNAL,
        unix_ns=gone_event.unix_ns,
        rank=rank,
        what=f"{who} {what}{where}.",
        where=f"on {gone_event.host}" if gone_event.host else "",
        why=_describe_host_memory(memory),
        numbers=_build_host_figures(memory),
        advice=advice,
        setting=setting,
        spans=spans,
        host_memory=memory,
        last_words="",
        final=end is not None,
        memory=None,
    )


def _describe_host_memory(memory: Sequence[HostMemory]) -> str:
    shares = [sample.used_bytes / sample.limit_bytes for sample in memory if sample.limit_bytes]
    if not shares:
        return "Nothing is known of the node's memory in its last seconds."
    return f"Not for want of memory, as far as was seen: at most {max(shares) * 100:.0f} % of the node's was in use."


def _describe_last_place(session: Session, process: RankProcess, at_ns: int, cursor_ns: int) -> str:
    """The phase that a process was in when it was gone, or the last one before."""
    begins = find_table(session, "begins", process, at_ns)
    known = begins.count_until(at_ns) if begins is not None else 0
    if begins is None or not known:
        return ""
    phase, step = find_outermost(session, process, at_ns, cursor_ns), int(begins.array["step"][known - 1])
    if phase:
        return describe_place(phase, phase, step)
    return _describe_failed_place(read_last_spans(session, process, at_ns, cursor_ns))


def _build_host_figures(memory: Sequence[HostMemory]) -> tuple[ByteFigure, ...]:
    most = max(memory, key=lambda sample: sample.used_bytes, default=None)
    return (ByteFigure("host memory in use", most.used_bytes, most.limit_bytes),) if most is not None else ()


def _read_rank_spans(
    session: Session, host: str, rank: int | None, pid: int | None, at_ns: int, cursor_ns: int
) -> tuple[LastSpan, ...]:
    if rank is None or pid is None:
        return ()
    return read_last_spans(session, RankProcess(host, pid, rank), at_ns, cursor_ns)


# --- failed by itself ----------------------------------------------------------------------------------------------------


def build_error_failure(session: Session, cursor_ns: int, end: JobDeath, text: str) -> Failure:
    first = _find_first_failed(session, cursor_ns)
    output = session.read_output_tail(cursor_ns, _OUTPUT_BYTES).decode("utf-8", "replace")
    words = find_last_words(output, first.rank if first is not None else None)
    spans = read_last_spans(session, first, end.unix_ns, cursor_ns) if first is not None else ()
    job = text.rstrip(".") or f"The job failed with exit code {end.exit_code}"
    who = f"Rank {first.rank} failed" if first is not None else job
    return Failure(
        kind=ERROR,
        unix_ns=end.unix_ns,
        rank=first.rank if first is not None else None,
        what=f"{who}{_describe_failed_place(spans)}.",
        where=first.host if first is not None else end.host,
        why=f"{words.rstrip('.')}." if words else "Its output names no exception.",
        numbers=(),
        advice="Its output has the traceback." if words else "Its last output may say why.",
        setting="",
        spans=spans,
        host_memory=(),
        last_words=words,
        final=True,
        memory=None,
    )


def _find_first_failed(session: Session, cursor_ns: int) -> RankProcess | None:
    """The rank whose phase was the first that an exception left, at its end."""
    found: list[tuple[int, RankProcess]] = []
    for source in session.sources["spans"]:
        tail = source.until(cursor_ns)[-_TAIL:]
        failed = tail[tail["flags"] & FAILED != 0]
        if len(failed) and failed["end_ns"][-1] == tail["end_ns"].max():
            found.append((int(failed["end_ns"][-1]) + source.offset_ns, identify_process(source)))
    return min(found)[1] if found else None


def find_last_words(output: str, rank: int | None) -> str:
    """The exception that a job's output names last, of that rank where ranks are told apart; "" where there is none."""
    found = [match for line in output.splitlines() if (match := _EXCEPTION_LINE.match(line))]
    mine = [match for match in found if match[1] is not None and int(match[1]) == rank]
    chosen = mine or found
    return " ".join(chosen[-1][2].split()) if chosen else ""


def _describe_failed_place(spans: Sequence[LastSpan]) -> str:
    """Where an exception left the phases that it was in."""
    failed = [span for span in spans if span.failed]
    if not failed:
        whole = [span for span in spans if not span.depth]
        return (
            f" after{describe_place(whole[-1].phase, whole[-1].phase, whole[-1].step).removeprefix(' in')}" if whole else ""
        )
    inner, outer = max(failed, key=lambda span: span.depth), min(failed, key=lambda span: span.depth)
    return describe_place(inner.phase, outer.phase, inner.step)
