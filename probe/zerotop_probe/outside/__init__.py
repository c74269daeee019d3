"""The agent process on each node: launches or attaches to the job, samples NVML and /proc, records the output."""
