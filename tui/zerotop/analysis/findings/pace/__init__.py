"""Detectors of findings about iteration time: shifts, stalls, skipped steps, clocks. Ranks that wait are in ``ranks``."""
