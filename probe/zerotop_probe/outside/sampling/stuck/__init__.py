"""Stacks read by py-spy: of ranks whose Python does not run, and of loader workers while their rank waits for data."""
