"""The section about memory: the fullest GPU as a bar and a table, then all GPUs and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from zerotop.analysis.formatting import GIB, format_bytes, format_ranks
from zerotop.analysis.live_view import Gpu
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.memory.memory_table import MemoryLine
from zerotop.analysis.reports.recording_report import RecordingReport
from zerotop.report.elements import Content, Element, element, table
from zerotop.ui.memory.ledger_style import PART_STYLES

_UNKNOWN = "–"
_MOST_GPUS = 16


def build_memory(report: RecordingReport) -> Element | None:
    """Return the section; None where no memory was recorded."""
    parts = [*_iter_gpu(report), *_iter_host(report)]
    return element("section", element("h2", "Where the memory is"), parts, id="memory") if parts else None


def _iter_gpu(report: RecordingReport) -> Iterator[Element]:
    memory = report.memory
    if memory.gpu is not None:
        ranks = f", {format_ranks(memory.gpu.ranks)}" if memory.gpu.ranks else ""
        yield element("h3", f"GPU {memory.gpu.index}{ranks}, {memory.moment_text}")
        yield element("p", f"{memory.gpu.name}: the rows add up to {format_bytes(memory.gpu.total_bytes)}.", class_="muted")
        yield _build_bar(memory.gpu)
        yield _build_lines(memory.lines, "source")
        yield from _iter_notes((*(row.note for row in memory.gpu.rows), *memory.gpu.notes))
    known = [gpu for gpu in report.view.gpus if gpu.reserved_peak_bytes is not None]
    if len(known) > 1:
        fullest = sorted(known, key=lambda gpu: gpu.reserved_peak_bytes or 0, reverse=True)[:_MOST_GPUS]
        title = f"Peaks of the {_MOST_GPUS} fullest of {len(known)} GPUs" if len(known) > _MOST_GPUS else "Peaks of all GPUs"
        yield element("h3", title)
        yield _build_peaks([gpu for gpu in known if gpu in fullest])


def _iter_notes(notes: Iterable[str]) -> Iterator[Element]:
    """Yield the sentences that add to the rows, each once."""
    for note in dict.fromkeys(filter(None, notes)):
        yield element("p", note, class_="muted")


def _build_bar(gpu: GpuLedger) -> Element:
    """Return the device as one bar, its rows from left to right as in the table."""
    shown = [row for row in gpu.rows if row.bytes > 0]
    total = sum(row.bytes for row in shown) or 1
    order = list(PART_STYLES)
    parts = [
        element(
            "i",
            style=f"flex:{row.bytes / total:.5f};background:var(--{_find_colour(row.key)})",
            title=f"{row.describe()}: {format_bytes(row.bytes)}",
        )
        for row in sorted(shown, key=lambda row: order.index(row.key) if row.key in order else len(order))
    ]
    return element("div", parts, class_="bar", role="img", aria_label="the rows of the table as parts of one bar")


def _find_colour(key: str) -> str:
    style = PART_STYLES.get(key, "memory-other")
    return "free" if style == "memory-free" else style


def _build_lines(lines: Sequence[MemoryLine], basis: str) -> Element:
    has_peak = any(line.peak_bytes is not None for line in lines)
    has_expected = any(line.expected_bytes is not None for line in lines)
    head: list[Content] = ["", "GiB", *(["at the peak"] if has_peak else ()), *(["expected"] if has_expected else ())]
    head.append(element("span", basis, class_="basis"))
    return table(head, (_build_line(line, has_peak, has_expected) for line in lines), class_="ledger")


def _build_line(line: MemoryLine, has_peak: bool, has_expected: bool) -> Element:
    key = None if line.is_sum else element("i", class_="swatch", style=f"background:var(--{_find_colour(line.key)})")
    cells = [element("th", key, line.describe(), scope="row"), _build_size(line.now_bytes)]
    cells += [_build_size(line.peak_bytes)] if has_peak else []
    if has_expected:
        cells.append(element("td") if line.is_sum else _build_size(line.expected_bytes))
    return element("tr", cells, element("td", line.basis, class_="basis"), **({"class_": "sum"} if line.is_sum else {}))


def _build_size(size: int | None) -> Element:
    return element("td", _UNKNOWN if size is None else f"{size / GIB:.2f}", class_="number")


def _build_peaks(gpus: Sequence[Gpu]) -> Element:
    hosts = len({gpu.host for gpu in gpus}) > 1
    head = ["GPU", "allocated", "reserved", "of device, GiB"]
    rows = (
        element(
            "tr",
            element("th", f"{gpu.host}, {gpu.index}" if hosts else str(gpu.index), " ", gpu.name, scope="row"),
            _build_size(gpu.allocated_peak_bytes),
            _build_size(gpu.reserved_peak_bytes),
            _build_size(gpu.total_bytes),
        )
        for gpu in gpus
    )
    return table(head, rows, class_="ledger")


def _iter_host(report: RecordingReport) -> Iterator[Element]:
    memory = report.memory
    if memory.host is not None and memory.host_lines:
        yield element("h3", f"Host memory of rank {memory.host.rank}, {memory.moment_text}")
        yield _build_lines(memory.host_lines, "source")
        yield from _iter_notes(memory.host.notes)
