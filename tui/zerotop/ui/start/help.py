"""The start screen's terms, explained in two lines each."""

from __future__ import annotations

from zerotop.ui.dialogs.help_terms import LEFT_OUT_TERM, SIZES_TERM

START_TERMS: tuple[tuple[str, str], ...] = (
    (
        "state",
        "live: the job is running. exit 1: its exit code. GPU memory, host memory: it ran out of that memory.\n"
        "end unseen: the exit status is unknown. unrecorded: the job is running here but is not being recorded.",
    ),
    (
        "ZeRO",
        "The stage, and what is offloaded where: opt is the optimizer, par the parameters, all both."
        " Without DeepSpeed: DDP, FSDP or FSDP2.",
    ),
    ("s/it, it/s", "Seconds per iteration, or iterations per second: the median, on the lowest rank. U switches."),
    SIZES_TERM,
    LEFT_OUT_TERM,
    (
        "peak",
        "The most memory that PyTorch's allocator held on any rank's GPU; host: without GPUs, the largest rank's memory.",
    ),
    (
        "iterations",
        "Time of each iteration, from zero, the newest at the right; a cell with several shows the longest.\n"
        "If the first one is longer than all others it is a warm-up: grey, and cut off.",
    ),
    ("packed", "A name ending in .zerotop is a single small file. It opens like any recording and is easy to share."),
)
