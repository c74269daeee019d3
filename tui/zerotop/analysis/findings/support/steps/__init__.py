"""Patterns over a rank's steps: runs of flags, onsets of changes, lost time, skipped fp16 steps. Names no cause."""
