"""The memory screen's terms, explained in two lines each."""

from __future__ import annotations

from zerotop.ui.dialogs.help_terms import SIZES_TERM

TERMS: tuple[tuple[str, str], ...] = (
    SIZES_TERM,
    (
        "now, at peak",
        "Each row at the cursor, and when a rank on this GPU had allocated the most so far. After the job it is the end of\n"
        "the last step, or the failure, and the heading says so: zerotop memory prints the same figures.\n"
        "Rows add up to the sums below them, and to the whole device, to the byte.",
    ),
    (
        "expected, difference",
        "The size by ZeRO's formulas for this stage, offload, dtype and number of ranks, without DeepSpeed by the\n"
        "optimizers' classes; and measured minus expected.\n"
        'Gradients exist from the backward pass to the update. "freed" means that there are none now.\n'
        "Outdated: memory has changed since the tensors of these rows were counted, so that no difference is told.",
    ),
    (
        "DeepSpeed's estimate",
        "DeepSpeed's own estimate for parameters, gradients, master weights and optimizer state, beside the measured\n"
        "sizes. It does not include activations.",
    ),
    (
        "rule of thumb",
        "parameters + optimizer + the larger of activations and (gradients + the update's buffers),\n"
        "from the sizes after an update and the highest peaks of forward and of the update, beside the highest peak of a\n"
        "step. Where that is not the peak of the other rows, as in an evaluation, its phase is named. It is left out where\n"
        "their peak is in several phases of other steps, whose batch may be another one.",
    ),
    (
        "master weights, state",
        "The optimizer's fp32 copy of the parameters, and its moments: 4 and, with Adam, 8 bytes per parameter,\n"
        "partitioned among the ranks. With offload they are in host memory, which H shows.",
    ),
    (
        "frozen parameters",
        "Parameters without gradients, such as the base of a LoRA fine-tune, and quantized ones. Only without DeepSpeed.",
    ),
    (
        "DDP gradient buckets",
        "The copies of the gradients that DistributedDataParallel reduces. gradient_as_bucket_view=True saves them.",
    ),
    (
        "DeepSpeed buffers",
        "Buckets and flat buffers that DeepSpeed keeps for communication and offload.\n"
        "reduce_bucket_size, allgather_bucket_size and similar options set their sizes.",
    ),
    (
        "kept by the script",
        "Tensors in variables of the script, such as a list of outputs, when these were last searched, now and then.",
    ),
    (
        "grown since step 9",
        "What steps have left behind since tensors were counted, or the variables that keep them: a leak, as a rule.",
    ),
    (
        "activations, temporaries",
        "All other allocated memory: what forward keeps for backward, and the kernels' workspaces.\n"
        "Gradient checkpointing and smaller micro-batches reduce it.",
    ),
    (
        "unexplained",
        "Blocks that were there before the first forward and belong to no tensor of what trains, such as another model\n"
        "that the script keeps on the GPU. Otherwise rarely more than a few MiB.",
    ),
    (
        "reserved, unallocated",
        "Memory that PyTorch has reserved but not allocated: its cache, and fragments too small to use.\n"
        "If it is large when memory runs out, expandable_segments:True helps.",
    ),
    (
        "outside PyTorch",
        "Other device memory of the job's processes, from NVML: CUDA context, NCCL, cuBLAS, kernels.",
    ),
    (
        "Peak by phase",
        "The most memory allocated in each phase, from the allocator's own counter, and its step; 6/2 is micro-step 2\n"
        "of step 6. For a rank entered late, all time before is one phase. To lower the peak, reduce the first phase.",
    ),
    (
        "microscope",
        "Every allocation and free of one step: a curve of the bytes that tensors requested, in the phases' colours,\n"
        "and the largest blocks that were alive at its peak.",
    ),
    (
        "peak of step 4, by line",
        "Where the memory of a step's peak was allocated: the probe looks by itself after the first steps, at new peaks\n"
        "and when memory creeps. Blocks that backward allocates have no line.",
    ),
    (
        "what if",
        "The recorded training at another stage, offload, batch, length or number of GPUs: measured, plus what the\n"
        "formulas say differs. The same as zerotop what-if, which --explain gives each row its formula.",
    ),
    (
        "cache flushes",
        "Allocations that succeeded only after PyTorch freed its cache; each one stalls the GPU.\n"
        "Reduce the micro-batch size, or set expandable_segments:True.",
    ),
    (
        "pages of files",
        "Of the rank's host memory: libraries, and data it has mapped, such as memmap, Arrow or safetensors files.\n"
        "The kernel gives these pages back when memory is short, so they are no leak.",
    ),
    (
        "DataLoader workers",
        "Memory that only these processes have, beyond the resident sum. Forked workers share the rank's pages at first,\n"
        "and get a copy of each page in which they touch an object.",
    ),
    (
        "pinned beyond tensors",
        "PyTorch rounds each pinned allocation up to a power of two, and keeps freed blocks. Pinned batches are here, too.\n"
        "pin_memory: false in the offload section avoids this, but makes copies slower.",
    ),
)
