"""Launching a job and keeping its recording: agent, daemon, output, stopping. Sampling is in ``sampling``."""
