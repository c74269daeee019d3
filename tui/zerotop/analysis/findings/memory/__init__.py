"""Detectors of findings about GPU memory: growth, peaks, fragmentation, other processes. Steps in time are in ``pace``."""
