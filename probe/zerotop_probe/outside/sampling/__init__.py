"""Samplers of a node: GPUs (NVML), processes and threads (/proc), host. They write tables and start folding."""
