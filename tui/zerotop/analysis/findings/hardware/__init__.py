"""Findings about faults of the hardware: Xids, memory errors and links of GPUs, and a driver that does not answer."""
