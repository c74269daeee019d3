"""From where on something is said. Every figure with its unit and its reason; detectors have none of their own."""

from __future__ import annotations

GIB = 1024**3
MIB = 1024**2

# --- steps ---------------------------------------------------------------------------------------------------------------

# Steps that have to agree before a level is one. Steps vary by 10 % on a busy machine, single ones by much more.
SETTLED_STEPS = 5
# A step agrees when it is within this share of the median: the noise measured between equal steps is 10 %.
AGREE_SHARE = 0.10
# Later steps that all have to lie beyond the old level: one or two slow ones in a row are common on a busy machine.
SHIFT_STEPS = 4
# In long runs chance has more tries: of as many steps as an eighth of those before, at most LEVEL_STEPS, this share has to.
SHIFT_LENGTH_SHARE = 1 / 8
SHIFT_AGREE_SHARE = 0.9
# A level has changed from this share on, and by this many times the spread of the steps before (median deviation; of
# normal noise four such are 2.7 standard deviations, and four steps in a row have to be that far on the same side).
SHIFT_SHARE = 0.10
SHIFT_SPREADS = 4.0
# How many steps a level is taken from.
LEVEL_STEPS = 20
# Iterations shorter than this (seconds) are the host's jitter; nobody trains a model that size for its speed.
SHORTEST_ITERATION_S = 0.005

# A drift is told by blocks of so many steps (their median: no single step counts) and their doublings.
TREND_BLOCK = 8
# The rise is so many times what neighbouring blocks differ by anyhow (median deviation; 6 are 4 standard deviations).
TREND_SPREADS = 6.0
# A rise that goes on is told again when it is higher by this factor.
TREND_REPEAT_FACTOR = 1.5
# Iterations: as with a shift, that much is seen. Of a change of level, the part that happens at once where it is no drift.
DRIFT_SHARE = 0.15
# So many blocks in a row, each higher by this share of what it would be if all rose alike: six in order come by chance once
# in 720 times.
DRIFT_BLOCKS = 6
DRIFT_EVENNESS = 0.2
SHIFT_SUDDEN_SHARE = 0.5

# --- optimizer offload ---------------------------------------------------------------------------------------------------

# Real steps that are averaged. The first real one builds optimizer state and is left out.
SPIKE_STEPS = 3
# Below a fifth of the iteration or 20 ms the gap does not show, and nothing is won by mending it.
SPIKE_SHARE = 0.20
SPIKE_GAP_S = 0.02
# Gaps are alike within this share of their median.
SPIKE_SIMILAR_SHARE = 0.30
# The gap is another one, to be told again, when it is longer or shorter by this factor: on a host that others use too it
# wanders by a third, and a shift of iterations is told as such.
SPIKE_REPEAT_FACTOR = 2.0

# Without a probe: cores that each rank keeps busy while its optimizer runs there, 1 being usual; utilization (percent) of
# a GPU that idles and of one that works; ticks (100 ms) until NVML, which looks back for 200 ms, tells of a stretch alone;
# memory from which on a GPU is in use, which is more than a context.
UNPROBED_CORES = 3.0
UNPROBED_IDLE_PERCENT = 20.0
UNPROBED_BUSY_PERCENT = 50.0
UNPROBED_TICKS = 3
UNPROBED_MEMORY_BYTES = 1 * GIB

# --- evaluation ----------------------------------------------------------------------------------------------------------

# What evaluation has to add to the memory held, both: a share of it, and more than a cuBLAS workspace or two.
JUMP_SHARE = 0.05
JUMP_BYTES = 256 * MIB
# Share of a device at which the next allocation may fail: the largest single ones of the recorded runs took 3 %.
EDGE_SHARE = 0.95

# --- fp16 ----------------------------------------------------------------------------------------------------------------

