"""Rank processes and hosts at a cursor: which exist and are alive, their phase and GPU. Steps are in ``steps``."""
