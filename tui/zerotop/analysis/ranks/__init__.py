"""Comparison of ranks and their threads: the matrix, outliers, affinity. Finding rank processes is in ``processes``."""
