"""Controlling running jobs: launch, watch, attach the probe, reach other nodes. The samplers are in the probe package."""
