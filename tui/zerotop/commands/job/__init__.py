"""Steering running jobs: launching, watching, attaching the probe, remote nodes. Samplers are in the probe."""
