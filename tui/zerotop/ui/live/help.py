"""The live screen's terms, explained in two lines each."""

from __future__ import annotations

from zerotop.ui.dialogs.help_terms import COUNTED_TERM, LEFT_OUT_TERM, PACE_TERM, SIZES_TERM

TERMS: tuple[tuple[str, str], ...] = (
    (
        "step",
        "One optimizer step: a forward and backward pass for each accumulated micro-batch, then the update.\n"
        "Numbered from 0 as in DeepSpeed: after step 23, 24 are done. × marks an update skipped after an fp16 overflow.",
    ),
    PACE_TERM,
    (
        "MFU",
        "Model FLOPs utilization: 6 FLOPs for each parameter and token (4 if it is frozen), by the 16-bit peak of all\n"
        "ranks' GPUs. There is none of fp32, of mixtures of experts, and of GPUs whose peak is unknown.",
    ),
    (
        "micro-batch 2 × accumulation 1 × 8 ranks",
        "Samples per rank and pass, gradient accumulation steps, and ranks; short: mb2 ga1 ×8.\n"
        "The product is the number of samples per update. Where it changed, the step from which on it is so follows.",
    ),
    SIZES_TERM,
    LEFT_OUT_TERM,
    (
        "allocated, reserved",
        "PyTorch's own figures: bytes allocated to live tensors, and bytes reserved from the driver.\n"
        "Reserved but unallocated memory is cache; the thin lines are the peaks so far.\n"
        "Where ranks share a GPU, their peaks are added, though they may be of different moments.",
    ),
    (
        "used",
        "Device memory in use, from NVML. What is used but not reserved by PyTorch:\n"
        "CUDA contexts, NCCL, cuBLAS workspaces, and other users' processes.",
    ),
    (
        "RSS, shared",
        "A rank's resident host memory; shared is the part in shared segments, which often hold pinned buffers.\n"
        "The host's bar also includes all other processes.",
    ),
    (
        "pinned",
        "Host memory locked for fast copies to a GPU. Offloading needs a lot of it, and it cannot be swapped out.",
    ),
    (
        "Iteration",
        "One column per step, the newest at the right, with its phases stacked: data, forward, backward, step, rest.\n"
        "Of several ranks it shows the chosen one, else one that delays the others, else the first.\n"
        "▲ marks a column taller than the chart; its phases keep their shares of it.",
    ),
    (
        "loss",
        "The loss that the training logged last, and its trend from the first one on, as the Trainer, Lightning or\n"
        "DeepSpeed's monitor has it, else as the job prints it. The timeline has gradient norm and learning rate too.",
    ),
    COUNTED_TERM,
    (
        "outside DeepSpeed",
        "The rest of an iteration: logging, callbacks, evaluation, checkpoints, and waiting for data outside the engine.\n"
        "For loops without DeepSpeed it is called between the phases, in narrow columns outside.",
    ),
    (
        "between stages",
        "In a pipeline: waiting for other stages, and exchanging activations and gradients with them.",
    ),
    (
        "cores, runnable",
        "Cores in use, and threads that ran or were ready to run but had no core: means over the last second.\n"
        "Where runnable exceeds cores, threads compete for cores.",
    ),
    (
        "last 24 s",
        "The recent history of the figure beside it: one column per half second, the newest at the right.\n"
        "A rank's columns have the colours of its phases; a full column is the rank's fair share of the host's cores.",
    ),
    (
        "26 s ago, now",
        "Recent memory: of the GPU that holds the most, or of all ranks on the host.\n"
        "Colours match the bars above; each half second shows its highest sample.",
    ),
    (
        "now",
        "The innermost phase the rank is in, and for how long.\n"
        "A rank that stays in a phase far longer than the others is hanging, or the others wait for it.",
    ),
    (
        "GPU %",
        "Share of the last 200 ms in which any kernel ran: 100 % does not mean that the GPU is full.\n"
        "Beside it are power, temperature, and PCIe traffic from device to host (D2H) and back (H2D), in GB/s.",
    ),
    (
        "findings, ▼, ◆",
        "What happened and why, in the line under the header; ▼ marks its step, ◆ the time it was detected.\n"
        "Yellow costs time or memory, red is a failure. a lists all findings with advice; n and p go to each.",
    ),
    (
        "watching costs",
        "The share of the time that zerotop takes, by its own measurement, and the seconds of one-time work, such\n"
        "as counting all tensors. Short steps are recorded in less detail to keep to the budget (--budget).\n"
        "Lost records could not be written, for example because the disk was full.",
    ),
    (
        "LIVE, −0:42, REPLAY",
        "Whether you see the present, a past moment of a live job, or a finished recording.\n"
        "You can go to any moment; f or end returns to the latest.",
    ),
)
