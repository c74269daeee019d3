"""The live screen's own words, explained in two lines each."""

from __future__ import annotations

SIZES_TERM = (
    "GiB, GB",
    "1 GiB is 2^30 bytes, as PyTorch and nvidia-smi count; 1 GB is 10^9, as data sheets do. u switches all sizes.\n"
    "DeepSpeed's own lines write GB and mean GiB. Rates of PCIe are decimal always, as links are sold.",
)
PACE_TERM = (
    "s/it, it/s",
    "Seconds an iteration takes, or iterations a second: U switches. Charts of iterations stay in seconds,\n"
    "which the phases in them add up to.",
)

TERMS: tuple[tuple[str, str], ...] = (
    (
        "step",
        "One optimizer step: gradient-accumulation many forward and backward passes, then the update.\n"
        "Numbered from 0 as DeepSpeed does: after step 23, 24 are done. × marks an update that fp16 overflow skipped.",
    ),
    PACE_TERM,
    (
        "2×1×8",
        "Micro-batch per rank × gradient accumulation × ranks.\nTheir product is the number of samples behind one update.",
    ),
    SIZES_TERM,
    (
        "alloc, rsrvd",
        "PyTorch's own figures: bytes in live tensors, and bytes it holds from the driver to serve them.\n"
        "Reserved but not allocated is cache; the thin lines are the highest of each so far.",
    ),
    (
        "used, other",
        "What NVML says the device has given away. Other is used but not reserved by PyTorch:\n"
        "CUDA contexts, NCCL, cuBLAS workspaces, and other people's processes.",
    ),
    (
        "RSS, shared",
        "Host memory resident for a rank; shared is the part of it in shared segments,\n"
        "where pinned buffers often lie. The host's bar also holds everyone else's memory.",
    ),
    (
        "pinned",
        "Host memory locked for fast copies to a GPU. Offloading needs much of it,\nand what is pinned cannot be swapped.",
    ),
    (
        "Iteration",
        "One column per step, the newest at the right, its phases stacked: data, forward, backward, step,\n"
        "other. The slowest rank is shown. ▲ marks a column taller than the chart.",
    ),
    (
        "other (time)",
        "What an iteration has beyond its phases: logging, callbacks, evaluation, saving, waiting for data\n"
        "outside the engine's sight.",
    ),
    (
        "cores, busy, wait",
        "Processor time per wall time; threads that ran at least half of the time;\n"
        "and threads ready to run without a core.",
    ),
    (
        "last 24 s",
        "The figure beside it over the last while: a column for each half second, the newest at the right.\n"
        "A rank's has the colours of its phases, and is full at its fair share of the host's cores.",
    ),
    (
        "26 s ago, now",
        "Memory over the last while: of the GPU that holds the most, or of all ranks on the host.\n"
        "Colours are those of the bars above; of a half second the highest sample is shown.",
    ),
    (
        "now",
        "The innermost phase the rank is in, and for how long.\n"
        "A rank that stays far longer than the others is the one they wait for, or it hangs.",
    ),
    (
        "GPU %",
        "Share of the last 200 ms in which any kernel ran: 100 % does not mean that the GPU is full.\n"
        "Next to it power, temperature, and PCIe traffic to (↑) and from (↓) the host.",
    ),
    (
        "findings, ▼, ◆",
        "What happened and why, in the line under the header; ▼ marks its step, ◆ the moment it could be known.\n"
        "Yellow costs time or memory, red has failed. a lists all with their numbers and advice, n and p go there.",
    ),
    (
        "probe",
        "What zerotop itself takes from the training thread, measured by itself, per step and as a share.\n"
        "Records lost are facts that could not be written, for example on a full disk.",
    ),
    (
        "LIVE, −0:42, REPLAY",
        "Whether this is now, how far behind now it is, or a finished recording being played.\n"
        "Every moment can be seen again; f or end comes back to the latest.",
    ),
)
