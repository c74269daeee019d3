"""The start screen's own words, explained in two lines each."""

from __future__ import annotations

from zerotop.ui.dialogs.help_terms import SIZES_TERM

START_TERMS: tuple[tuple[str, str], ...] = (
    (
        "state",
        "live: the job runs. exit 1: its exit code. GPU memory, host memory: it ran out of that.\n"
        "end unseen: the recording stops without anybody having seen why. unrecorded: it runs here, and nobody records it.",
    ),
    (
        "ZeRO",
        "The stage, and what is offloaded where: opt is the optimizer, par the parameters, all both.",
    ),
    (
        "s/it, it/s",
        "Seconds an iteration takes, or iterations a second: the median of all, on the lowest rank. U switches.",
    ),
    SIZES_TERM,
    (
        "peak",
        "The most that PyTorch's allocator held on the GPU of any rank; host: without GPUs, the largest rank's memory.",
    ),
    (
        "iterations",
        "Time of each iteration on a scale from zero, the newest at the right; of several in one cell the longest.\n"
        "A first one that is longer than all others is grey and cut: it warms up.",
    ),
    (
        "packed",
        "A name that ends in .zerotop is one small file: it opens like any other, and can be sent.",
    ),
)
