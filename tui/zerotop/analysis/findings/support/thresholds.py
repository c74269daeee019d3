"""Thresholds that several modules use, each with its unit and its reason. The others are beside their detector."""

from __future__ import annotations

from zerotop.analysis.formatting import GIB, MIB

# Iterations shorter than this (seconds) vary by the host's jitter; nobody trains a model of that size for its speed.
SHORTEST_ITERATION_S = 0.005
# Steps in which a job still compiles, chooses kernels, and fills queues and caches. A change of pace among them is a warning
# only with a cause or a line.
WARM_UP_STEPS = 20
# Two steps in a row that take this share of the job's time are a change of pace, not a pause.
FAR_SHARE = 0.5
# Changes of pace that were found within so many steps of each other, and lead the same way, are one.
NEAR_STEPS = 30
# The most steps that the figures of ranks beside each other are of: the last ones.
RECENT_STEPS = 64
# Where batches grow, time for each token or row that rises up to this many times is what they cost: larger ones fit caches
# less, and attention to longer sequences takes longer.
MOST_UNIT_TIMES = 1.25
# Of a single jump to larger batches or inputs: time that grows by at most this power of their growth, for the same reasons.
ABOUT_AS_MUCH = 1.25
# Seconds of a step between its phases that are worth a finding.
BETWEEN_SECONDS = 0.005
# Seconds of a step spent waiting that are worth a finding.
STALL_SECONDS = 0.02
# Share of an iteration that waiting for data takes; loaders that keep up take under 2 %.
STALL_SHARE = 0.20
# How much longer than the second longest a straggling rank's own work takes, as a share of the iteration.
STRAGGLER_SHARE = 0.15

# A condition holds when most samples show it, and did not when few did.
MOST_SHARE, FEW_SHARE = 0.5, 0.1

# --- optimizer on the CPU ------------------------------------------------------------------------------------------------

# Real steps that are averaged. The first real one creates the optimizer state and is left out.
SPIKE_STEPS = 3
# A gap below a fifth of the iteration or 20 ms is not visible, and removing it gains nothing.
SPIKE_SHARE = 0.20
SPIKE_GAP_S = 0.02
# Durations are similar within this share of their median.
SPIKE_SIMILAR_SHARE = 0.30

# --- memory --------------------------------------------------------------------------------------------------------------

# A change of memory larger than one or two cuBLAS workspaces.
JUMP_BYTES = 256 * MIB
# Steps that show a plateau.
PLATEAU_STEPS = 3
# Total growth larger than buffers that are allocated once.
CREEP_BYTES = 64 * MIB
# Worth a finding: this unallocated share of the reserved memory, at the peak.
FRAGMENTED_SHARE = 0.25
# Another process's memory on a GPU of the job: more than the context of an idle process (0.5 GiB).
OTHERS_BYTES = 1 * GIB
# Another process computes on a GPU if it uses this share of its time (percent): an idle one is measured as 0 or 1.
COMPUTING_PERCENT = 5.0
# Share of a device from which its memory may become short. If less was ever used, nothing has to be saved.
USED_SHARE = 0.7
# A rise of resident memory by this much is no cache that fills up.
HOST_GROWTH_BYTES = 256 * MIB

# --- findings that last -------------------------------------------------------------------------------------------------

# Their figures are looked at again after this part of more steps, and shown if they differ by this share.
MORE_STEPS, SHOWN_SHARE = 4, 0.02

# --- cores ---------------------------------------------------------------------------------------------------------------

# Other processes take a node's cores when they use this share of them, the ranks wait for as much, and hardly any core is
# idle. A monitor, a shell and a file system take a few percent.
TAKEN_SHARE = 0.25
TAKEN_BUSY_SHARE = 0.90

# NVML's throttle reasons that slow a GPU down against its will.
THROTTLE_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "hardware power brake",
}
SLOWED_MASK = sum(THROTTLE_REASONS)
# A rank computes if it uses, or waits for, this many cores: waiting for a lock, a read or time.sleep takes none.
BUSY_CORES = 0.2
