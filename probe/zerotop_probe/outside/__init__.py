"""Runs on each node beside the job, in its own process: launching, sampling NVML and /proc, its output."""
