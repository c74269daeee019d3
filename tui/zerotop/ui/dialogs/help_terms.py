"""The terms of several screens, explained in two lines each."""

from __future__ import annotations

SIZES_TERM = (
    "GiB, GB",
    "1 GiB is 2^30 bytes, as in PyTorch and nvidia-smi; 1 GB is 10^9 bytes, as in data sheets. u switches all sizes.\n"
    "DeepSpeed's own lines write GB but mean GiB. PCIe rates are always decimal.",
)
LEFT_OUT_TERM = (
    "+3 columns, +busy",
    "In a heading: columns that are left out because there is no room for them, by number or by name.",
)
COUNTED_TERM = (
    "counted",
    "Of very short steps most are only counted, to keep to the budget: their times are exact, their phases unknown.\n"
    "They are blank in charts of phases. zerotop run --budget 100 records each step in full.",
)
PACE_TERM = (
    "s/it, it/s",
    "Seconds per iteration, or iterations per second; U switches. In the header the mean of the last ten, without the\n"
    "job's first; of an ended job the median of all that were not skipped. Tokens per second are a mean over the same\n"
    "iterations. Charts of iterations stay in seconds, like their phases.",
)
