"""The rare facts: every event's name and what it carries besides ``time_ns`` and ``event``.

Written by :class:`~zerotop_probe.recording.writer.EventWriter` as JSON lines. A reader keeps events that it does not know.
Bytes and nanoseconds are integers. A fact that could not be had is null or absent, never guessed. Of which kind each fact is
that is read stands in :mod:`zerotop.session.event_schema` too: what is something else there counts as not known.
"""

from __future__ import annotations

# --- by a rank -----------------------------------------------------------------------------------------------------------

# The probe has woken because an engine is being made here.
# rank, local_rank, node_rank, world_size: int; launcher: str; python, torch, deepspeed, transformers, accelerate: str
# versions (transformers and accelerate only where imported); arguments: the script's own, redacted;
# environment: the few variables that steer memory and threads (PYTORCH_ALLOC_CONF, OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES...)
HELLO = "hello"

# An engine exists; its facts, once. engine: int (order of creation); engine_class, zero_stage: int;
# offload_optimizer, offload_parameters: "none" | "cpu" | "nvme"; dtype: "fp32" | "fp16" | "bf16"; micro_batch,
# gradient_accumulation, train_batch, world_size, data_parallel: int; parameters, trainable_parameters,
# rank_parameters (stage 3: elements this rank keeps), largest_layer_parameters: int; model, optimizer, inner_optimizer,
# device: str; devices: [{ordinal, uuid, name, total_bytes, visible}] of this process, uuid as NVML writes it, but that a MIG
# instance's may begin with GPU-, and visible its name in CUDA_VISIBLE_DEVICES, null without; allocator: "native" |
# "cudaMallocAsync" | "pluggable", null without CUDA; activation_checkpointing: bool;
# config: the whole effective DeepSpeed configuration, redacted; unread: {fact: error}, why one of these is null
ENGINE = "engine"

# How many optimizer steps are planned. steps: int; source: "trainer" | "config"
TOTAL_STEPS = "total_steps"

# An fp16 update was skipped. step: int; loss_scale_before, loss_scale_after: float
OVERFLOW = "overflow"

# Whose the bytes are, by storage, each counted once. engine, step: int; when: "init" | "before_update" | "after_update", the
# first of each, the last only of an update that was not skipped; host, host_pinned: {category: bytes}; unread: int, tensors
# that did not tell where they lie; seconds: float.
# Where CUDA is in use also device: {category: bytes}, sizes of the allocator's blocks; allocated_bytes: all blocks in use;
# unclaimed_bytes and unclaimed_largest: [bytes], those that belong to no category; where the allocator shows no blocks
# allocated_bytes is null and device the sizes of the storages themselves; pinned_allocator: {allocated_bytes,
# active_bytes} | null. Categories: parameters, gradients, master_weights, optimizer_state, buffers.
TENSORS = "tensors"

# PyTorch's allocator ran out of device memory, whether or not the job survives that. device: ordinal; requested_bytes;
# limit_bytes: the device's capacity, or less where the process was given a fraction; free_bytes: of the device; phase, step,
# micro_step: where it was; rows, sequence, tokens: of the last micro-batch; allocated_bytes, reserved_bytes,
# inactive_split_bytes, largest_free_block_bytes, retries, ooms: of the allocator, if it is the one being recorded
OUT_OF_MEMORY = "out_of_memory"

# A look through the microscope is over. request: int, as in the request; state: "recorded" | "refused"; why: str, where it
# was refused; first_step, steps: int; begin_ns, end_ns: CLOCK_MONOTONIC; baseline: {allocated_bytes, requested_bytes,
# reserved_bytes} at its beginning; entries: int, in the table ``history``; snapshot: the name of PyTorch's own file beside
# the recording | null; seconds: float, what writing it down took
MICROSCOPE = "microscope"

# Something inside the probe failed and was switched off; training went on. where, error: str
PROBE_ERROR = "probe_error"

