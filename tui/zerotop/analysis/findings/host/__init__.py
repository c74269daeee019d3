"""Detectors of findings about the node: cores, NUMA binding, host memory. Threads of one rank are in ``analysis.ranks``."""
