"""What takes the time of pauses, in place of the line at which the training thread was seen: a thread, or the collector."""

from __future__ import annotations

from typing import NamedTuple

from zerotop.analysis.findings.support.causes.step_change import Advice, count_iterations, measure_collecting
from zerotop.analysis.findings.support.causes.thread_causes import advise_on_thread, list_holders
from zerotop.analysis.findings.support.evidence import Process, Rows
from zerotop.analysis.findings.support.host_load import measure_thread_use
from zerotop.analysis.formatting import format_seconds

COLLECTOR: Advice = (
    "Call gc.freeze() once model and data are loaded: the collector then visits only objects that were made later.",
    "import gc; gc.collect(); gc.freeze()",
)
# The part of a pause that one wait for Python's lock must take, and the part of all pauses of the collector's time.
_WAIT_SHARE, _COLLECTED_SHARE = 1 / 2, 1 / 2


class PauseCause(NamedTuple):
    """What takes the time of pauses."""

    text: str  # the end of a sentence
    place: str | None  # a line, for a headline
    advice: Advice


def find_pause_cause(process: Process, rows: Rows, pause_s: float, lost_s: float, known_ns: int) -> PauseCause | None:
    """Return what takes the time of pauses in some steps: of ``pause_s`` each, of ``lost_s`` in all. None if unknown."""
    collected_s = measure_collecting(process, rows) * count_iterations(rows)
    if collected_s >= _COLLECTED_SHARE * lost_s:
        text = f"Python's garbage collector takes {format_seconds(collected_s)} of them in all"
        return PauseCause(text, None, COLLECTOR)
    begin_ns, end_ns = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    holders = [one for one in list_holders(process, known_ns) if one.held_s >= _WAIT_SHARE * pause_s]
    use = measure_thread_use(process, begin_ns, end_ns, known_ns=known_ns) if holders else None
    if use is None or use.computed + use.waited > (end_ns - begin_ns) / 1e9 - lost_s / 2:
        return None  # the training thread computes in the pauses, or waits for a core
    holder = max(holders, key=lambda one: one.held_s)
    text = f"{holder.describe('', 0, holder.cores)}, for {format_seconds(holder.held_s)} at a time"
    place = holder.line.place if holder.line is not None else None
    return PauseCause(text, place, (advise_on_thread(holder), holder.fix.replace("{pid}", str(process.source.pid))))
