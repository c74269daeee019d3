"""The memory screen's own words, explained in two lines each."""

from __future__ import annotations

from zerotop.ui.dialogs.help_terms import SIZES_TERM

TERMS: tuple[tuple[str, str], ...] = (
    SIZES_TERM,
    (
        "now, at peak",
        "Each row at the cursor, and when a rank on this GPU had allocated the most so far.\n"
        "Rows add up to the sums under them, and all of them to the whole device, to the byte.",
    ),
    (
        "expected, difference",
        "What ZeRO's formulas say for this stage, offload, type and number of ranks; measured less expected.\n"
        "Gradients are there only from the backward to the update: freed says that they are not now.",
    ),
    (
        "DeepSpeed's estimate",
        "What DeepSpeed's own estimator says of parameters, gradients, master weights and optimizer state,\n"
        "beside what was counted of them. It knows no activations.",
    ),
    (
        "rule of thumb",
        "parameters + optimizer + the larger of (gradients + what the update needs) and activations,\n"
        "from what was measured, beside the peak.",
    ),
    (
        "master weights, state",
        "The optimizer's fp32 copy of the parameters, and its moments: 4 and, with Adam, 8 bytes a parameter,\n"
        "of which each rank has its share. With offload they lie in host memory: h shows it.",
    ),
    (
        "DeepSpeed buffers",
        "Buckets and flat buffers that DeepSpeed keeps for communication and offload.\n"
        "Their sizes are set by reduce_bucket_size, allgather_bucket_size and the like.",
    ),
    (
        "activations, temporaries",
        "Allocated but none of the above: what the forward keeps for the backward, and what kernels work with.\n"
        "Gradient checkpointing and smaller micro-batches make it less.",
    ),
    (
        "unexplained",
        "Blocks that no tensor of the engine and no known workspace accounts for.\nSeldom more than a few MiB.",
    ),
    (
        "reserved, unallocated",
        "What PyTorch has taken from the driver and does not use now: its cache, and what is too small a piece.\n"
        "If it is large when memory runs out, expandable_segments:True helps.",
    ),
    (
        "outside PyTorch",
        "What NVML says that the job's processes hold beyond that: CUDA context, NCCL, cuBLAS, kernels.",
    ),
    (
        "Peak by phase",
        "The highest that was allocated in each phase, from the allocator's own counter, and in which step; 6/2 is\n"
        "micro-step 2 of step 6. Of a rank that was entered late all before is one. To lower the peak, lower the first.",
    ),
    (
        "microscope",
        "Every allocation and free of one step as a curve of what tensors asked for, in the colours of phases;\n"
        "beside it the largest blocks that were alive at its highest point.",
    ),
    (
        "cache flushes",
        "Allocations that found no room until PyTorch had given its cache back: each stops the GPU for a while.\n"
        "Lower the micro-batch, or set expandable_segments:True.",
    ),
    (
        "pinned beyond tensors",
        "PyTorch rounds each request for pinned host memory up to a power of two, and keeps what was freed.\n"
        "pin_memory false in the offload's config avoids it, at the price of slower copies.",
    ),
)
