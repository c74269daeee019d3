"""Stacks that py-spy reads: of ranks whose Python does not run, and of loader workers while their rank waits for data."""
