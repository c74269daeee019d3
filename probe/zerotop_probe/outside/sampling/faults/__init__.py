"""Hardware faults of GPUs: events and counters of NVML, and calls of it that do not return. No screen, no judgement."""
