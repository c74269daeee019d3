"""Launching, recording and stopping a job: agent, daemon, output. Sampling is in ``sampling``."""
