"""Limits the size of a recording: folds old records to one a step and a minute, and deletes them. A process of its own.

This is the only part of the probe that reads a recording.
"""
