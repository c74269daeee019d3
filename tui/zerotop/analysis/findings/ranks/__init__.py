"""Detectors of findings about single ranks: stragglers, hangs, deaths. Crash evidence is in ``analysis.failures``."""
