"""The timeline's own words, explained in two lines each."""

from __future__ import annotations

TERMS: tuple[tuple[str, str], ...] = (
    (
        "rank 0, rank 1",
        "What each rank did: the innermost phase it was in, in its colour; the chosen rank first (up and down choose).\n"
        "Of a cell that holds several phases the longest is seen; a tall ribbon then shows the share of each.",
    ),
    (
        "GPU, cores",
        "Share of time in which a kernel ran, and cores in use; bright the chosen rank's, dim those of its host's others.\n"
        "Faint above: the highest value within the cell, so that no spike is lost however far you zoom out.",
    ),
    (
        "alloc, reserved, process",
        "GPU memory: in live tensors, held by PyTorch, and used by the job's processes as NVML says.\n"
        "The bright line is the highest allocated, exact to the byte, even between two samples.",
    ),
    (
        "RSS, all ranks, host",
        "Host memory where there is no GPU: resident for the chosen rank, for all ranks of its host,\n"
        "and in use on the host by anyone.",
    ),
    (
        "PCIe ↑ ↓",
        "Bytes per second to the host (↑: gradients that are offloaded) and from it (↓: parameters coming back),\n"
        "between two looks at the GPU's counters, which are up to half a second apart.",
    ),
    (
        "iteration",
        "Seconds from the end of a step to the end of the next one, over the time that it took.\n"
        "The rows below number the steps where they begin, and count the time since the recording began.",
    ),
    (
        "◆",
        "Something was found: its mark is where it could first be known. n and p go from one to the next,\n"
        "a lists all with their numbers.",
    ),
    (
        "[ ]",
        "A range of time: [ begins it at the cursor, ] ends it, dragging the mouse does both. The last row then says\n"
        "how long it is, its steps, the time in each phase, and mean and highest of each lane. Escape forgets it.",
    ),
)
