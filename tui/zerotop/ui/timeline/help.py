"""The timeline's terms, explained in two lines each."""

from __future__ import annotations

from zerotop.ui.timeline.lanes import OTHER_METRICS
from zerotop_probe.recording.metrics import Metric
from zerotop_probe.recording.tables import TABLES


def _find_meaning(metric: Metric) -> str:
    columns = (column for table in TABLES.values() if metric in table.metrics for column in table.fields)
    text = next(column.meaning for column in columns if column.name == metric.column)
    return f"{text[0].upper()}{text[1:]}."


TERMS: tuple[tuple[str, str], ...] = (
    (
        "rank 0, rank 1",
        "Each rank's innermost phase, in its colour, with the chosen rank first (up and down choose).\n"
        "A cell with several phases shows the longest; a tall ribbon then shows the share of each.",
    ),
    (
        "GPU, cores",
        "Share of time in which a kernel ran, and cores in use: bright for the chosen rank, dim for its host's others.\n"
        "The faint part above is the highest value in the cell, so that spikes stay visible when you zoom out.",
    ),
    (
        "allocated, reserved, process",
        "GPU memory: allocated to live tensors, reserved by PyTorch, and used by the job's processes (from NVML).\n"
        "The bright line is the peak of allocated memory, exact to the byte even between two samples.",
    ),
    (
        "RSS, all ranks, host",
        "Host memory, where there is no GPU: resident for the chosen rank, resident for all ranks of its host,\n"
        "and used by all processes on the host.",
    ),
    (
        "PCIe D2H, H2D",
        "Bytes per second from device to host (D2H, gradients) and back (H2D, updated parameters), averaged between\n"
        "two samples of the GPU's counters, which are up to half a second apart.",
    ),
    *((metric.label, _find_meaning(metric)) for metric in OTHER_METRICS),
    (
        "iteration",
        "Seconds from the end of one step to the end of the next, drawn over that time.\n"
        "The rows below show step numbers where the steps begin, and the time since the recording began.",
    ),
    (
        "◆",
        "A finding, at the first moment it could be detected. n and p go to the next and the previous one,\n"
        "a lists them all.",
    ),
    (
        "GPU faults",
        "What NVML reported of any GPU: Xids, memory errors, links that are down. Only there if it reported something.",
    ),
    (
        "[ ]",
        "A range of time: [ begins it at the cursor, ] ends it; dragging the mouse does both. The last row then shows\n"
        "its length, steps, time in each phase, and the mean and highest value of each lane. Escape clears it.",
    ),
)