# The probe was put into this rank while it ran: nothing before is recorded by it, and steps from the next whole one on.
ENTERED = "entered"

# The probe was taken out of this rank, which went on. lost: int, records that it could not write
LEFT = "left"

# The rank's interpreter ended in good order. lost: int, records that it could not write
GOODBYE = "goodbye"

# --- by a node's sampler ---------------------------------------------------------------------------------------------------

# The sampler runs. host: str; cores: int (usable by this job); memory_bytes: int; kernel, cpu: str;
# driver: str | null; gpus: [{index, uuid, name, total_bytes, mig_of}], MIG's instances numbered after the last GPU and in
# place of what they are parts of, mig_of: its uuid | null; gpu_notice: str | null, why less is seen than all, as a sentence;
# numa: [{node: int, cpus: str such as "0-31,64-95"}], which cores belong to which memory, absent in older recordings;
# sampler_pid, sampler_start: int
NODE = "node"

# The command was started. pid, start: int (start in clock ticks since boot); command: redacted
JOB_STARTED = "job_started"

# A job that somebody else had started is recorded from now on; stands in the place of JOB_STARTED. pid, start: int, of the
# launcher; command: redacted; launcher: str; age_s: float, how long it had been running; ranks: [{rank: int | null, pid,
# start: int}] of this node; text: str, one sentence about what is missing
ATTACHED = "attached"

# Somebody has ended the recording of a job that was attached to; the job goes on.
DETACHED = "detached"

# On another node of a job: its part there is recorded from now on too, as ATTACHED has it. Where that node's clock is off by
# much, the header of this event's file has aligned: true, and the unix time in it is that of the node that attached: by it
# all times of this boot are to be taken.
JOINED = "joined"

# The recording of that node's part is over: with exit_code, signal, seconds, oom_kills and text as JOB_ENDED has them that
# part of the job has ended, without them somebody has detached.
PARTED = "parted"

# Another node was reached through ssh. name: str, as ssh was told; host: str, as it calls itself; ranks: int;
# joined: bool, whether it takes part from now on, or no longer does
REACHED = "reached"

# Another node that was to take part does not. name: str, as ssh was told; why: str
NOT_REACHED = "not_reached"

# The probe is not in a rank that it was to enter. rank: int | null; pid: int; why: str, one sentence
NOT_ENTERED = "not_entered"

# A rank's process was found. rank, local_rank: int | null; pid, start: int
RANK_FOUND = "rank_found"

# A process that looks like a rank has not reported although an engine could have been made. rank, pid: int; why: str
RANK_SILENT = "rank_silent"

# Which cores a rank or launcher may run on; again when that changes. pid: int; cpus: str such as "0-15", of its first
# thread; threads: {tid: cpus} of those busy threads whose own cores were found to be others than before
AFFINITY = "affinity"

# A rank's process is gone. rank, pid: int
RANK_GONE = "rank_gone"

# A rank runs compilers, as when DeepSpeed's operators are first used. Said once. rank, pid: int
COMPILING = "compiling"

# A rank sleeps, none here compiles, and in the folder where torch builds operators for them lies a lock that no process of
# this node holds: they may wait for it without end. Said once of each. path: str
BUILD_LOCKED = "build_locked"

# Somebody asked for the job to be stopped; which signal was sent. signal: str
STOP_SENT = "stop_sent"

# The command ended. exit_code: int (128 + n after signal n) | null, not known because a sampler that had not started it
# saw it end; signal: str | null; seconds: float;
# oom_kills: int, processes of the control group that the kernel killed for memory meanwhile; text: str, one sentence
JOB_ENDED = "job_ended"

# The sampler itself failed in one of its parts; the rest goes on. where, error: str
SAMPLER_ERROR = "sampler_error"

# The sampler stops in good order, after the job. lost_records, lost_output_bytes: int, what it could not write
SAMPLER_ENDED = "sampler_ended"
