"""Runs on each node beside the job, in its own process: launching, the NVML and /proc samplers, the job's output."""
