"""Samplers of a node: GPUs (NVML), processes and threads (/proc), host. Writes tables; starts nothing."""
