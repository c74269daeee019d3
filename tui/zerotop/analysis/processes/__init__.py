"""Rank processes and hosts at a cursor: which exist, are alive, in which phase, on which GPU. Steps are in ``steps``."""
