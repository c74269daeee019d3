"""Patterns over a rank's steps: runs of flags, onsets of changes, lost time, the steps that fp16 skips. Names no cause."""