# Skipped steps in a row, from the first step on, after which it is said: one or two are normal with any loss scale.
SKIPPED_STEPS = 3
# Real steps that show the time after skipping has ended; the first real one is not typical and left out.
REAL_STEPS = 2

# --- memory --------------------------------------------------------------------------------------------------------------

# A plateau: as with JUMP. Steps it has to last.
PLATEAU_STEPS = 3
# Steps in which memory after the step has to grow without a break; leaks that matter do so in each.
CREEP_STEPS = 12
# Checkpoints or evaluations with each of which it grows.
CREEP_PAUSES = 4
# And by this much in all, which is more than buffers that are made once.
CREEP_BYTES = 64 * MIB
# Phases' peaks are the same within this share.
PEAK_SHARE = 0.02
# Reserved but not allocated at the peak that counts as fragmented: a quarter of what is held, where the device is short.
FRAGMENTED_SHARE = 0.25
NEARLY_FULL_SHARE = 0.80
# What a process holds outside PyTorch: context, NCCL and cuBLAS took 1.8 to 2.2 GB on the recorded H200s; twice that is odd.
OUTSIDE_BYTES = 4 * GIB
# Somebody else's memory on a GPU of the job: more than a context of an idle process (0.5 GiB).
OTHERS_BYTES = 1 * GIB

# Measured less estimated, both: less is allocation granularity and a batch's change.
GAP_BYTES = 1 * GIB
GAP_SHARE = 0.10
# A slowed clock for so long (seconds) is no passing dip.
THROTTLED_SECONDS = 5.0

# --- host ----------------------------------------------------------------------------------------------------------------

# Threads of all ranks that want to run, per core of the host, over this long; 1 is full use.
CROWDED_LOAD = 1.5
CROWDED_SECONDS = 1.0
# Of the cores, what the ranks themselves use then: where others have them, it is not the ranks' threads that are too many.
CROWDED_RANKS_SHARE = 0.6
# Others have a node's cores when they use this share of all, the ranks wait for as much, and hardly any core is idle, over
# this long (seconds) without a break. A monitor, a shell and a file system take a few percent.
TAKEN_SHARE = 0.25
TAKEN_BUSY_SHARE = 0.90
TAKEN_SECONDS = 2.0
# Resident memory that grows by as much in a rise is no cache that fills, and by this share of what there was.
HOST_GROWTH_BYTES = 256 * MIB
HOST_GROWTH_SHARE = 0.02
# Memory hardly varies, so that fewer blocks do; what fills a cache grows less and less.
HOST_GROWTH_BLOCKS = 4
HOST_GROWTH_EVENNESS = 0.8
# Share of the limit of host memory from which the kernel may soon kill.
HOST_FULL_SHARE = 0.92
# For so long (seconds); of a control group's limit ranks hold so much, so that it is not file cache, which gives way.
HOST_FULL_SECONDS = 1.0
HOST_FULL_RANKS_SHARE = 0.5
# Host memory of an offloaded optimizer: ideal bytes for each parameter, and what more is worth a word, both.
IDEAL_BYTES = 16
PINNED_SHARE = 0.15
PINNED_BYTES = 1 * GIB
# Swap that was taken since the job began: a page or two always goes.
SWAP_BYTES = 512 * MIB

# --- others --------------------------------------------------------------------------------------------------------------

# Share of iterations spent waiting for data over SETTLED_STEPS steps; loaders that keep up take under 2 %.
STALL_SHARE = 0.20
STALL_SECONDS = 0.02
# A pause for a checkpoint worth telling: longer than so many seconds and than so many iterations.
PAUSE_SECONDS = 1.0
PAUSE_ITERATIONS = 2.0
# A phase that lasts so many times the longest iteration, and longer than so many seconds, hangs.
HANG_ITERATIONS = 10.0
HANG_SECONDS = 30.0
# A rank holds the others up when its own work takes this share longer than the median rank's in SETTLED_STEPS steps.
STRAGGLER_SHARE = 0.15
